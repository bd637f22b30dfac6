"""One recorded chat on a real server: ``python -m tests.runtimes.agentchat.play URL LOGS``.

A selector team of a planner and a coder plays twice, once streamed.
"""

from __future__ import annotations

import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import ChatAgent, Team
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import SelectorGroupChat
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

from marft_agents import MarftRecorder

INFO = ModelInfo(
    vision=False, function_calling=False, json_output=False, family="unknown",
    structured_output=False,
)  # fmt: skip


def model(name: str, url: str) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(
        model=name, base_url=url, api_key="none", model_info=INFO, max_tokens=8, temperature=1.0
    )


def team(url: str, *, stream: bool) -> SelectorGroupChat:
    members: list[ChatAgent | Team] = [
        AssistantAgent(
            name,
            model(name, url),
            description=f"The {name}.",
            system_message=f"You are the {name}. Answer in one short sentence.",
            model_client_stream=stream,
        )
        for name in ("planner", "coder")
    ]
    return SelectorGroupChat(
        members,
        model("selector", url),
        termination_condition=MaxMessageTermination(3),
        allow_repeated_speaker=True,
        max_selector_attempts=2,
        model_client_streaming=stream,
    )


async def play(url: str, logs: str) -> None:
    with MarftRecorder(logs) as recorder:
        for stream in (False, True):
            task = f"How do I sort a list? (streamed: {stream})"
            async with recorder.episode(task, metadata={"stream": stream}) as episode:
                await recorder.wrap(team(url, stream=stream)).run(task=task)
                episode.reward(1.0)


if __name__ == "__main__":
    asyncio.run(play(*sys.argv[1:3]))
