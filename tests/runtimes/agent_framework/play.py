"""One recorded run on a real server: ``python -m tests.runtimes.agent_framework.play URL LOGS``.

A planner and a coder answer one after the other, twice, once streamed.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from agent_framework import Agent
from agent_framework.openai import OpenAIChatCompletionClient
from agent_framework.orchestrations import SequentialBuilder

from marft_agents import MarftRecorder

OPTIONS: Any = {"max_tokens": 8, "temperature": 1.0}


def agent(name: str, url: str) -> Agent:
    client = OpenAIChatCompletionClient(model=name, base_url=url, api_key="none")
    return Agent(client, f"You are the {name}.", name=name, default_options=OPTIONS)


async def play(url: str, logs: str) -> None:
    with MarftRecorder(logs) as recorder:
        for stream in (False, True):
            members = [agent(name, url) for name in ("planner", "coder")]
            workflow = recorder.wrap(SequentialBuilder(participants=members).build())
            async with recorder.episode(metadata={"stream": stream}) as episode:
                if stream:
                    async for _ in workflow.run("How do I sort a list?", stream=True):
                        pass
                else:
                    await workflow.run("How do I sort a list?")
                episode.reward(1.0)


if __name__ == "__main__":
    asyncio.run(play(*sys.argv[1:3]))
