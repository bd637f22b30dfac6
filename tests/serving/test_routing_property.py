"""Whatever order things happen in: an episode sees one version of an agent, and none goes early."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from marft_agents.serving.aliases import Aliases, Route, Split
from marft_agents.serving.leases import Leases

TIMEOUT_S = 10.0
AGENTS = ("planner", "writer")
agents = st.sampled_from(AGENTS)
episodes = st.sampled_from([f"e{i}" for i in range(6)])
versions = st.integers(1, 4)


class Routing(RuleBasedStateMachine):
    """``Aliases`` beside what it must do, in the plainest words."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.leases = Leases(timeout_s=TIMEOUT_S, now=lambda: self.now)
        self.aliases = Aliases(self.leases, draw=lambda: 0.5)
        self.seen: dict[tuple[str, str], int] = {}
        """The version that an episode has of an agent."""
        self.used: dict[str, float] = {}
        self.requests: list[tuple[Route, str | None]] = []
        for agent in AGENTS:
            self.aliases.point(Route(agent, 1))

    # -- applications ----------------------------------------------------------------------

    @rule(agent=agents, episode=episodes)
    def ask(self, agent: str, episode: str) -> None:
        route = self.aliases.resolve(agent, episode)
        assert route is not None and route.agent == agent
        had = self.seen.get((episode, agent))
        assert had in (None, route.version), "an episode saw two versions"
        if had is None:
            assert route.version in self._given(agent)
        self.seen[episode, agent] = route.version
        self.used[episode] = self.now
        self._begin(route, episode)

    @rule(agent=agents)
    def ask_without_episode(self, agent: str) -> None:
        route = self.aliases.resolve(agent)
        assert route is not None and route.version in self._given(agent)
        self._begin(route, None)

    @rule(agent=agents, version=versions, episode=st.none() | episodes)
    def ask_by_name(self, agent: str, version: int, episode: str | None) -> None:
        route = self.aliases.resolve(f"{agent}@v{version}", episode)
        if route is not None:
            assert (route.agent, route.version) == (agent, version)
            self._begin(route, episode)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def reply_ends(self, data: st.DataObject) -> None:
        which = data.draw(st.integers(0, len(self.requests) - 1))
        route, episode = self.requests.pop(which)
        self.aliases.end(route, episode)
        if episode is not None:
            self.used[episode] = self.now

    @rule(ended=st.lists(episodes, max_size=3))
    def episodes_end(self, ended: list[str]) -> None:
        known = {e for e, _ in self.seen} & set(ended)
        assert self.aliases.release(ended) == len(known)
        self._clear(lambda e, a, v: e in ended)

    @rule(seconds=st.sampled_from([0.0, 4.0, TIMEOUT_S, TIMEOUT_S + 1]))
    def time_goes_by(self, seconds: float) -> None:
        self.now += seconds
        self.leases.expire()
        busy = {episode for _, episode in self.requests}
        for episode in busy - {None}:
            self.used[str(episode)] = self.now
        self._clear(lambda e, a, v: e not in busy and self.used[e] < self.now - TIMEOUT_S)

    # -- operators -------------------------------------------------------------------------

    @rule(agent=agents, version=versions)
    def promote(self, agent: str, version: int) -> None:
        before = self.aliases.current(agent)
        assert before is not None
        self.aliases.point(Route(agent, version))
        self.aliases.retire(Route(agent, before))

    @rule(agent=agents, version=versions)
    def roll_back(self, agent: str, version: int) -> None:
        self.promote(agent, version)
        if split := self.aliases.unshare(agent):
            self.aliases.retire(Route(agent, split.version))
        self.aliases.move_over(Route(agent, version))
        self._clear(lambda e, a, v: a == agent and v != version)

    @rule(agent=agents, version=versions, share=st.sampled_from([0.01, 0.5, 0.99]))
    def canary(self, agent: str, version: int, share: float) -> None:
        if version != self.aliases.current(agent) and self.aliases.split(agent) is None:
            self.aliases.share(agent, Split(version, share, "key"))

    @rule(agent=agents, worse=st.booleans())
    def canary_ends(self, agent: str, worse: bool) -> None:
        split = self.aliases.unshare(agent)
        if split is None:
            return
        if worse:
            self.leases.drop(agent, version=split.version)
            self._clear(lambda e, a, v: a == agent and v == split.version)
        self.aliases.retire(Route(agent, split.version))

    @rule()
    def what_nobody_needs_goes(self) -> None:
        """As the swapper does after ``drained``."""
        for route in self.aliases.kept():
            if self.aliases.is_retired(route) and not self.aliases.is_needed(route):
                self.aliases.remove(route)

    # -- what always holds -----------------------------------------------------------------

    @invariant()
    def nothing_needed_is_gone(self) -> None:
        kept = self.aliases.kept()
        assert {route for route, _ in self.requests} <= set(kept)
        assert {Route(agent, v) for (_, agent), v in self.seen.items()} <= set(kept)
        assert set(self.aliases.wanted()) <= set(kept)
        for agent in AGENTS:
            assert all(Route(agent, v) in kept for v in self._given(agent))

    @invariant()
    def counts_are_right(self) -> None:
        leases = Counter(Route(agent, v) for (_, agent), v in self.seen.items())
        requests = Counter(route for route, _ in self.requests)
        for route, why in self.aliases.kept().items():
            assert self.aliases.leased(route) == leases[route]
            assert self.aliases.in_flight(route) == requests[route]
            assert (why == "draining") == (not self.aliases.is_needed(route))
        assert len(self.leases) == len({episode for episode, _ in self.seen})

    def teardown(self) -> None:
        for route, episode in self.requests:
            self.aliases.end(route, episode)
        self.aliases.release([f"e{i}" for i in range(6)])
        assert len(self.leases) == 0
        for route in self.aliases.kept():
            assert (self.aliases.in_flight(route), self.aliases.leased(route)) == (0, 0)

    # -- inside ----------------------------------------------------------------------------

    def _begin(self, route: Route, episode: str | None) -> None:
        self.aliases.begin(route, episode)
        self.requests.append((route, episode))

    def _given(self, agent: str) -> Iterator[int]:
        split, current = self.aliases.split(agent), self.aliases.current(agent)
        assert current is not None
        return iter({current} | ({split.version} if split else set()))

    def _clear(self, gone: Callable[[str, str, int], bool]) -> None:
        self.seen = {(e, a): v for (e, a), v in self.seen.items() if not gone(e, a, v)}


Routing.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRouting = Routing.TestCase
