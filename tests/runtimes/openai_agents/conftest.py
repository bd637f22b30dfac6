"""What the tests of the OpenAI Agents SDK share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.runtimes.openai_agents.kit import CLIENTS


@pytest.fixture
async def closing() -> AsyncIterator[None]:
    """Close the clients in the loop that they were used in."""
    yield
    while CLIENTS:
        await CLIENTS.pop().close()
