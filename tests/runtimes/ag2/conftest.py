"""What the tests of AG2 share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from marft_agents import MarftRecorder
from marft_agents.testing import InMemoryLog


@pytest.fixture
def log() -> InMemoryLog:
    return InMemoryLog()


@pytest.fixture
def recorder(log: InMemoryLog) -> Iterator[MarftRecorder]:
    with MarftRecorder(log=log) as made:
        yield made


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)
