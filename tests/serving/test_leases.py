"""An episode keeps its versions; the table is bounded; nobody waits for an episode that is gone."""

from __future__ import annotations

import asyncio

import pytest

from marft_agents.serving.aliases import Aliases, Route, Split
from marft_agents.serving.leases import Leases

OLD, NEW = Route("router", 1), Route("router", 2)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def aliases(clock: Clock) -> Aliases:
    aliases = Aliases(Leases(timeout_s=10, limit=3, now=clock))
    aliases.point(OLD)
    return aliases


def swapped(aliases: Aliases) -> None:
    aliases.point(NEW)
    aliases.retire(OLD)


def test_an_episode_keeps_its_version_and_others_get_the_new_one(aliases: Aliases) -> None:
    assert aliases.resolve("router", "e1") == OLD
    swapped(aliases)
    assert aliases.resolve("router", "e1") == OLD == aliases.resolve("Router", "e1")
    assert aliases.resolve("router", "e2") == NEW == aliases.resolve("router")
    assert aliases.kept() == {OLD: "1 lease", NEW: "current, 1 lease"}
    assert aliases.wanted() == [NEW, OLD]
    assert aliases.resolve("router@v1", "e1") == OLD, "its own version may be named"
    assert aliases.resolve("router@v1", "e2") is None
    assert aliases.resolve("router@v2", "e1") == NEW
    assert aliases.resolve("router", "e1") == OLD, "naming a version leaves the lease alone"
    assert aliases.release(["e1", "e1", "nobody"]) == 1
    assert aliases.kept()[OLD] == "draining" and aliases.wanted() == [NEW]


def test_idle_for_too_long(aliases: Aliases, clock: Clock) -> None:
    for episode in ("idle", "busy", "later"):
        aliases.resolve("router", episode)
    aliases.begin(OLD, "busy")
    clock.now = 5
    aliases.resolve("router", "later")
    clock.now = 10
    assert aliases.leases.expire() == 0, "not longer than the time-out"
    clock.now = 10.1
    assert aliases.leases.expire() == 1
    clock.now = 100
    assert aliases.leases.expire() == 1 and aliases.leased(OLD) == 1
    aliases.end(OLD, "busy")
    clock.now = 110
    assert aliases.leases.expire() == 0, "idle since its reply ended"
    clock.now = 110.1
    assert aliases.leases.expire() == 1 and len(aliases.leases) == 0


def test_the_table_is_bounded_and_the_longest_idle_goes_first(aliases: Aliases) -> None:
    for episode in ("e1", "e2", "e3"):
        aliases.resolve("router", episode)
    aliases.begin(OLD, "e1")
    aliases.resolve("router", "e2")
    swapped(aliases)
    aliases.resolve("router", "e4")
    assert aliases.resolve("router", "e1") == OLD and aliases.resolve("router", "e2") == OLD
    assert len(aliases.leases) == 3
    for n in range(10):
        aliases.begin(NEW, f"more{n}")
        aliases.resolve("router", f"more{n}")
    assert len(aliases.leases) == 11, "requests in flight are never forgotten"


def test_a_request_that_outlives_its_episode_takes_nothing_from_the_next(
    aliases: Aliases, clock: Clock
) -> None:
    aliases.resolve("router", "e1")
    aliases.begin(OLD, "e1")
    aliases.release(["e1"])
    swapped(aliases)
    assert aliases.resolve("router", "e1") == NEW
    aliases.begin(NEW, "e1")
    aliases.end(OLD, "e1")
    clock.now = 1000
    assert aliases.leases.expire() == 0, "the second one is still in flight"
    aliases.end(NEW, "e1")
    assert aliases.leased(NEW) == 1 and aliases.in_flight(OLD) == 0


def test_a_rollback_moves_episodes_over_at_their_next_call(aliases: Aliases) -> None:
    aliases.resolve("router", "e1")
    swapped(aliases)
    aliases.resolve("router", "e2")
    aliases.point(OLD)
    aliases.retire(NEW)
    assert aliases.move_over(OLD) == 1
    assert aliases.resolve("router", "e2") == OLD == aliases.resolve("router", "e1")


async def test_drained_waits_for_leases_too(aliases: Aliases, clock: Clock) -> None:
    aliases.resolve("router", "e1")
    aliases.begin(OLD, "e1")
    swapped(aliases)
    waiting = asyncio.create_task(aliases.drained(OLD))
    await asyncio.sleep(0)
    aliases.end(OLD, "e1")
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done(), "the episode may call again"
    clock.now = 11
    aliases.leases.expire()
    await asyncio.wait_for(waiting, 1)


# -- a share --------------------------------------------------------------------------------------


def test_a_share_is_of_episodes_and_sticky(aliases: Aliases) -> None:
    aliases.resolve("router", "before")
    aliases.share("router", Split(2, 0.999999, "k"))
    assert aliases.resolve("router", "before") == OLD, "it began before"
    assert aliases.resolve("router", "after") == NEW
    aliases.unshare("router")
    aliases.retire(NEW)
    assert aliases.resolve("router", "after") == NEW and aliases.resolve("router", "new") == OLD


def test_a_larger_share_keeps_the_episodes_of_a_smaller_one() -> None:
    names = [f"episode-{n}" for n in range(500)]
    small, large, other = Split(2, 0.1, "k"), Split(2, 0.4, "k"), Split(2, 0.1, "other")
    few = {name for name in names if small.takes("router", name)}
    assert few < {name for name in names if large.takes("router", name)}
    assert few != {name for name in names if other.takes("router", name)}
    assert few != {name for name in names if small.takes("writer", name)}


def test_requests_without_an_episode_are_drawn_one_by_one() -> None:
    draws = iter([0.05, 0.5, 0.0999, 0.1])
    aliases = Aliases(draw=lambda: next(draws))
    aliases.point(OLD)
    aliases.share("router", Split(2, 0.1, "k"))
    assert [aliases.resolve("router") for _ in range(4)] == [NEW, OLD, NEW, OLD]


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5])
def test_the_share_of_2000_episodes_lies_within_binomial_bounds(share: float) -> None:
    aliases = Aliases()
    aliases.point(OLD)
    aliases.share("router", Split(2, share, "k"))
    got = sum(aliases.resolve("router", f"episode-{n}") == NEW for n in range(2000))
    deviation = (2000 * share * (1 - share)) ** 0.5
    assert abs(got - 2000 * share) < 3.3 * deviation
