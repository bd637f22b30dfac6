"""Agents and chats of classic AutoGen on a scripted server, for the tests here."""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest

from marft_agents import MarftRecorder
from marft_agents.schema import EpisodeEnded
from marft_agents.testing import InMemoryLog, Script, ScriptedServer

with warnings.catch_warnings():  # old versions warn of themselves and of what they are built on
    warnings.simplefilter("ignore")
    import autogen
    from autogen import (
        AssistantAgent,
        ConversableAgent,
        GroupChat,
        GroupChatManager,
        UserProxyAgent,
    )

VERSION: str = getattr(autogen, "__version__", "0.2")
OLD = not hasattr(autogen, "LLMConfig")
"""AutoGen 0.2: no threads, no patterns, another place for ``stream``."""
STREAMS = not VERSION.startswith("0.9")
"""AutoGen 0.9 refuses ``stream`` in every part of its config."""


def needs(module: str) -> pytest.MarkDecorator:
    """Skip where this version has no such module."""
    try:
        missing = importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        missing = True
    return pytest.mark.skipif(missing, reason=f"autogen {VERSION} has no {module}")


def without_token_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions count streamed tokens with tables that they fetch over the network."""
    from autogen.oai import client

    def seven(*_args: Any, **_kwargs: Any) -> int:
        return 7

    if hasattr(client, "count_token"):
        monkeypatch.setattr(client, "count_token", seven)


def config(model: str, url: str, *, stream: bool = False, **options: Any) -> dict[str, Any]:
    """An ``llm_config`` of one model, with no cache unless ``cache_seed`` is given."""
    entry: dict[str, Any] = {"model": model, "base_url": url, "api_key": "sk-test"}
    entry["price"] = [0, 0]  # no warning for each unknown model
    entry |= options.pop("entry", {})
    given: dict[str, Any] = {"cache_seed": None, **options}
    if stream and STREAMS:
        (given if OLD else entry)["stream"] = True
    return {"config_list": [entry], **given}


def assistant(name: str, url: str, *, stream: bool = False, **options: Any) -> AssistantAgent:
    llm_config = options.pop("llm_config", None) or config(name, url, stream=stream)
    options = {"system_message": f"You are {name}.", **options}
    return AssistantAgent(name, llm_config=llm_config, **options)


def user(name: str = "user", **options: Any) -> UserProxyAgent:
    given: dict[str, Any] = {
        "human_input_mode": "NEVER",
        "code_execution_config": False,
        "llm_config": False,
        "default_auto_reply": "Go on.",
        **options,
    }
    return UserProxyAgent(name, **given)


def group(
    members: list[Any], url: str, *, rounds: int = 4, stream: bool = False, **options: Any
) -> GroupChatManager:
    chat: dict[str, Any] = {"select_speaker_auto_verbose": False, **options}
    return GroupChatManager(
        GroupChat(members, messages=[], max_round=rounds, **chat),
        llm_config=config("selector", url, stream=stream),
        silent=True,
    )


def said(result: Any) -> list[tuple[str, str, str]]:
    """What the app sees of a ``ChatResult``."""
    return [
        (str(m.get("role")), str(m.get("name")), str(m.get("content"))) for m in result.chat_history
    ] + [("summary", "", str(result.summary))]


@contextmanager
def recording(
    script: Script = None, **options: Any
) -> Generator[tuple[ScriptedServer, MarftRecorder, InMemoryLog]]:
    """A scripted server and a recorder on it, whose log is whole afterwards."""
    log = InMemoryLog()
    with ScriptedServer(script) as server, MarftRecorder(log=log, **options) as recorder:
        yield server, recorder, log


def told(log: InMemoryLog) -> list[tuple[str, str]]:
    """(kind, agent) of each turn, in order."""
    return [(t.kind, t.agent) for t in log.turns]


def endings(log: InMemoryLog) -> list[tuple[str, str | None]]:
    return [(e.reason, e.detail) for e in log.of(EpisodeEnded)]


def accepted(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Those of ``options`` that this version's ``function`` knows."""
    known = inspect.signature(function).parameters
    return {k: v for k, v in options.items() if k in known}


__all__ = [
    "OLD",
    "STREAMS",
    "VERSION",
    "ConversableAgent",
    "accepted",
    "assistant",
    "config",
    "endings",
    "group",
    "needs",
    "recording",
    "said",
    "told",
    "user",
    "without_token_counting",
]
