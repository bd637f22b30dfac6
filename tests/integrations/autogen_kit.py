"""Teams of AutoGen AgentChat on a scripted server, for the tests here.

The tests run on the newest AgentChat and on the oldest supported one; what a version does not have
is skipped with a reason that names it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any, cast

import pytest
from autogen_agentchat.agents import AssistantAgent, BaseChatAgent
from autogen_agentchat.base import ChatAgent, Response, TaskResult, Team
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import BaseChatMessage, TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import ModelInfo, UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient

from marft_agents.schema import JsonDict
from marft_agents.testing import default_reply
from marft_agents_autogen.compat import message_text, model_text

VERSION = version("autogen-agentchat")
INFO = ModelInfo(
    vision=False,
    function_calling=True,
    json_output=True,
    family="unknown",
    structured_output=True,
)
Members = list[ChatAgent | Team]


def maybe(module: str, name: str) -> Any:
    """A class that not every version has, else ``None``."""
    try:
        return getattr(import_module(f"autogen_agentchat.{module}"), name, None)
    except ImportError:
        return None


def needs(feature: object, what: str) -> pytest.MarkDecorator:
    """Skip where ``feature`` is missing."""
    return pytest.mark.skipif(not feature, reason=f"autogen-agentchat {VERSION} has no {what}")


def takes(kind: Any, option: str) -> bool:
    """Whether the constructor of ``kind`` knows an option."""
    return kind is not None and option in inspect.signature(kind.__init__).parameters


def known(kind: Any, **options: Any) -> dict[str, Any]:
    """Those of ``options`` that this version's ``kind`` knows."""
    return {name: value for name, value in options.items() if takes(kind, name)}


TEAM_IN_TEAM = needs(takes(RoundRobinGroupChat, "name"), "teams in teams")


def script(**replies: Any) -> Callable[[JsonDict], Any]:
    """By model name, a reply or the list of its replies; whatever is missing gets the default."""
    waiting = {name: list(r) if isinstance(r, list) else r for name, r in replies.items()}

    def answer(body: JsonDict) -> Any:
        found: Any = waiting.get(body["model"])
        if isinstance(found, list):
            found = cast("list[Any]", found).pop(0) if found else None
        return default_reply(body) if found is None else found

    return answer


def model(name: str, url: str, **options: Any) -> OpenAIChatCompletionClient:
    options.setdefault("model_info", INFO)
    return OpenAIChatCompletionClient(model=name, base_url=url, api_key="sk-test", **options)


def agent(name: str, url: str, *, stream: bool = False, **options: Any) -> AssistantAgent:
    client = options.pop("client", None) or model(name, url)
    return AssistantAgent(name, client, model_client_stream=stream, **options)


def team(*members: Any, turns: int | None = None, **options: Any) -> RoundRobinGroupChat:
    return RoundRobinGroupChat(list(members), max_turns=turns, **options)


def round_robin(url: str, *, turns: int = 4, stream: bool = False) -> RoundRobinGroupChat:
    return RoundRobinGroupChat(
        [agent("planner", url, stream=stream), agent("coder", url, stream=stream)],
        termination_condition=MaxMessageTermination(turns),
    )


class Custom(BaseChatAgent):
    """An agent of a user's own, on whatever ``ask`` reaches; without streaming."""

    def __init__(self, name: str, **held: Any) -> None:
        super().__init__(name, "mine")
        vars(self).update(held)

    @property
    def produced_message_types(self) -> Any:
        return (TextMessage,)

    async def on_messages(self, messages: Any, cancellation_token: Any) -> Response:
        text = await self.answer(messages, cancellation_token)
        return Response(chat_message=TextMessage(content=text, source=self.name))

    async def answer(self, messages: Any, cancellation_token: Any) -> str:
        """By default, what the client in ``llm`` says."""
        return await self.ask(vars(self)["llm"], messages)

    async def ask(self, client: Any, messages: Any) -> str:
        asked = [UserMessage(content=model_text(m), source=m.source) for m in messages]
        return str((await client.create(asked)).content)

    async def on_reset(self, cancellation_token: Any) -> None: ...


def said(result: TaskResult) -> list[tuple[str, str, str]]:
    """What the app sees of a result, without the ids that are random."""
    return [
        (type(m).__name__, m.source, message_text(m) if isinstance(m, BaseChatMessage) else "")
        for m in result.messages
    ] + [("stop", "", str(result.stop_reason))]


async def streamed(stream: Any) -> list[tuple[str, str, str]]:
    """Everything that ``run_stream`` yields, in order."""
    seen: list[tuple[str, str, str]] = []
    async for item in stream:
        if isinstance(item, TaskResult):
            seen += said(item)
        elif isinstance(item, BaseChatMessage):
            seen.append((type(item).__name__, item.source, message_text(item)))
        else:
            seen.append((type(item).__name__, item.source, ""))
    return seen


def texts(messages: Sequence[Any]) -> list[str]:
    return [message_text(m) for m in messages if isinstance(m, BaseChatMessage)]
