"""The OpenAI Agents SDK keeps the contract of every integration: handoffs, agents as tools."""

from __future__ import annotations

from typing import Any

from agents import Agent

from marft_agents.testing import IntegrationContract
from tests.runtimes.kit import calls_once
from tests.runtimes.openai_agents.kit import agent, play


class _Played(IntegrationContract):
    stream = False

    def make_team(self, server_url: str, *, stream: bool) -> Agent[Any]:
        self.stream = stream
        return self.make_agents(server_url)

    def make_agents(self, url: str) -> Agent[Any]:
        raise NotImplementedError

    async def run(self, team: Any, task: str) -> list[Any]:
        return await play(team, task, stream=self.stream)


class TestHandoff(_Played):
    script = staticmethod(calls_once({"planner": ("transfer_to_coder", {})}))

    def make_agents(self, url: str) -> Agent[Any]:
        return agent("planner", url, handoffs=[agent("coder", url)])


class TestAgentAsTool(_Played):
    script = staticmethod(calls_once({"planner": ("code", {"input": "the boat's part"})}))

    def make_agents(self, url: str) -> Agent[Any]:
        coder = agent("coder", url)
        return agent("planner", url, tools=[coder.as_tool("code", "writes code")])


del IntegrationContract, _Played  # pytest would collect the base as well
