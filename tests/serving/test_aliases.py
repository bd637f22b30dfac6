"""A request keeps its version; a retired version gets no new one."""

from __future__ import annotations

import asyncio

import pytest

from marft_agents.serving.aliases import Aliases, Route

OLD, NEW = Route("router", 1), Route("router", 2)


@pytest.fixture
def aliases() -> Aliases:
    aliases = Aliases()
    aliases.point(OLD)
    return aliases


def test_names(aliases: Aliases) -> None:
    assert aliases.resolve("router") == OLD == aliases.resolve("router@v1")
    assert aliases.resolve("Router") == OLD
    for unknown in ("writer", "router@v2", "base", "", "@v1", "router@v01"):
        assert aliases.resolve(unknown) is None


def test_moving_and_retiring(aliases: Aliases) -> None:
    aliases.point(NEW)
    assert aliases.resolve("router") == NEW
    assert aliases.resolve("router@v1") == OLD
    aliases.retire(OLD)
    assert aliases.resolve("router@v1") is None and aliases.is_retired(OLD)
    assert aliases.served("router") == ["router@v1", "router@v2"]
    aliases.retire(NEW)
    assert aliases.resolve("router") == NEW, "the current version cannot be retired"
    aliases.point(OLD)
    assert aliases.resolve("router@v1") == OLD
    aliases.remove(NEW)
    assert aliases.served("router") == ["router@v1"]


async def test_drained_waits_for_the_last_request(aliases: Aliases) -> None:
    await aliases.drained(OLD)
    for _ in range(2):
        aliases.begin(OLD)
    waiting = asyncio.create_task(aliases.drained(OLD))
    await asyncio.sleep(0)
    aliases.end(OLD)
    await asyncio.sleep(0)
    assert not waiting.done()
    aliases.begin(OLD)
    aliases.end(OLD)
    aliases.end(OLD)
    await asyncio.wait_for(waiting, 1)
    assert aliases.in_flight(OLD) == 0


async def test_a_request_that_begins_at_the_last_moment_is_waited_for(aliases: Aliases) -> None:
    aliases.begin(OLD)
    waiting = asyncio.create_task(aliases.drained(OLD))
    await asyncio.sleep(0)
    aliases.end(OLD)
    aliases.begin(OLD)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    aliases.end(OLD)
    await asyncio.wait_for(waiting, 1)
