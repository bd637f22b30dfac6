"""AutoGen AgentChat keeps the contract of every integration, in each kind of team."""

from __future__ import annotations

import json
from typing import Any

from autogen_agentchat.agents import SocietyOfMindAgent
from autogen_agentchat.base import Team
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import MagenticOneGroupChat, SelectorGroupChat, Swarm
from autogen_core.models import ModelInfo

from marft_agents.schema import JsonDict
from marft_agents.testing import IntegrationContract, Reply, Script, default_reply
from tests.integrations.autogen_kit import (
    INFO,
    TEAM_IN_TEAM,
    agent,
    known,
    maybe,
    model,
    needs,
    round_robin,
    said,
    streamed,
    team,
)

AgentTool, GraphFlow = maybe("tools", "AgentTool"), maybe("teams", "GraphFlow")
DiGraphBuilder = maybe("teams", "DiGraphBuilder")
JSON_ONLY: ModelInfo = {**INFO, "structured_output": False}  # pyright: ignore[reportAssignmentType] a part is one


def _asked(body: JsonDict) -> str:
    """The agent that asks, whatever model it was sent to."""
    return str(body["model"]).split("-")[0]


def _heard(body: JsonDict, name: str) -> bool:
    return any(m.get("name") == name for m in body["messages"])


class Contract(IntegrationContract):
    async def run(self, team: Any, task: str) -> list[tuple[str, str, str]]:
        return said(await team.run(task=task))


class TestRoundRobin(IntegrationContract):
    def make_team(self, server_url: str, *, stream: bool) -> Team:
        return round_robin(server_url, stream=stream)

    async def run(self, team: Any, task: str) -> list[tuple[str, str, str]]:
        return await streamed(team.run_stream(task=task))


class TestSelector(Contract):
    def make_team(self, server_url: str, *, stream: bool) -> Team:
        names = ("planner", "coder", "critic")
        options = known(SelectorGroupChat, model_client_streaming=stream, emit_team_events=True)
        members: list[Any] = [agent(n, server_url, stream=stream) for n in names]
        stop = MaxMessageTermination(5)
        client = model("selector", server_url)
        return SelectorGroupChat(members, client, termination_condition=stop, **options)


def _hand_off(body: JsonDict) -> Reply | str:
    """The planner hands off to the coder, who hands back."""
    if _asked(body) == "coder":
        return Reply(None, [("transfer_to_planner", {})])
    if not _heard(body, "coder"):
        return Reply(None, [("transfer_to_coder", {})])
    return default_reply(body)


class TestSwarm(Contract):
    script: Script = staticmethod(_hand_off)

    def make_team(self, server_url: str, *, stream: bool) -> Team:
        names = {"planner": "coder", "coder": "planner"}
        members: list[Any] = [
            agent(name, server_url, stream=stream, handoffs=[other])
            for name, other in names.items()
        ]
        return Swarm(members, max_turns=3)


def _orchestrate(body: JsonDict) -> Reply | str:
    """The planner speaks, then the coder, and then it is done."""
    if "is_request_satisfied" not in str(body["messages"][-1]["content"]):
        return default_reply(body)
    speaker = "coder" if _heard(body, "planner") else "planner"
    answers = {
        "is_request_satisfied": _heard(body, "coder"),
        "is_in_loop": False,
        "is_progress_being_made": True,
        "next_speaker": speaker,
        "instruction_or_question": f"Now it is the turn of the {speaker}.",
    }
    return json.dumps({key: {"answer": answers[key], "reason": "so"} for key in answers})


class TestMagenticOne(Contract):
    script: Script = staticmethod(_orchestrate)

    def make_team(self, server_url: str, *, stream: bool) -> Team:
        members: list[Any] = [agent(n, server_url, stream=stream) for n in ("planner", "coder")]
        return MagenticOneGroupChat(members, model("boss", server_url, model_info=JSON_ONLY))


@TEAM_IN_TEAM
class TestTeamInTeam(Contract):
    def make_team(self, server_url: str, *, stream: bool) -> Team:
        inner = round_robin(server_url, turns=2, stream=stream)
        critic = agent("critic", server_url, stream=stream)
        return team(inner, critic, termination_condition=MaxMessageTermination(5))


class TestSocietyOfMind(Contract):
    def make_team(self, server_url: str, *, stream: bool) -> Team:
        inner = round_robin(server_url, turns=4, stream=stream)
        society = SocietyOfMindAgent("society", inner, model("society", server_url))
        return team(agent("critic", server_url, stream=stream), society, turns=2)


def _use_writer(body: JsonDict) -> Reply | str:
    """The planner asks the writer behind its tool."""
    if _asked(body) == "planner":
        return Reply(None, [("writer", {"task": "Write it down."})])
    return default_reply(body)


@needs(AgentTool, "AgentTool")
class TestAgentTool(Contract):
    script: Script = staticmethod(_use_writer)

    def make_team(self, server_url: str, *, stream: bool) -> Team:
        client = model("planner", server_url, parallel_tool_calls=False)
        tools = [AgentTool(agent("writer", server_url, stream=stream))]
        planner = agent("planner", server_url, client=client, stream=stream, tools=tools)
        return team(planner, agent("coder", server_url, stream=stream), turns=2)


@needs(GraphFlow, "GraphFlow")
class TestGraphFlow(Contract):
    def make_team(self, server_url: str, *, stream: bool) -> Team:
        names = ("planner", "coder", "critic")
        planner, coder, critic = (agent(n, server_url, stream=stream) for n in names)
        graph = DiGraphBuilder()
        for node in (planner, coder, critic):
            graph.add_node(node)
        graph.add_edge(planner, coder).add_edge(coder, critic)
        return GraphFlow(graph.get_participants(), graph.build())
