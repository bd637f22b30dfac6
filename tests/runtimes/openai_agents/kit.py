"""Agents of the OpenAI Agents SDK on a scripted server, for the tests here."""

from __future__ import annotations

import json
from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


CLIENTS: list[AsyncOpenAI] = []
"""Made since a test began; closed when it ends."""


def client(url: str, **options: Any) -> AsyncOpenAI:
    made = AsyncOpenAI(base_url=url, api_key="sk-test", max_retries=0, **options)
    CLIENTS.append(made)
    return made


def model(name: str, url: str, **options: Any) -> OpenAIChatCompletionsModel:
    return OpenAIChatCompletionsModel(name, client(url, **options))


def agent(name: str, url: str, **options: Any) -> Agent[Any]:
    """An agent whose model has its name."""
    options = {"model": model(name, url), "instructions": f"You are {name}.", **options}
    return Agent(name=name, **options)


@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


async def play(agent: Agent[Any], task: Any, *, stream: bool = False, **options: Any) -> list[Any]:
    """What the app sees of a run: every item, the last agent and the output."""
    if not stream:
        result: Any = await Runner.run(agent, task, **options)
        return seen(result)
    result = Runner.run_streamed(agent, task, **options)
    events = [kind(event) async for event in result.stream_events()]
    return [*events, *seen(result)]


def kind(event: Any) -> str:
    data = getattr(event, "data", None)
    return f"{event.type}:{getattr(data, 'type', getattr(event, 'name', ''))}"


def seen(result: Any) -> list[Any]:
    items = [
        {k: v for k, v in item.to_input_item().items() if k not in ("id", "call_id")}
        for item in result.new_items
    ]
    return [json.dumps(items, default=str), result.last_agent.name, result.final_output]
