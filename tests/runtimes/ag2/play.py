"""Two recorded asks on a real server: ``python -m tests.runtimes.ag2.play URL LOGS``.

A planner answers, then a coder goes on from its words; once whole, once streamed.
"""

from __future__ import annotations

import asyncio
import sys

from ag2 import Agent
from ag2.config import OpenAIConfig

from marft_agents import MarftRecorder


def agent(name: str, url: str, *, stream: bool) -> Agent:
    config = OpenAIConfig(
        model=name, base_url=url, api_key="none", streaming=stream, max_tokens=8, temperature=1.0
    )
    return Agent(name, f"You are the {name}.", config=config)


async def play(url: str, logs: str) -> None:
    with MarftRecorder(logs) as recorder:
        for stream in (False, True):
            text = "How do I sort a list?"
            async with recorder.episode(metadata={"stream": stream}) as episode:
                for name in ("planner", "coder"):
                    member = recorder.wrap(agent(name, url, stream=stream))
                    text = str((await member.ask(text)).body)
                episode.reward(1.0)


if __name__ == "__main__":
    asyncio.run(play(*sys.argv[1:3]))
