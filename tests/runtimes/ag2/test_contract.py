"""AG2 keeps the contract of every integration: an agent that asks another, and a channel."""

from __future__ import annotations

import asyncio
from typing import Any

from ag2 import Agent

from marft_agents.testing import IntegrationContract
from tests.runtimes.ag2.kit import agent, on_channel, open_hub, relay
from tests.runtimes.kit import calls_once


class TestAgentBehindATool(IntegrationContract):
    script = staticmethod(calls_once({"planner": ("task_coder", {"objective": "the boat's part"})}))

    def make_team(self, server_url: str, *, stream: bool) -> Agent[Any]:
        coder = agent("coder", server_url, stream=stream)
        tools = [coder.as_tool(description="writes code")]
        return agent("planner", server_url, stream=stream, tools=tools)

    async def run(self, team: Any, task: str) -> list[Any]:
        reply = await team.ask(task)
        again = [str(event) for event in await reply.history.get_events()]
        return [reply.body, len(again)]


class TestChannel(IntegrationContract):
    def make_team(self, server_url: str, *, stream: bool) -> Any:
        hub = asyncio.run(open_hub())
        names = ("planner", "coder", "critic")
        self.agents = [agent(name, server_url, stream=stream) for name in names]
        hub.agents = self.agents  # pyright: ignore[reportAttributeAccessIssue] for ``run``
        return hub

    async def run(self, team: Any, task: str) -> list[tuple[str, str]]:
        try:
            members = [await team.register(a, attach_plugin=False) for a in team.agents]
            return await on_channel(team, members, task, relay(members, 4))
        finally:
            await team.close()


del IntegrationContract  # pytest would collect the base as well
