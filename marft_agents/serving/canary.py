"""Whether one version answers worse than another: errors, and time per token.

Invariant: a version is called worse only when chance hardly explains it. Requests of one episode
are not independent (a broken conversation breaks again, an SDK tries again), so together they count
as about one: episodes of m_e requests each weigh as (sum m_e)^2 / sum m_e^2 independent requests.
A version is looked at whenever its requests have grown by a quarter, not after every one.

- errors: the lower end of Newcombe's interval (from two Wilson intervals) for the difference of the
  failed shares is above ``max_error_increase``;
- time until a stream's first token, and time per further token: the lower end of Welch's interval
  for the difference of the mean logarithms is above log ``max_latency_ratio``.

One-sided, z = 3.3 (p = 0.0005). Source: Newcombe 1998, method 10.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from marft_agents.registry import Bounds
from marft_agents.serving.aliases import Route
from marft_agents.serving.passage import Outcome

Z = 3.3
MIN_WEIGHT = 20.0
"""Independent requests that each side's must weigh as."""
_LOOK = 1.25
_MOST_EPISODES = 50_000
_SHORTEST_S = 1e-6
RECENT_S = 1800.0
_MOST_RECENT = 2000


@dataclass(slots=True)
class Times:
    """Mean and spread of the logarithms of some durations (Welford)."""

    count: int = 0
    mean: float = 0.0
    _squares: float = 0.0

    def add(self, seconds: float) -> None:
        value = math.log(max(seconds, _SHORTEST_S))
        self.count += 1
        before = value - self.mean
        self.mean += before / self.count
        self._squares += before * (value - self.mean)

    @property
    def variance(self) -> float:
        return self._squares / (self.count - 1) if self.count > 1 else 0.0

    @property
    def typical(self) -> float | None:
        """Geometric mean, in seconds."""
        return math.exp(self.mean) if self.count else None


def failed(outcome: Outcome) -> bool | None:
    """Whether the version failed a request; ``None``: nothing can be said of it.

    A client that left, or asked for what cannot be (4xx), says nothing. A 404 of the engine does:
    what the request named was there.
    """
    if outcome.left or outcome.status is None:
        return None
    if outcome.status >= 500 or outcome.status == 404 or outcome.problem is not None:
        return True
    return None if outcome.status >= 400 else False


@dataclass(slots=True)
class Side:
    """What is known of one version's requests."""

    requests: int = 0
    failures: int = 0
    first: Times = field(default_factory=Times)
    """Until a stream's first token."""
    token: Times = field(default_factory=Times)
    """Per further token; for a reply in one piece, per token."""
    _squares: int = 0
    _episodes: OrderedDict[str, int] = field(default_factory=OrderedDict[str, int])

    def add(self, outcome: Outcome) -> bool:
        """Count a request, if it says something; whether it did."""
        bad = failed(outcome)
        if bad is None:
            return False
        self.requests += 1
        self.failures += bad
        self._weigh(outcome.episode)
        if not bad:
            self._time(outcome)
        return True

    @property
    def weight(self) -> float:
        """How many independent requests these are worth."""
        return self.requests**2 / self._squares if self._squares else 0.0

    @property
    def failed_share(self) -> float:
        return self.failures / self.requests if self.requests else 0.0

    def told(self) -> dict[str, Any]:
        """In numbers, for people and the audit trail."""
        return {
            "requests": self.requests,
            "failed": self.failures,
            "weight": round(self.weight, 1),
            "first_token_s": _rounded(self.first.typical),
            "token_s": _rounded(self.token.typical),
        }

    def _weigh(self, episode: str | None) -> None:
        before = self._episodes.pop(episode, 0) if episode is not None else 0
        self._squares += 2 * before + 1
        if episode is not None:
            self._episodes[episode] = before + 1
            if len(self._episodes) > _MOST_EPISODES:
                self._episodes.popitem(last=False)

    def _time(self, outcome: Outcome) -> None:
        if outcome.streamed and outcome.first_s is not None:
            self.first.add(outcome.first_s)
        if outcome.streamed and outcome.token_s is not None:
            self.token.add(outcome.token_s)
        elif not outcome.streamed and outcome.completion_tokens:
            self.token.add(outcome.seconds / outcome.completion_tokens)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")


def wilson(share: float, weight: float, z: float = Z) -> tuple[float, float]:
    """Wilson's interval for a share seen in ``weight`` independent trials."""
    spread = z * math.sqrt(share * (1 - share) / weight + z * z / (4 * weight * weight))
    scale, middle = 1 + z * z / weight, share + z * z / (2 * weight)
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def least_increase(new: Side, old: Side, z: float = Z) -> float:
    """What the failed share has risen by at least (Newcombe's lower end)."""
    one, other = new.failed_share, old.failed_share
    low, high = wilson(one, new.weight, z)[0], wilson(other, old.weight, z)[1]
    return one - other - math.hypot(one - low, high - other)


def least_ratio(new: Times, old: Times, thin: tuple[float, float], z: float = Z) -> float | None:
    """What the durations have grown by at least, as a factor; ``None``: too few of them.

    ``thin``: per side, independent requests per request.
    """
    worth = new.count * thin[0], old.count * thin[1]
    if min(worth) < MIN_WEIGHT:
        return None
    error = math.sqrt(new.variance / worth[0] + old.variance / worth[1])
    return math.exp(new.mean - old.mean - z * error)


@dataclass(frozen=True, slots=True)
class Verdict:
    """``worse`` says in what; empty: nothing is known against it."""

    enough: bool
    """Whether both sides had the requests that a judgement needs."""
    worse: tuple[str, ...] = ()


def judge(new: Side, old: Side, bounds: Bounds) -> Verdict:
    """Compare all that is known of a version with all that is known of another."""
    few = min(new.requests, old.requests) < bounds.min_requests
    if few or min(new.weight, old.weight) < MIN_WEIGHT:
        return Verdict(enough=False)
    worse: list[str] = []
    if (by := least_increase(new, old)) > bounds.max_error_increase:
        worse.append(
            f"{new.failed_share:.1%} of its requests failed, {old.failed_share:.1%} of the other's:"
            f" at least {by:.1%} more, allowed are {bounds.max_error_increase:.1%}"
        )
    thin = new.weight / new.requests, old.weight / old.requests
    pairs = (("until the first token", new.first, old.first), ("per token", new.token, old.token))
    for what, its, others in pairs:
        ratio = least_ratio(its, others, thin)
        if ratio is not None and ratio > bounds.max_latency_ratio:
            worse.append(
                f"{its.typical:.3g} s {what}, the other's is {others.typical:.3g} s: at least"
                f" {ratio:.2f} times, allowed are {bounds.max_latency_ratio:g}"
            )
    return Verdict(enough=True, worse=tuple(worse))


class Comparison:
    """A version beside another, over one window."""

    def __init__(self, bounds: Bounds, old: Side | None = None) -> None:
        self.bounds = bounds
        self.new = Side()
        self.old = Side() if old is None else old
        self.verdict = Verdict(enough=False)
        self._next = bounds.min_requests

    def look(self) -> Verdict:
        """The verdict, made anew when there are enough new requests since the last look."""
        if self.new.requests >= self._next and not self.verdict.worse:
            self.verdict = judge(self.new, self.old, self.bounds)
            self._next = max(self._next, math.ceil(_LOOK * self.new.requests))
        return self.verdict

    def last_look(self) -> Verdict:
        """The verdict on all requests so far, once the window is over."""
        if not self.verdict.worse:
            self.verdict = judge(self.new, self.old, self.bounds)
        return self.verdict

    def told(self) -> dict[str, Any]:
        """Both sides in numbers, and what is worse."""
        return {
            "version": self.new.told(),
            "incumbent": self.old.told(),
            "enough": self.verdict.enough,
            "worse": list(self.verdict.worse),
        }


class Recent:
    """The latest requests of one agent: what a version that was promoted is compared with."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._outcomes: deque[tuple[float, Outcome]] = deque(maxlen=_MOST_RECENT)

    def add(self, outcome: Outcome) -> None:
        self._outcomes.append((self._now(), outcome))

    def side(self, route: Route) -> Side:
        """The version's requests of the last half hour."""
        side, oldest = Side(), self._now() - RECENT_S
        for when, outcome in self._outcomes:
            if when >= oldest and outcome.route == route:
                side.add(outcome)
        return side
