"""AutoGen AgentChat keeps the contract of every integration, in each kind of team."""

from __future__ import annotations

from typing import Any

from autogen_agentchat.base import ChatAgent, TaskResult, Team
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat, SelectorGroupChat

from marft_agents.testing import IntegrationContract
from tests.integrations.autogen_kit import agent, model, round_robin, said, streamed


class TestRoundRobin(IntegrationContract):
    def make_team(self, server_url: str, *, stream: bool) -> Team:
        return round_robin(server_url, stream=stream)

    async def run(self, team: Any, task: str) -> list[tuple[str, str, str]]:
        return await streamed(team.run_stream(task=task))


class TestSelector(IntegrationContract):
    def make_team(self, server_url: str, *, stream: bool) -> Team:
        names = ("planner", "coder", "critic")
        members: list[ChatAgent | Team] = [agent(n, server_url, stream=stream) for n in names]
        return SelectorGroupChat(
            members,
            model("selector", server_url),
            termination_condition=MaxMessageTermination(5),
            model_client_streaming=stream,
            emit_team_events=True,
        )

    async def run(self, team: Any, task: str) -> list[tuple[str, str, str]]:
        result: TaskResult = await team.run(task=task)
        return said(result)


class TestTeamInTeam(IntegrationContract):
    def make_team(self, server_url: str, *, stream: bool) -> Team:
        inner = round_robin(server_url, turns=2, stream=stream)
        return RoundRobinGroupChat(
            [inner, agent("critic", server_url, stream=stream)],
            termination_condition=MaxMessageTermination(5),
        )

    async def run(self, team: Any, task: str) -> list[tuple[str, str, str]]:
        result: TaskResult = await team.run(task=task)
        return said(result)
