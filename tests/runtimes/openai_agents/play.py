"""Two recorded runs on a real server: ``python -m tests.runtimes.openai_agents.play URL LOGS``.

A planner answers, then a coder goes on from its words; once whole, once streamed.
"""

from __future__ import annotations

import asyncio
import sys

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

from marft_agents import MarftRecorder

SETTINGS = ModelSettings(max_tokens=8, temperature=1.0)


def agent(name: str, url: str) -> Agent:
    model = OpenAIChatCompletionsModel(name, AsyncOpenAI(base_url=url, api_key="none"))
    return Agent(
        name=name, instructions=f"You are the {name}.", model=model, model_settings=SETTINGS
    )


async def play(url: str, logs: str) -> None:
    set_tracing_disabled(True)
    with MarftRecorder(logs) as recorder:
        for stream in (False, True):
            text = "How do I sort a list?"
            async with recorder.episode(metadata={"stream": stream}) as episode:
                for name in ("planner", "coder"):
                    member = recorder.wrap(agent(name, url))
                    if stream:
                        running = Runner.run_streamed(member, text)
                        async for _ in running.stream_events():
                            pass
                        text = str(running.final_output)
                    else:
                        text = str((await Runner.run(member, text)).final_output)
                episode.reward(1.0)


if __name__ == "__main__":
    asyncio.run(play(*sys.argv[1:3]))
