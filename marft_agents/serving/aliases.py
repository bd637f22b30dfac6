"""Which version answers for which agent, and which versions still have requests in flight.

Invariant: used from one event loop only and never across an ``await``, so resolving a name and
counting its request happen in one step. A request keeps the version it was given until it ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from marft_agents.errors import ConfigError
from marft_agents.schema import adapter_slug, parse_served_name, served_name


@dataclass(frozen=True)
class Route:
    """One request's version."""

    agent: str
    version: int

    @property
    def name(self) -> str:
        return served_name(self.agent, self.version)


class Aliases:
    """The alias table of one gateway."""

    def __init__(self) -> None:
        self._current: dict[str, int] = {}
        self._loaded: set[str] = set()
        self._retired: set[str] = set()
        self._in_flight: Counter[str] = Counter()
        self._idle: dict[str, asyncio.Event] = {}

    @property
    def agents(self) -> list[str]:
        return sorted(self._current)

    def current(self, agent: str) -> int | None:
        return self._current.get(agent)

    def routes(self) -> list[Route]:
        """Every agent's current version."""
        return [Route(agent, self._current[agent]) for agent in self.agents]

    def wanted(self) -> list[Route]:
        """Every version that a replica must have loaded before it takes traffic."""
        return self.routes()

    def served(self, agent: str) -> list[str]:
        """Names of the agent's loaded versions, retired ones with requests in flight included."""
        names = [n for n in self._loaded if (p := parse_served_name(n)) and p[0] == agent]
        return sorted(names)

    def resolve(self, model: str, episode: str | None = None) -> Route | None:
        """The version that a request for ``model`` gets: an agent's name, or a loaded version's."""
        del episode
        named = parse_served_name(model)
        if named is not None:
            usable = model in self._loaded and model not in self._retired
            return Route(*named) if usable else None
        try:
            agent = adapter_slug(model)
        except ConfigError:
            return None
        version = self._current.get(agent)
        return Route(agent, version) if version is not None else None

    def begin(self, route: Route) -> None:
        """Count one request."""
        self._in_flight[route.name] += 1

    def end(self, route: Route) -> None:
        """Uncount it."""
        self._in_flight[route.name] -= 1
        if self._in_flight[route.name] <= 0:
            del self._in_flight[route.name]
            if event := self._idle.get(route.name):
                event.set()

    def in_flight(self, route: Route) -> int:
        return self._in_flight[route.name]

    def point(self, route: Route) -> None:
        """Make the version the agent's current one, from the next request on."""
        self._loaded.add(route.name)
        self._retired.discard(route.name)
        self._current[route.agent] = route.version

    def forget(self, agent: str) -> None:
        """Take the agent's alias away."""
        self._current.pop(agent, None)

    def retire(self, route: Route) -> None:
        """Give the version to no new request."""
        if self._current.get(route.agent) != route.version:
            self._retired.add(route.name)

    def is_retired(self, route: Route) -> bool:
        return route.name in self._retired

    def remove(self, route: Route) -> None:
        """The version is no longer loaded."""
        self._loaded.discard(route.name)
        self._retired.discard(route.name)

    async def drained(self, route: Route) -> None:
        """Return when no request for the version is in flight."""
        while self._in_flight[route.name]:
            event = self._idle.setdefault(route.name, asyncio.Event())
            event.clear()
            await event.wait()
        self._idle.pop(route.name, None)
