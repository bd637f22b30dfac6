"""Teams of AutoGen AgentChat on a scripted server, for the tests here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import BaseChatMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO = ModelInfo(
    vision=False,
    function_calling=True,
    json_output=True,
    family="unknown",
    structured_output=True,
)


def model(name: str, url: str, **options: Any) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(
        model=name, base_url=url, api_key="sk-test", model_info=INFO, **options
    )


def agent(name: str, url: str, *, stream: bool = False, **options: Any) -> AssistantAgent:
    client = options.pop("client", None) or model(name, url)
    return AssistantAgent(name, client, model_client_stream=stream, **options)


def round_robin(url: str, *, turns: int = 4, stream: bool = False) -> RoundRobinGroupChat:
    return RoundRobinGroupChat(
        [agent("planner", url, stream=stream), agent("coder", url, stream=stream)],
        termination_condition=MaxMessageTermination(turns),
    )


def said(result: TaskResult) -> list[tuple[str, str, str]]:
    """What the app sees of a result, without the ids that are random."""
    return [
        (type(m).__name__, m.source, m.to_text() if isinstance(m, BaseChatMessage) else "")
        for m in result.messages
    ] + [("stop", "", str(result.stop_reason))]


async def streamed(stream: Any) -> list[tuple[str, str, str]]:
    """Everything that ``run_stream`` yields, in order."""
    seen: list[tuple[str, str, str]] = []
    async for item in stream:
        if isinstance(item, TaskResult):
            seen += said(item)
        else:
            seen.append((type(item).__name__, item.source, item.to_text()))
    return seen


def texts(messages: Sequence[Any]) -> list[str]:
    return [m.to_text() for m in messages if isinstance(m, BaseChatMessage)]
