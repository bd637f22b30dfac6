"""Agent Framework keeps the contract of every integration, in each kind of orchestration."""

from __future__ import annotations

import json
from typing import Any

from agent_framework import Workflow
from agent_framework.orchestrations import ConcurrentBuilder, GroupChatBuilder

from marft_agents.schema import JsonDict
from marft_agents.testing import IntegrationContract, Reply, default_reply
from tests.runtimes.agent_framework.kit import (
    agent,
    agents,
    events,
    group_chat,
    handing_off,
    handoff,
    heard,
    sequential,
)


class Orchestration(IntegrationContract):
    """A workflow whose events are what the app sees."""

    streams: bool

    def build(self, url: str) -> Workflow:
        raise NotImplementedError

    def make_team(self, server_url: str, *, stream: bool) -> Workflow:
        self.streams = stream
        return self.build(server_url)

    async def run(self, team: Any, task: str) -> Any:
        return heard(await events(team, task, stream=self.streams))


class TestGroupChat(Orchestration):
    def build(self, url: str) -> Workflow:
        return group_chat(url)


class TestSequential(Orchestration):
    def build(self, url: str) -> Workflow:
        return sequential(url, "planner", "coder", "critic")


class TestHandoff(Orchestration):
    script = staticmethod(handing_off)

    def build(self, url: str) -> Workflow:
        return handoff(url)


def choosing(body: JsonDict) -> Reply | str:
    """The boss alternates; everyone else says something that depends on what was said."""
    if not str(body["model"]).startswith("boss"):
        return default_reply(body)
    turns = sum(1 for m in body["messages"] if m["role"] == "assistant") // 2
    name = ("planner", "coder")[turns % 2]
    return json.dumps({"terminate": turns == 3, "reason": "next", "next_speaker": name})


class TestChosenByAnAgent(Orchestration):
    script = staticmethod(choosing)

    def build(self, url: str) -> Workflow:
        return GroupChatBuilder(
            participants=agents(url, "planner", "coder"),
            orchestrator_agent=agent("boss", url),
            max_rounds=5,
        ).build()


class TestWorkflowAsAgent(IntegrationContract):
    """The app sees an agent; inside, a workflow runs."""

    streams: bool

    def make_team(self, server_url: str, *, stream: bool) -> Any:
        self.streams = stream
        return sequential(server_url).as_agent(name="team")

    async def run(self, team: Any, task: str) -> Any:
        if not self.streams:
            return (await team.run(task)).text
        return [update.text async for update in team.run(task, stream=True)]


def test_concurrent_agents_do_not_depend_on_each_other() -> None:
    import asyncio

    from tests.recording.kit import recording

    with recording() as (server, recorder, log):
        members = agents(server.url, "planner", "coder", "critic")
        workflow = recorder.wrap(ConcurrentBuilder(participants=members).build())
        asyncio.run(events(workflow, "go", stream=False))
    assert sorted(t.agent for t in log.turns) == ["coder", "critic", "planner"]
    assert all(t.depends_on == [] and t.trainable for t in log.turns)
