"""Short-hands of the recording tests."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

from marft_agents.recording import MarftRecorder
from marft_agents.testing import FakeIds, InMemoryLog, Reply, ScriptedServer

CASES = Path(__file__).resolve().parents[1] / "cases"
TRANSPORT_ERRORS: tuple[type[Exception], ...] = tuple(
    importlib.import_module(name).TransportError
    for name in ("httpx", "httpx2")
    if importlib.util.find_spec(name)
)
"""What a broken connection raises: before 3.0 the SDK hands on its HTTP client's own error."""
HELLO: Any = [{"role": "user", "content": "Hello, who are you?"}]


def case(name: str) -> Any:
    """A case's JSON input."""
    return json.loads((CASES / name).read_text(encoding="utf-8"))


def case_lines(name: str) -> list[Any]:
    lines = (CASES / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@contextmanager
def recording(
    script: Any = None, *, owned_by: str = "vllm", **options: Any
) -> Generator[tuple[ScriptedServer, MarftRecorder, InMemoryLog]]:
    """A scripted server and a recorder into memory; everything is written at the end."""
    log = InMemoryLog()
    options.setdefault("ids", FakeIds())
    with (
        ScriptedServer(script, owned_by=owned_by) as server,
        MarftRecorder(log=log, **options) as recorder,
    ):
        yield server, recorder, log


def sdk(server: ScriptedServer, **options: Any) -> openai.OpenAI:
    options = {"max_retries": 0, "api_key": "sk-test"} | options
    return openai.OpenAI(base_url=server.url, **options)


def async_sdk(server: ScriptedServer, **options: Any) -> openai.AsyncOpenAI:
    options = {"max_retries": 0, "api_key": "sk-test"} | options
    return openai.AsyncOpenAI(base_url=server.url, **options)


def ask(client: openai.OpenAI, model: str = "planner", **options: Any) -> Any:
    options.setdefault("messages", HELLO)
    return client.chat.completions.create(model=model, **options)


__all__ = [
    "CASES",
    "HELLO",
    "TRANSPORT_ERRORS",
    "Reply",
    "ask",
    "async_sdk",
    "case",
    "case_lines",
    "recording",
    "sdk",
]
