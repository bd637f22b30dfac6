"""A version is called worse when it is, seldom when it is not, never on a handful of requests."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from marft_agents.registry import Bounds
from marft_agents.serving.aliases import Route
from marft_agents.serving.canary import (
    Comparison,
    Recent,
    Side,
    Times,
    failed,
    least_increase,
    wilson,
)
from marft_agents.serving.passage import Outcome

OLD, NEW = Route("router", 1), Route("router", 2)


def outcome(**fields: Any) -> Outcome:
    """A streamed reply of 11 tokens: 0.1 s until the first, then 0.02 s each."""
    usual: dict[str, Any] = {
        "route": NEW,
        "replica": "engine-0",
        "client": "anybody",
        "episode": None,
        "request_id": None,
        "streamed": True,
        "status": 200,
        "seconds": 0.3,
        "first_s": 0.1,
        "prompt_tokens": 5,
        "completion_tokens": 11,
        "problem": None,
    }
    return Outcome(**(usual | fields))


def side(requests: int, failures: int, each: int = 1) -> Side:
    """Requests in episodes of ``each``."""
    out = Side()
    for n in range(requests):
        status = 500 if n < failures else 200
        out.add(outcome(status=status, episode=None if each == 1 else f"e{n // each}"))
    return out


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, False),
        ({"status": 500}, True),
        ({"status": 503, "problem": "unreachable"}, True),
        ({"problem": "the engine broke off"}, True),
        ({"status": 404}, True),
        ({"status": 400}, None),
        ({"status": 429}, None),
        ({"status": None}, None),
        ({"status": 200, "left": True, "problem": "the client left"}, None),
    ],
)
def test_whose_fault_it_was(fields: dict[str, Any], said: bool | None) -> None:
    assert failed(outcome(**fields)) is said


def test_wilson_against_known_values() -> None:
    # R: prop.test(15, 50, correct = FALSE, conf.level = 0.95) and (0, 20)
    assert wilson(0.3, 50, 1.959964) == pytest.approx((0.19098, 0.43751), abs=1e-4)
    assert wilson(0.0, 20, 1.959964) == pytest.approx((0.0, 0.16113), abs=1e-4)


def test_newcombe_against_the_paper() -> None:
    """Newcombe 1998, table II: 56/70 - 48/80, method 10: 0.0524 to 0.3339."""
    assert least_increase(side(70, 56), side(80, 48), 1.959964) == pytest.approx(0.0524, abs=1e-4)


def test_requests_of_one_episode_weigh_as_about_one() -> None:
    assert side(100, 0).weight == 100
    assert side(100, 0, each=10).weight == pytest.approx(10)
    mixed = Side()
    for episode in ["long"] * 8 + ["short", None]:
        mixed.add(outcome(episode=episode))
    assert mixed.weight == pytest.approx(100 / (64 + 1 + 1))


def test_times_are_those_of_tokens_and_of_whole_replies_only() -> None:
    told = Side()
    told.add(outcome(seconds=1.1, completion_tokens=51))
    told.add(outcome(seconds=1.1, completion_tokens=51, status=500))
    told.add(outcome(streamed=False, seconds=0.2, first_s=0.2, completion_tokens=10))
    told.add(outcome(streamed=False, completion_tokens=None))
    assert (told.first.count, told.token.count) == (1, 2)
    assert told.token.typical == pytest.approx(0.02)
    longer = Side()
    longer.add(outcome(seconds=20.1, completion_tokens=1001))
    assert longer.token.typical == pytest.approx(0.02), "long replies are not slow ones"


def test_spread_of_times() -> None:
    times = Times()
    values = [0.1, 0.2, 0.4, 0.0]
    for value in values:
        times.add(value)
    logs = [math.log(max(value, 1e-6)) for value in values]
    mean = sum(logs) / 4
    assert times.mean == pytest.approx(mean)
    assert times.variance == pytest.approx(sum((x - mean) ** 2 for x in logs) / 3)


Kind = Callable[[random.Random], Outcome]


def reply(error: float, slower: float = 1.0, longer: float = 1.0) -> Kind:
    """Replies of one version: lognormal times, geometric lengths."""

    def draw(chance: random.Random) -> Outcome:
        tokens = 2 + int(chance.expovariate(1 / (60 * longer)))
        first = 0.2 * slower * math.exp(chance.gauss(0, 0.7))
        token = 0.02 * slower * math.exp(chance.gauss(0, 0.4))
        return outcome(
            status=500 if chance.random() < error else 200,
            first_s=first,
            seconds=first + token * (tokens - 1),
            completion_tokens=tokens,
            episode=f"e{chance.random()}",
        )

    return draw


def ended_after(new: Kind, old: Kind, seed: int, *, share: float = 0.2, most: int = 3000) -> int:
    """Canary requests until it was called worse; -1: it never was."""
    chance, seen = random.Random(seed), Comparison(Bounds())
    while seen.new.requests < most:
        if chance.random() < share:
            seen.new.add(new(chance))
        else:
            seen.old.add(old(chance))
        if seen.look().worse:
            return seen.new.requests
    return -1


@pytest.mark.parametrize("error", [0.0, 0.01, 0.2])
def test_the_same_is_not_worse(error: float) -> None:
    """Looked at again and again over 800 requests of its own."""
    runs = [ended_after(reply(error), reply(error), seed, most=800) for seed in range(8)]
    assert runs.count(-1) == 8


def test_longer_replies_are_not_blamed() -> None:
    runs = [ended_after(reply(0.01, longer=4), reply(0.01), s, most=800) for s in range(4)]
    assert runs == [-1] * 4


@pytest.mark.parametrize(
    ("bad", "within"),
    [
        (reply(1.0), 50),
        (reply(0.3), 100),
        (reply(0.1), 400),
        (reply(0.01, slower=2.5), 100),
        (reply(0.01, slower=2.0), 400),
    ],
)
def test_the_worse_is_found(bad: Kind, within: int) -> None:
    for seed in range(5):
        assert 50 <= ended_after(bad, reply(0.01), seed) <= within


def test_one_bad_episode_is_no_evidence() -> None:
    seen = Comparison(Bounds())
    for n in range(500):
        seen.old.add(outcome(episode=f"e{n}"))
        seen.new.add(outcome(status=500, episode="the only one"))
    assert not seen.look().enough and not seen.look().worse


def test_both_sides_need_requests() -> None:
    seen = Comparison(Bounds(min_requests=50))
    for _ in range(300):
        seen.new.add(outcome(status=500))
        assert not seen.look().enough
    for _ in range(49):
        seen.old.add(outcome())
    assert not seen.last_look().enough
    seen.old.add(outcome())
    assert seen.last_look().worse


def test_recent_is_of_one_version_and_of_the_last_half_hour() -> None:
    now = [0.0]
    recent = Recent(lambda: now[0])
    for route, when in ((OLD, 0.0), (OLD, 100.0), (NEW, 200.0), (OLD, 300.0)):
        now[0] = when
        recent.add(outcome(route=route))
    now[0] = 1850.0
    assert recent.side(OLD).requests == 2 and recent.side(NEW).requests == 1
