"""Which version answers for which agent and episode, and which versions are still needed.

Invariant: used from one event loop only and never across an ``await``, so resolving a name and
counting its request happen in one step. A request keeps the version it was given until it ends, an
episode the one it was first given (its lease). A version that a request or an episode has is never
``drained``. One that is prepared for a swap is given to nobody before ``point`` or ``share``.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from marft_agents.errors import ConfigError
from marft_agents.schema import adapter_slug, parse_served_name, served_name
from marft_agents.serving.leases import Leases


@dataclass(frozen=True)
class Route:
    """One request's version."""

    agent: str
    version: int

    @property
    def name(self) -> str:
        return served_name(self.agent, self.version)


@dataclass(frozen=True)
class Split:
    """The share of an agent's episodes, from 0 to 1, that a version beside the current one gets.

    ``key`` says which episodes: a larger share of the same key has those of a smaller one, too.
    """

    version: int
    share: float
    key: str

    def takes(self, agent: str, episode: str) -> bool:
        """Whether an episode is among them; always the same answer."""
        told = f"{agent}\0{self.key}\0{episode}".encode("utf-8", "backslashreplace")
        draw = int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "big")
        return draw < self.share * 2**64


class Aliases:
    """The alias table of one gateway.

    Args:
        draw: from 0 to 1, for requests that name no episode while a version has a share of them.
    """

    def __init__(
        self, leases: Leases | None = None, *, draw: Callable[[], float] = random.random
    ) -> None:
        self.leases = Leases() if leases is None else leases
        self.leases.freed = self._freed
        self._draw = draw
        self._current: dict[str, int] = {}
        self._splits: dict[str, Split] = {}
        self._loaded: set[Route] = set()
        self._retired: set[Route] = set()
        self._prepared: dict[str, int] = {}
        self._lost: dict[str, str] = {}
        self._in_flight: Counter[Route] = Counter()
        self._idle: dict[Route, asyncio.Event] = {}

    @property
    def agents(self) -> list[str]:
        return sorted(self._current)

    def current(self, agent: str) -> int | None:
        return self._current.get(agent)

    def split(self, agent: str) -> Split | None:
        """The version that has a share beside the current one."""
        return self._splits.get(agent)

    def routes(self) -> list[Route]:
        """Every agent's current version."""
        return [Route(agent, self._current[agent]) for agent in self.agents]

    def wanted(self) -> list[Route]:
        """Every version that a replica must have loaded before it takes traffic.

        Those that a next request may be given: current ones first, then those with a share, then
        those that episodes keep.
        """
        shared = [Route(agent, split.version) for agent, split in sorted(self._splits.items())]
        kept = sorted((r for r in self._loaded if self.leased(r)), key=lambda r: r.name)
        current = [route for route in self.routes() if route.agent not in self._lost]
        return list(dict.fromkeys([*current, *shared, *kept]))

    def kept(self) -> dict[Route, str]:
        """Every loaded version, and why it is: each takes a slot of the engine."""
        return {route: self._why(route) for route in sorted(self._loaded, key=lambda r: r.name)}

    def served(self, agent: str) -> list[str]:
        """Names of the agent's loaded versions, retired ones that are still needed included."""
        return sorted(route.name for route in self._loaded if route.agent == agent)

    def resolve(self, model: str, episode: str | None = None) -> Route | None:
        """The version that a request for ``model`` gets: an agent's name, or a loaded version's.

        An agent's name gives an ``episode`` the version it has had of that agent, which it keeps
        from now on. A version's own name gives that one, and the episode's lease is left alone.
        """
        named = parse_served_name(model)
        if named is not None:
            return self._by_name(Route(*named), episode)
        try:
            agent = adapter_slug(model)
        except ConfigError:
            return None
        version = None if episode is None else self._leased_version(episode, agent)
        if version is None:
            version = self._drawn(agent, episode)
        if version is None or (agent in self._lost and version == self._current[agent]):
            return None
        if episode is not None:
            self.leases.take(episode, agent, version)
        return Route(agent, version)

    def begin(self, route: Route, episode: str | None = None) -> None:
        """Count one request."""
        self._in_flight[route] += 1
        if episode is not None:
            self.leases.begin(episode)

    def end(self, route: Route, episode: str | None = None) -> None:
        """Uncount it."""
        if episode is not None:
            self.leases.end(episode)
        self._in_flight[route] -= 1
        if self._in_flight[route] <= 0:
            del self._in_flight[route]
            self._wake(route)

    def in_flight(self, route: Route) -> int:
        return self._in_flight[route]

    def leased(self, route: Route) -> int:
        """How many episodes keep the version."""
        return self.leases.count(route.agent, route.version)

    def is_needed(self, route: Route) -> bool:
        """Whether a request or an episode has the version, or a new one may be given it."""
        return bool(self._in_flight[route] or self.leased(route) or self._is_given(route))

    def point(self, route: Route) -> None:
        """Make the version the agent's current one, for every episode that begins from now on."""
        self._loaded.add(route)
        self._retired.discard(route)
        self.unprepare(route)
        self._lost.pop(route.agent, None)
        self._current[route.agent] = route.version
        split = self._splits.get(route.agent)
        if split is not None and split.version == route.version:
            del self._splits[route.agent]

    def prepare(self, route: Route) -> None:
        """Keep a loaded version that is given to nobody yet; the agent's former one is no more.

        A version that serves is kept for that.
        """
        self._prepared.pop(route.agent, None)
        if not self._is_given(route):
            self._loaded.add(route)
            self._retired.discard(route)
            self._prepared[route.agent] = route.version

    def prepared(self, agent: str | None = None) -> list[Route]:
        """Versions (of one agent) that are kept for a swap to come, the longest kept one first."""
        return [Route(a, v) for a, v in self._prepared.items() if agent in (None, a)]

    def unprepare(self, route: Route) -> bool:
        """Keep the version for no swap any more; whether it was."""
        found = self._prepared.get(route.agent) == route.version
        if found:
            del self._prepared[route.agent]
        return found

    def share(self, agent: str, split: Split) -> None:
        """Give a loaded version its share of the episodes that begin from now on."""
        route = Route(agent, split.version)
        self._loaded.add(route)
        self._retired.discard(route)
        self.unprepare(route)
        self._splits[agent] = split

    def unshare(self, agent: str) -> Split | None:
        """Take the share away; leases stay."""
        return self._splits.pop(agent, None)

    def release(self, episodes: Iterable[str]) -> int:
        """These episodes have ended; how many of them kept a version."""
        return self.leases.release(episodes)

    def move_over(self, route: Route) -> int:
        """Let every episode that keeps another version of the agent go to the current one.

        It does so at its next call; how many there are.
        """
        return self.leases.drop(route.agent, but=route.version)

    def retire(self, route: Route) -> None:
        """Give the version to no new episode; those that keep it go on with it."""
        if not self._is_given(route):
            self.unprepare(route)
            self._retired.add(route)

    def give_up(self, route: Route) -> bool:
        """Give the version to nobody any more, unless it is the current one; whether it was done.

        Its episodes get what anybody gets, from their next call on.
        """
        if self._current.get(route.agent) == route.version:
            return False
        split = self._splits.get(route.agent)
        if split is not None and split.version == route.version:
            del self._splits[route.agent]
        self.unprepare(route)
        self._retired.add(route)
        self.leases.drop(route.agent, version=route.version)
        return True

    def lose(self, route: Route, why: str) -> None:
        """Do without the agent's current version, which no engine can load any more.

        Its agent is not answered until ``point`` says which version is current.
        """
        self._lost[route.agent] = why
        self._loaded.discard(route)
        self.leases.drop(route.agent, version=route.version)

    def lost(self, agent: str) -> str | None:
        """Why the agent's current version cannot be loaded; ``None`` while it can."""
        return self._lost.get(agent)

    def is_retired(self, route: Route) -> bool:
        return route in self._retired

    def remove(self, route: Route) -> None:
        """The version is no longer loaded."""
        self._loaded.discard(route)
        self._retired.discard(route)
        self.unprepare(route)

    async def drained(self, route: Route) -> None:
        """Return when no request and no episode has the version."""
        while self._in_flight[route] or self.leased(route):
            event = self._idle.setdefault(route, asyncio.Event())
            event.clear()
            await event.wait()
        self._idle.pop(route, None)

    # -- inside ----------------------------------------------------------------------------

    def _by_name(self, route: Route, episode: str | None) -> Route | None:
        if route not in self._loaded:
            return None
        mine = episode is not None and self.leases.held(episode, route.agent) == route.version
        hidden = route in self._retired or self._prepared.get(route.agent) == route.version
        return route if mine or not hidden else None

    def _leased_version(self, episode: str, agent: str) -> int | None:
        version = self.leases.held(episode, agent)
        # A version that an engine lost for good is not waited for.
        return version if version is not None and Route(agent, version) in self._loaded else None

    def _drawn(self, agent: str, episode: str | None) -> int | None:
        split = self._splits.get(agent)
        if split is not None and agent in self._current:
            drawn = self._draw() < split.share if episode is None else split.takes(agent, episode)
            if drawn:
                return split.version
        return self._current.get(agent)

    def _is_given(self, route: Route) -> bool:
        split = self._splits.get(route.agent)
        shared = split is not None and split.version == route.version
        return shared or self._current.get(route.agent) == route.version

    def _why(self, route: Route) -> str:
        leases, requests = self.leased(route), self._in_flight[route]
        split = self._splits.get(route.agent)
        reasons = {
            "current": self._current.get(route.agent) == route.version,
            "canary": split is not None and split.version == route.version,
            "prepared": self._prepared.get(route.agent) == route.version,
            f"{leases} lease{'' if leases == 1 else 's'}": leases,
            f"{requests} in flight": requests,
        }
        return ", ".join(reason for reason, holds in reasons.items() if holds) or "draining"

    def _freed(self, agent: str, version: int) -> None:
        self._wake(Route(agent, version))

    def _wake(self, route: Route) -> None:
        if event := self._idle.get(route):
            event.set()
