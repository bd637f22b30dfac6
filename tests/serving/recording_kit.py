"""A gateway that records into memory, for one test."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import httpx

from marft_agents.recording import MarftRecorder
from marft_agents.schema import Turn
from marft_agents.serving.recording import Recording
from marft_agents.testing import FakeIds, InMemoryLog
from tests.serving.stage import House, Stage, running_stage

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "who are you?"}]
CHAT = "/v1/chat/completions"
ID = "X-Request-Id"


_NUMBERS = itertools.count()


def twin_ids() -> tuple[dict[str, str], dict[str, str]]:
    """Headers with ids of the same length for two requests that are to be answered alike."""
    number = next(_NUMBERS)
    return {ID: f"one-{number:08d}"}, {ID: f"two-{number:08d}"}


def nameless(answer: httpx.Response) -> bytes:
    """A reply without the id of its request."""
    return answer.content.replace(answer.headers[ID].encode(), b"id")


class Clock:
    """Time that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class RecordingStage:
    """A stage whose gateway records, and what it has recorded."""

    stage: Stage
    recording: Recording
    log: InMemoryLog
    clock: Clock

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return self.stage.http.post(f"{self.stage.url}{path}", json=body, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.stage.http.get(f"{self.stage.url}{path}", **more)

    def ask(
        self,
        agent: str = "router",
        episode: str = "e1",
        headers: dict[str, str] | None = None,
        **more: Any,
    ) -> httpx.Response:
        """One call by address."""
        body = {"model": agent, "messages": HELLO} | more
        return self.post(f"/episodes/{episode}/agents/{agent}{CHAT}", body, headers=headers)

    def ask_impatiently(self, headers: dict[str, str] | None = None) -> httpx.Response:
        """A call whose client waits 0.2 s only."""
        url = f"{self.stage.url}/episodes/e1/agents/router{CHAT}"
        body = {"model": "router", "messages": HELLO}
        return httpx.post(url, json=body, headers=headers, timeout=0.2)

    @property
    def events(self) -> list[Any]:
        assert self.recording.recorder.flush()
        return list(self.log.events)

    @property
    def turns(self) -> list[Turn]:
        return [event for event in self.events if isinstance(event, Turn)]

    def wait_for_turns(self, count: int) -> list[Turn]:
        self.stage.wait(lambda: len(self.turns) >= count)
        return self.turns

    def of(self, kind: str) -> list[Any]:
        return [event for event in self.events if event.type == kind]


@contextlib.contextmanager
def recording_stage(
    house: House,
    *,
    record_all: bool = False,
    idle_s: float = 3600.0,
    log: Any = None,
    recorder: dict[str, Any] | None = None,
    resumable: Any = None,
    **options: Any,
) -> Generator[RecordingStage]:
    memory = log if log is not None else InMemoryLog()
    clock = Clock()
    options_of_recorder: dict[str, Any] = {"ids": FakeIds()} | (recorder or {})
    recording = Recording(
        MarftRecorder(log=memory, inject="always", **options_of_recorder),
        record_all=record_all,
        idle_s=idle_s,
        resumable=resumable,
        now=clock,
    )
    options.setdefault("max_body", 64 * 1024)
    with running_stage(house, recording=recording, **options) as stage:
        yield RecordingStage(stage, recording, memory, clock)
