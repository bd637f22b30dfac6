"""Watches every engine, and brings back what fell over.

Invariant: a replica whose engine is gone, unwell or without its adapters takes no traffic until
every wanted version was loaded and probed again. An engine started here is started again, for ever
and ever more patiently; each time it is said why. A busy engine that answers late is not killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field

from marft_agents.errors import MarftError
from marft_agents.schema import served_name
from marft_agents.serving.calls import NoAnswerError
from marft_agents.serving.fleet import Fleet
from marft_agents.serving.keeper import Keeper
from marft_agents.serving.passage import Outcome
from marft_agents.serving.pulse import Pulse
from marft_agents.serving.replica import Replica
from marft_agents.serving.restartable import RestartableEngine
from marft_agents.serving.threads import in_thread

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pace:
    """How often replicas are looked at, and how patiently; times in seconds."""

    poll_s: float = 2.0
    again_s: float = 0.5
    """Between two looks at a replica that seems unwell."""
    failures: int = 3
    """Looks, or requests, that fail in a row before an engine is given up or tried."""
    ask_s: float = 5.0
    """Longest wait for what an engine says of itself."""
    patience_s: float = 60.0
    """How long an engine may only answer too late."""
    shortest_s: float = 1.0
    """First wait before a new start; it doubles up to ``longest_s``."""
    longest_s: float = 60.0
    silence_s: float = 120.0
    """Without a byte of any reply for so long, a replica is asked for a token; 0: never."""
    token_s: float = 20.0
    """Longest wait for that token."""
    well_after_s: float = 60.0
    """An engine that was ready for so long begins with the shortest wait again."""

    def wait_s(self, attempt: int) -> float:
        return min(self.longest_s, self.shortest_s * 2 ** min(attempt, 30))


@dataclass(frozen=True)
class _Trouble:
    reason: str
    sure: bool
    """Whether it is more than a late answer."""


@dataclass
class _Watched:
    replica: Replica
    engine: RestartableEngine | None
    pulse: Pulse
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    failed_requests: int = 0
    strikes: int = 0
    late_since: float | None = None
    attempts: int = 0
    ready_since: float | None = None


class Supervisor:
    """The watch over one gateway's replicas.

    Args:
        engines: by the replica's name, those that were started here.
        say: told what an operator should know.
    """

    def __init__(
        self,
        fleet: Fleet,
        keeper: Keeper,
        engines: Mapping[str, RestartableEngine],
        say: Callable[[str], None],
        pace: Pace | None = None,
    ) -> None:
        self._keeper = keeper
        self._say_line = say
        self._pace = pace or Pace()
        self._watched = {
            r.name: _Watched(
                r, engines.get(r.name), Pulse(r.name, self._pace.silence_s, self._pace.token_s)
            )
            for r in fleet.replicas
        }

    def silences(self) -> dict[tuple[str, str], int]:
        """How often a silent replica was asked for a token, by its name and what came of it."""
        return {
            (name, found): times
            for name, watched in self._watched.items()
            for found, times in watched.pulse.found.items()
        }

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Watch while the block runs."""
        tasks = [asyncio.create_task(self._watch(w)) for w in self._watched.values()]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def observe(self, outcome: Outcome) -> None:
        """Learn from how a request ended."""
        watched = self._watched.get(outcome.replica)
        if watched is None or outcome.status is None or outcome.left:
            return
        if outcome.status < 500 and outcome.problem is None:
            watched.failed_requests = 0
            return
        watched.failed_requests += 1
        # No answer at all is worth a look at once, an error of the engine after some.
        if outcome.status != 500 or watched.failed_requests >= self._pace.failures:
            watched.wake.set()

    def suspect(self, replica: Replica) -> None:
        """Look at a replica now: it gave a request no answer."""
        self._watched[replica.name].wake.set()

    # -- inside ----------------------------------------------------------------------------

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # whoever reads it may be gone
            self._say_line(line)

    async def _watch(self, watched: _Watched) -> None:
        if watched.replica.ready:
            await self._rest(watched, self._pace.poll_s)
        while True:
            watched.wake.clear()
            try:
                pause = await self._look(watched)
            except Exception:
                _log.exception("looking after %s failed", watched.replica.name)
                pause = self._pace.poll_s
            await self._rest(watched, pause)

    async def _rest(self, watched: _Watched, pause: float) -> None:
        """Until the next look is due, the engine ends, or somebody has seen it fail."""
        engine, until = watched.engine, time.monotonic() + pause
        while (left := until - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, self._pace.again_s)):
                    await watched.wake.wait()
                    return
            if watched.replica.ready and engine is not None and engine.death():
                return

    async def _look(self, watched: _Watched) -> float:
        """One look, and what follows; seconds until the next."""
        engine = watched.engine
        if engine is not None and (reason := engine.death()):
            return await self._start_again(watched, reason)
        # Twice, as an idle connection may be closed at the very moment it is used.
        listed = await self._ask(watched)
        if isinstance(listed, _Trouble):
            listed = await self._ask(watched)
        if not isinstance(listed, _Trouble):
            watched.strikes, watched.late_since = 0, None
            return await self._keep(watched, listed)
        if engine is not None and (reason := engine.death()):
            return await self._start_again(watched, reason)
        if not self._given_up(watched, listed):
            return self._pace.again_s
        if engine is not None:
            return await self._start_again(watched, listed.reason)
        return self._pace.poll_s

    def _given_up(self, watched: _Watched, trouble: _Trouble) -> bool:
        now = time.monotonic()
        if trouble.sure:
            watched.strikes += 1
            self._take_down(watched, trouble.reason)
            return watched.strikes >= self._pace.failures
        watched.late_since = watched.late_since or now
        if now - watched.late_since < self._pace.patience_s:
            return False
        self._take_down(watched, trouble.reason)
        return True

    def _take_down(self, watched: _Watched, reason: str) -> None:
        replica = watched.replica
        if replica.state != "down":
            self._say(f"{replica.name} takes no requests: {reason}")
        replica.become("down", reason)

    async def _ask(self, watched: _Watched) -> set[tuple[str, int]] | _Trouble:
        """What it has loaded, from an engine that is well."""
        loader = watched.replica.loader
        try:
            await in_thread(loader.client.health, self._pace.ask_s)
            listed = await in_thread(loader.listed, self._pace.ask_s)
            if watched.failed_requests >= self._pace.failures:
                # Requests fail although it says that it is well: ask for something small.
                for agent, version in sorted(listed)[:1]:
                    await in_thread(loader.answers, agent, version)
                watched.failed_requests = 0
            for named in sorted(listed)[:1]:
                model, upstream = served_name(*named), watched.replica.upstream
                if hangs := await watched.pulse.feel(upstream, loader.client, model):
                    return _Trouble(hangs, sure=False)
        except NoAnswerError as error:
            return _Trouble(str(error), sure=not error.timed_out)
        except MarftError as error:
            return _Trouble(str(error), sure=True)
        return listed

    async def _keep(self, watched: _Watched, listed: set[tuple[str, int]]) -> float:
        """The engine is well: so are its adapters, or they are brought back."""
        replica = watched.replica
        try:
            if replica.ready and not await self._keeper.has_lost(replica, listed):
                await self._keeper.sweep(replica, listed)
                for route in await self._keeper.regain(replica):
                    self._say(f"{route.name} is there again, and answers")
                return self._pace.poll_s
            if replica.ready:
                self._say(f"{replica.name} has lost adapters; they are loaded again")
            await self._keeper.settle(replica)
        except MarftError as error:
            return self._not_yet(watched, error)
        watched.ready_since, watched.failed_requests = time.monotonic(), 0
        self._say(f"{replica.name} takes requests")
        return self._pace.poll_s

    def _not_yet(self, watched: _Watched, error: MarftError) -> float:
        pause = self._next_wait(watched)
        if not watched.replica.ready:
            self._say(f"{watched.replica.name} cannot take requests: {error}")
            self._say(f"  tried again in {pause:g} s")
        return pause

    def _next_wait(self, watched: _Watched) -> float:
        now, since = time.monotonic(), watched.ready_since
        if since is not None and now - since >= self._pace.well_after_s:
            watched.attempts = 0
        watched.ready_since = None
        pause = self._pace.wait_s(watched.attempts)
        watched.attempts += 1
        return pause

    async def _start_again(self, watched: _Watched, reason: str) -> float:
        """One new start of an engine of ours; seconds until the next look."""
        replica, engine = watched.replica, watched.engine
        assert engine is not None
        pause = self._next_wait(watched)
        detail = await in_thread(engine.detail)
        replica.become("down", f"{reason}; it is started again in {pause:g} s", detail)
        self._say(f"{replica.name} takes no requests: {reason} ({detail})")
        self._say(f"  it is started again in {pause:g} s; its log is kept as {engine.old_log}")
        await in_thread(engine.stop)
        await asyncio.sleep(pause)
        replica.become("starting", f"{reason}; it is being started again", detail)
        replica.restarts += 1
        try:
            url = await in_thread(engine.start)
        except MarftError:
            return 0.0  # the engine tells why, at the next look
        replica.upstream.move(url)
        replica.loader.client.url = url
        watched.strikes, watched.late_since, watched.failed_requests = 0, None, 0
        return 0.0
