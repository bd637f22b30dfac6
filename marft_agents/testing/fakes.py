"""Logs, clocks and ids that a test can look into.

Invariant: nothing here waits, and nothing depends on the time of day.
"""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from marft_agents.schema import Event, Turn

_E = TypeVar("_E", bound=Event)


class InMemoryLog:
    """An event log in a list: ``MarftRecorder(log=InMemoryLog())``, then ``recorder.flush()``."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = False

    def write(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed = True

    def of(self, kind: type[_E]) -> list[_E]:
        """The events of one type, in order."""
        return [e for e in self.events if isinstance(e, kind)]

    @property
    def turns(self) -> list[Turn]:
        return self.of(Turn)


class FakeClock:
    """``MarftRecorder(clock=FakeClock())``: each look is one second later."""

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self.now = start

    def __call__(self) -> datetime:
        self.now += timedelta(seconds=1)
        return self.now


class FakeIds:
    """``MarftRecorder(ids=FakeIds())``: ``id-1``, ``id-2``, …"""

    def __init__(self, prefix: str = "id") -> None:
        self._prefix = prefix
        self._numbers = itertools.count(1)

    def __call__(self) -> str:
        return f"{self._prefix}-{next(self._numbers)}"


class BrokenLog:
    """An event log whose every write fails as a full disk does."""

    def write(self, event: Event) -> None:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        """Nothing to close."""
