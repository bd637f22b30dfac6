"""Canaries of a running gateway: they are watched, and end by themselves.

Invariant: the episodes of a canary that is known to be worse are moved over before anything else
is done or written. What the disk or an engine does not take at once is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Literal, get_args

from marft_agents.errors import MarftError, RegistryError
from marft_agents.registry import Change
from marft_agents.serving.aliases import Route
from marft_agents.serving.canary import Recent
from marft_agents.serving.canary_actions import CanaryActions, Running, Watch
from marft_agents.serving.loader import StepError
from marft_agents.serving.log_lines import say
from marft_agents.serving.passage import Outcome
from marft_agents.serving.swap import Swapper
from marft_agents.serving.threads import in_thread

_log = logging.getLogger(__name__)
_TICK_S = 1.0
_RETRY_S = 10.0
_LAST_S = 5.0
"""For what is still to be written when the server stops."""
AUTOMATIC = "automatic"
Verdict = Literal["passed", "worse", "held", "not_judged", "went_back"]
"""Of a canary, then of the watch of a version that was promoted."""


class Canaries(CanaryActions):
    """Watches canaries and promoted versions beside what an operator asks."""

    def __init__(self, swapper: Swapper, *, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(swapper, now=now)
        self._wake = asyncio.Event()
        self._retry_at = 0.0
        self.verdicts: dict[str, int] = dict.fromkeys(get_args(Verdict), 0)
        """How canaries and watches came out, since the start."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Watch while the gateway runs; begins with the canaries that the disk tells of."""
        await self.read_disk()

        async def watch() -> None:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TICK_S):  # wait_for may swallow a cancellation
                        await self._wake.wait()
                self._wake.clear()
                try:
                    await self.tick()
                except Exception:
                    _log.exception("looking after canaries failed")

        async def expire() -> None:  # also while a long swap holds up the other
            while True:
                await asyncio.sleep(_TICK_S)
                self.aliases.leases.expire()

        tasks = [asyncio.create_task(watch()), asyncio.create_task(expire())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_S):
                    await self._write_all()

    async def read_disk(self) -> None:
        """Take note of the canaries that an earlier server had; they are loaded when it is time."""
        await in_thread(self._read_pending)

    def observe(self, outcome: Outcome) -> None:
        """Learn how a request ended."""
        agent, version = outcome.route.agent, outcome.route.version
        self._recent.setdefault(agent, Recent(self._now)).add(outcome)
        running, watch = self._running.get(agent), self._watches.get(agent)
        if running is not None:
            if version == running.plan.version:
                running.seen.new.add(outcome)
            elif version == self.aliases.current(agent):
                running.seen.old.add(outcome)
            if worse := running.seen.look().worse:
                self._take_out(agent, running, worse)
        if watch is not None and outcome.route == watch.route:
            watch.seen.new.add(outcome)
            if watch.seen.look().worse:
                self._wake.set()

    async def tick(self) -> None:
        """Do what is due: leases that end, canaries and watches that are decided."""
        self.aliases.leases.expire()
        for agent, running in list(self._running.items()):
            if self._is_lost(agent, running):
                self._take_out(agent, running, ["it could not be loaded again"])
        going_on = not self.swapper.fleet.stopping
        for agent in [*self._running, *self._watches] if going_on else ():
            await self._attend(agent)
        if (self._pending or self._unwritten) and self._now() >= self._retry_at:
            self._retry_at = self._now() + _RETRY_S
            async with self._lock:
                await self._write_all()
                for agent in list(self._pending) if going_on else ():
                    await self._resume(agent)

    async def _attend(self, agent: str) -> None:
        running, watch, now = self._running.get(agent), self._watches.get(agent), self._now()
        if running is not None and not running.settled and now >= running.until:
            async with self._lock:
                if self._running.get(agent) is running and running.seen.verdict.enough:
                    await self._decide(agent, running)
        due = watch is not None and (watch.seen.verdict.worse or now >= watch.until)
        if watch is not None and due and now >= watch.again_at:
            async with self._lock:
                if self._watches.get(agent) is watch:
                    await self._end_watch(agent, watch)

    async def _decide(self, agent: str, running: Running) -> None:
        if worse := running.seen.last_look().worse:
            self._take_out(agent, running, worse)
        else:
            await self._pass(agent, running)

    def _is_lost(self, agent: str, running: Running) -> bool:
        """Whether a replica that came back could not load it, so that it was given up."""
        promoted = self.aliases.current(agent) == running.plan.version
        return self.aliases.split(agent) is None and not promoted

    def _take_out(self, agent: str, running: Running, worse: Sequence[str]) -> None:
        """At once, whatever else is under way; it is written down by the next tick."""
        route = Route(agent, running.plan.version)
        evidence = running.seen.told() | {"worse": list(worse)}
        self._forget(agent, "rolled back")
        moved = self.aliases.leases.drop(agent, version=route.version)
        self.swapper.start_retiring(route)
        self._verdict("worse", route, reason="; ".join(worse), moved=moved)
        change = Change(AUTOMATIC, "canary", evidence=evidence | {"moved": moved})
        self._unwritten[agent] = "canary-rollback", change
        self._retry_at = 0.0
        self._wake.set()

    async def _pass(self, agent: str, running: Running) -> None:
        try:
            await self._do_pass(agent, running)
        except (MarftError, OSError) as error:
            name = Route(agent, running.plan.version).name
            _log.error("the canary %s goes on as it is: %s", name, error)
            refused = error.refused if isinstance(error, StepError) else None
            running.settled = isinstance(error, RegistryError) if refused is None else refused
            running.until = self._now() + _RETRY_S
        else:
            running.settled = True

    async def _do_pass(self, agent: str, running: Running) -> None:
        plan, evidence = running.plan, running.seen.told()
        change = Change(AUTOMATIC, "canary", evidence=evidence, force=True)
        if not plan.passed:
            plan = plan.model_copy(update={"passed": True})
            await in_thread(self._registry.set_canary, agent, plan, change, action="canary-passed")
            running.plan = plan
            self._verdict("passed", Route(agent, plan.version), evidence=evidence)
        if self._running.get(agent) is not running:
            return  # it was found worse meanwhile
        if plan.then == "promote":
            why = Change(plan.by, "canary --then promote", evidence=evidence)
            done = await self._swap(agent, plan.version, why, False, None, locked=True)
            if running.seen.verdict.worse:  # meanwhile: it goes back as one that is watched does
                route, back = Route(agent, plan.version), Route(agent, done["from"])
                self._watches[agent] = Watch(route, back, running.seen, self._now())
                self._wake.set()
        elif plan.then == "stop":
            await self._stop(agent, change, now=False, locked=True)

    async def _end_watch(self, agent: str, watch: Watch) -> None:
        verdict = watch.seen.verdict
        if verdict.worse:
            await self._go_back(agent, watch)
            return
        how = "held" if verdict.enough else "not judged: too few requests before or after the move"
        self._over_with(agent, watch, how)
        self._verdict("held" if verdict.enough else "not_judged", watch.route, reason=how)

    async def _go_back(self, agent: str, watch: Watch) -> None:
        evidence = watch.seen.told()
        change = Change(AUTOMATIC, "promote --watch", "rollback", evidence=evidence)
        try:
            await self._swap(agent, watch.back.version, change, True, None, locked=True)
        except (MarftError, OSError) as error:
            _log.error("%s is worse and could not go back: %s", watch.route.name, error)
            if isinstance(error, StepError) and error.refused:
                self._over_with(agent, watch, f"worse, and could not go back: {error}")
            else:
                watch.again_at = self._now() + _RETRY_S
            return
        self._over_with(agent, watch, "rolled back")
        reasons = "; ".join(watch.seen.verdict.worse)
        self._verdict("went_back", watch.route, reason=reasons, to=watch.back.version)

    def _over_with(self, agent: str, watch: Watch, how: str) -> None:
        self._watches.pop(agent, None)
        seen = watch.seen.told()
        self._ended[agent] = {"version": watch.route.version, "how": how, "seen": seen}

    def _verdict(self, verdict: Verdict, route: Route, **told: Any) -> None:
        level = logging.WARNING if verdict in ("worse", "went_back") else logging.INFO
        say("canary", level, agent=route.agent, version=route.version, verdict=verdict, **told)
        self.verdicts[verdict] += 1

    async def _write_all(self) -> None:
        for agent in list(self._unwritten):
            await self._write(agent)

    async def _write(self, agent: str) -> None:
        action, change = self._unwritten[agent]
        try:
            await in_thread(self._registry.end_canary, agent, change, action=action)
        except (MarftError, OSError) as error:
            _log.error(
                "the canary of %s has ended and the disk does not take it (%s); a server that is"
                " started before it does would go on with it",
                agent,
                error,
            )
        else:
            self._unwritten.pop(agent, None)

    def _read_pending(self) -> None:
        for agent in self._registry.agents():
            try:
                plan = self._registry.canary(agent)
            except RegistryError as error:
                _log.error("%s", error)
                if self._registry.canary_is_gone(agent):
                    why = {"reason": "its version is gone"}
                    self._unwritten[agent] = "canary-stop", Change(AUTOMATIC, "serve", evidence=why)
                continue
            if plan is not None:
                self._pending[agent] = plan

    async def _resume(self, agent: str) -> None:
        plan = self._pending[agent]
        try:
            async with self.swapper.beside(Route(agent, plan.version)):
                self._run(agent, plan)
        except StepError as error:
            if not error.refused and error.step != "probe":
                return  # the engine's trouble; it is tried again
            del self._pending[agent]
            _log.error("the canary of an earlier server is not gone on with: %s", error)
            self._ended[agent] = {"version": plan.version, "how": str(error), "seen": None}
            self._unwritten[agent] = (
                "canary-stop",
                Change(AUTOMATIC, "serve", evidence={"reason": str(error)}),
            )
            await self._write(agent)
        else:
            del self._pending[agent]
