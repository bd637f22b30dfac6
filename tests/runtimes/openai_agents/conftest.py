"""What the tests of the OpenAI Agents SDK share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from marft_agents import MarftRecorder
from marft_agents.testing import InMemoryLog
from tests.runtimes.openai_agents.kit import CLIENTS


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


@pytest.fixture
async def closing() -> AsyncIterator[None]:
    """Close the clients in the loop that they were used in."""
    yield
    while CLIENTS:
        await CLIENTS.pop().close()
