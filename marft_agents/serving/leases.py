"""Which version of each agent an episode keeps.

Invariant: an episode has at most one version per agent from its first call until it ends, is idle
for too long, or is moved over on purpose; with a request in flight it is not idle. The table never
holds more than ``limit`` idle episodes, the longest idle go first. Used from one event loop only.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

LEASE_TIMEOUT_S = 600.0
MAX_EPISODES = 100_000


@dataclass(slots=True)
class _Held:
    """The versions of one episode, by agent."""

    last_used: float
    versions: dict[str, int] = field(default_factory=dict[str, int])


def _nobody_waits(agent: str, version: int) -> None:
    del agent, version


class Leases:
    """The table of one gateway.

    Args:
        timeout_s: an episode without a request for longer than this loses its leases.
        limit: episodes kept at most, but for those with a request in flight.
        freed: told of a version when its last lease ends.
    """

    def __init__(
        self,
        *,
        timeout_s: float = LEASE_TIMEOUT_S,
        limit: int = MAX_EPISODES,
        now: Callable[[], float] = time.monotonic,
        freed: Callable[[str, int], None] = _nobody_waits,
    ) -> None:
        self.timeout_s = timeout_s
        self.freed = freed
        self._limit = limit
        self._now = now
        self._held: OrderedDict[str, _Held] = OrderedDict()
        """By episode, the longest unused first."""
        self._busy: Counter[str] = Counter()
        self._counts: Counter[tuple[str, int]] = Counter()

    def __len__(self) -> int:
        """Episodes with a lease."""
        return len(self._held)

    def count(self, agent: str, version: int) -> int:
        """How many episodes keep the version."""
        return self._counts[agent, version]

    def held(self, episode: str, agent: str) -> int | None:
        """The version that the episode keeps of the agent."""
        held = self._held.get(episode)
        return None if held is None else held.versions.get(agent)

    def take(self, episode: str, agent: str, version: int) -> None:
        """Keep a version for the episode, in place of the one it had of that agent; a use."""
        held = self._held.get(episode)
        if held is None:
            held = self._held[episode] = _Held(self._now())
            self._make_room()
        before = held.versions.get(agent)
        if before != version:
            held.versions[agent] = version
            self._counts[agent, version] += 1
            if before is not None:
                self._uncount(agent, before)
        self._touch(episode)

    def begin(self, episode: str) -> None:
        """A request of the episode is in flight."""
        self._busy[episode] += 1

    def end(self, episode: str) -> None:
        """It has ended."""
        self._busy[episode] -= 1
        if self._busy[episode] <= 0:
            del self._busy[episode]
        self._touch(episode)

    def release(self, episodes: Iterable[str]) -> int:
        """These episodes have ended; how many of them had leases."""
        return sum([self._drop(episode) for episode in episodes])

    def drop(self, agent: str, *, version: int | None = None, but: int | None = None) -> int:
        """End every lease of an agent: of one version, or of all ``but`` one; how many there were.

        Their episodes get what anybody gets, from their next call on.
        """
        dropped = 0
        for episode, held in list(self._held.items()):
            has = held.versions.get(agent)
            if has is None or has == but or version not in (None, has):
                continue
            dropped += 1
            del held.versions[agent]
            self._uncount(agent, has)
            if not held.versions:
                del self._held[episode]
        return dropped

    def expire(self) -> int:
        """End the leases of episodes that were idle for too long; how many episodes."""
        oldest, expired = self._now() - self.timeout_s, 0
        for _ in range(len(self._held)):
            episode = next(iter(self._held))
            if episode in self._busy:
                self._touch(episode)
            elif self._held[episode].last_used < oldest:
                expired += self._drop(episode)
            else:
                break
        return expired

    # -- inside ----------------------------------------------------------------------------

    def _touch(self, episode: str) -> None:
        if held := self._held.get(episode):
            held.last_used = self._now()
            self._held.move_to_end(episode)

    def _make_room(self) -> None:
        for _ in range(len(self._held)):
            if len(self._held) <= self._limit:
                return
            episode = next(iter(self._held))
            if episode in self._busy:
                self._touch(episode)
            else:
                self._drop(episode)

    def _drop(self, episode: str) -> bool:
        held = self._held.pop(episode, None)
        for agent, version in held.versions.items() if held else ():
            self._uncount(agent, version)
        return held is not None

    def _uncount(self, agent: str, version: int) -> None:
        self._counts[agent, version] -= 1
        if self._counts[agent, version] <= 0:
            del self._counts[agent, version]
            self.freed(agent, version)
