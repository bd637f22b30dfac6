"""Canaries of a running gateway: a version gets a share of the episodes, and is watched.

Invariant: a canary is loaded and probed like any version, and ``CURRENT`` does not move. Its
episodes are moved over as soon as it is known to be worse, before anything is written; the file
``CANARY`` and the split of the alias table agree otherwise. Every change has its line in the trail.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar, get_args

from marft_agents.errors import MarftError, RegistryError
from marft_agents.registry import Bounds, CanaryPlan, Change
from marft_agents.registry.audit import CanaryAction
from marft_agents.registry.canary import CANARY_FILE, Then
from marft_agents.schema import adapter_slug
from marft_agents.serving.aliases import Route, Split
from marft_agents.serving.canary import Comparison, Recent
from marft_agents.serving.loader import StepError, step
from marft_agents.serving.log_lines import say
from marft_agents.serving.passage import Outcome
from marft_agents.serving.swap import Swapper
from marft_agents.serving.threads import in_thread

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_TICK_S = 1.0
_RETRY_S = 10.0
AUTOMATIC = "automatic"
Verdict = Literal["passed", "worse", "held", "not_judged", "went_back"]
"""Of a canary, then of the watch of a version that was promoted."""


@dataclass
class _Running:
    """A canary under way; ``until`` is on the monotonic clock."""

    plan: CanaryPlan
    seen: Comparison
    until: float


@dataclass
class _Watch:
    """A promoted version that goes back by itself if it is worse than the one before was."""

    route: Route
    back: Route
    seen: Comparison
    until: float


class Canaries:
    """Starts, watches and ends canaries; every swap goes through it, for their sake.

    Args:
        now: a monotonic clock.
    """

    def __init__(self, swapper: Swapper, *, now: Callable[[], float] = time.monotonic) -> None:
        self.swapper = swapper
        self.aliases = swapper.aliases
        self._registry = swapper.fleet.registry
        self._now = now
        self._lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._running: dict[str, _Running] = {}
        self._watches: dict[str, _Watch] = {}
        self._ended: dict[str, dict[str, Any]] = {}
        self._pending: dict[str, CanaryPlan] = {}
        """Of an earlier server, not loaded yet."""
        self._unwritten: dict[str, tuple[CanaryAction, Change]] = {}
        self._retry_at = 0.0
        self._recent: dict[str, Recent] = {}
        self.verdicts: dict[str, int] = dict.fromkeys(get_args(Verdict), 0)
        """How canaries and watches came out, since the start."""

    # -- what an operator asks -------------------------------------------------------------

    async def start(
        self,
        agent: str,
        version: int,
        share: float,
        *,
        bounds: Bounds | None = None,
        then: Then = "tell",
        change: Change | None = None,
    ) -> dict[str, Any]:
        """Give a version a share of the episodes that begin from now on.

        Saying the same again changes nothing. Another share or other bounds of the running canary
        begin its window anew; a larger share keeps the episodes of the smaller one.

        Raises:
            StepError: naming the step that failed, or what speaks against it.
        """
        change, slug = change or Change(), adapter_slug(agent)
        plan = CanaryPlan(
            version=version,
            share=share,
            key=secrets.token_hex(8),
            since=datetime.now(UTC),
            by=change.by or "serve",
            bounds=bounds or Bounds(),
            then=then,
        )
        return await self._whole(self._start(slug, plan, change))

    async def stop(
        self, agent: str, change: Change | None = None, *, now: bool = False
    ) -> dict[str, Any]:
        """End the agent's canary, if there is one; its episodes keep it unless ``now``.

        Raises:
            MarftError: the disk refuses; the canary then goes on.
        """
        return await self._whole(self._stop(adapter_slug(agent), change or Change(), now=now))

    async def swap(
        self,
        agent: str,
        version: int,
        change: Change | None = None,
        *,
        now: bool = False,
        watch: Bounds | None = None,
    ) -> dict[str, Any]:
        """:meth:`Swapper.swap`, with what it means for a canary.

        With ``watch``, the version goes back by itself if it does worse than the one before did.

        Raises:
            StepError: naming the step that failed and what still serves.
        """
        return await self._whole(self._swap(agent, version, change or Change(), now, watch))

    def told(self, agent: str) -> dict[str, Any]:
        """The agent's canary and watch in numbers, and how the last one ended."""
        running, watch = self._running.get(agent), self._watches.get(agent)
        waiting = self._pending.get(agent)
        canary: dict[str, Any] | None = None
        if running is not None:
            canary = running.plan.model_dump(mode="json", exclude={"bounds", "key"})
            canary |= running.plan.bounds.model_dump()
            canary |= {"remaining_s": self._remaining(running.until), "seen": running.seen.told()}
        elif waiting is not None:
            canary = {"version": waiting.version, "share": waiting.share, "loaded": False}
        return {
            "canary": canary,
            "watch": watch
            and {
                "version": watch.route.version,
                "back": watch.back.version,
                "remaining_s": self._remaining(watch.until),
                "seen": watch.seen.told(),
            },
            "ended": self._ended.get(agent),
        }

    # -- what happens by itself ------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Watch while the gateway runs; begins with the canaries that the disk tells of."""
        await self.read_disk()

        async def watch() -> None:
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), _TICK_S)
                self._wake.clear()
                try:
                    await self.tick()
                except Exception:
                    _log.exception("looking after canaries failed")

        task = asyncio.create_task(watch())
        try:
            yield
        finally:
            task.cancel()

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
            if running.seen.look().worse:
                self._wake.set()
        if watch is not None and outcome.route == watch.route:
            watch.seen.new.add(outcome)
            if watch.seen.look().worse:
                self._wake.set()

    async def tick(self) -> None:
        """Do what is due: leases that end, canaries and watches that are decided."""
        self.aliases.leases.expire()
        for agent in [*self._running, *self._watches]:
            await self._attend(agent)
        if (self._pending or self._unwritten) and self._now() >= self._retry_at:
            self._retry_at = self._now() + _RETRY_S
            async with self._lock:
                for agent in list(self._unwritten):
                    await self._write(agent)
                for agent in list(self._pending):
                    await self._resume(agent)

    async def _attend(self, agent: str) -> None:
        running, watch, now = self._running.get(agent), self._watches.get(agent), self._now()
        if running is not None and (
            running.seen.verdict.worse or now >= running.until or self._is_lost(agent, running)
        ):
            async with self._lock:
                if self._running.get(agent) is running:
                    await self._decide(agent, running)
        if watch is not None and (watch.seen.verdict.worse or now >= watch.until):
            async with self._lock:
                if self._watches.get(agent) is watch:
                    await self._end_watch(agent, watch)

    async def _decide(self, agent: str, running: _Running) -> None:
        seen, plan = running.seen, running.plan
        if self._is_lost(agent, running):
            await self._roll_back(agent, running, ["it could not be loaded again"])
        elif seen.verdict.worse:
            await self._roll_back(agent, running, seen.verdict.worse)
        elif not plan.passed and seen.verdict.enough:
            if worse := seen.last_look().worse:
                await self._roll_back(agent, running, worse)
            else:
                await self._pass(agent, running)

    def _is_lost(self, agent: str, running: _Running) -> bool:
        """Whether a replica that came back could not load it, so that it was given up."""
        promoted = self.aliases.current(agent) == running.plan.version
        return self.aliases.split(agent) is None and not promoted

    async def _roll_back(self, agent: str, running: _Running, worse: Sequence[str]) -> None:
        route = Route(agent, running.plan.version)
        evidence = running.seen.told() | {"worse": list(worse)}
        self._forget(agent, "rolled back")
        moved = self.aliases.leases.drop(agent, version=route.version)
        self.swapper.start_retiring(route)
        self._verdict("worse", route, reason="; ".join(worse), moved=moved)
        change = Change(AUTOMATIC, "canary", evidence=evidence | {"moved": moved})
        self._unwritten[agent] = "canary-rollback", change
        await self._write(agent)

    async def _pass(self, agent: str, running: _Running) -> None:
        name, evidence = Route(agent, running.plan.version).name, running.seen.told()
        running.plan = running.plan.model_copy(update={"passed": True})
        self._verdict("passed", Route(agent, running.plan.version), evidence=evidence)
        change = Change(AUTOMATIC, "canary", evidence=evidence, force=True)
        try:
            await in_thread(
                self._registry.set_canary, agent, running.plan, change, action="canary-passed"
            )
            if running.plan.then == "promote":
                why = Change(running.plan.by, "canary --then promote", evidence=evidence)
                await self._swap(agent, running.plan.version, why, False, None, locked=True)
            elif running.plan.then == "stop":
                await self._stop(agent, change, now=False, locked=True)
        except (MarftError, OSError) as error:
            _log.error("the canary %s goes on as it is: %s", name, error)

    async def _end_watch(self, agent: str, watch: _Watch) -> None:
        del self._watches[agent]
        told = watch.seen.told() | {"version": watch.route.version, "seen": watch.seen.told()}
        if not watch.seen.verdict.worse:
            enough = watch.seen.verdict.enough
            how = "held" if enough else "not judged: too few requests before or after the move"
            self._ended[agent] = {"version": watch.route.version, "how": how, "seen": told["seen"]}
            self._verdict("held" if enough else "not_judged", watch.route, reason=how)
            return
        reasons = "; ".join(watch.seen.verdict.worse)
        self._verdict("went_back", watch.route, reason=reasons, to=watch.back.version)
        change = Change(AUTOMATIC, "promote --watch", "rollback", evidence=watch.seen.told())
        how = "rolled back"
        try:
            await self._swap(agent, watch.back.version, change, True, None, locked=True)
        except (MarftError, OSError) as error:
            how = f"worse, and could not go back: {error}"
            _log.error("%s: %s", watch.route.name, how)
        self._ended[agent] = {"version": watch.route.version, "how": how, "seen": told["seen"]}

    # -- inside ----------------------------------------------------------------------------

    def _verdict(self, verdict: Verdict, route: Route, **told: Any) -> None:
        level = logging.WARNING if verdict in ("worse", "went_back") else logging.INFO
        say("canary", level, agent=route.agent, version=route.version, verdict=verdict, **told)
        self.verdicts[verdict] += 1

    async def _whole(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Go on to the end when whoever asked has left."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return await asyncio.shield(task)

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    def _remaining(self, until: float) -> float:
        return round(max(0.0, until - self._now()), 1)

    async def _start(self, agent: str, plan: CanaryPlan, change: Change) -> dict[str, Any]:
        async with self._lock:
            route, running = Route(agent, plan.version), self._running.get(agent)
            with step(route.name, "check"):
                self._registry.require_canary(agent, plan, force=change.force)
                if self.aliases.current(agent) is None:
                    raise RegistryError(f"agent {agent!r} is not served; promote a version first")
            if running is not None:
                plan = plan.model_copy(update={"key": running.plan.key})
                if _same(plan, running.plan):
                    return self._answer(agent, changed=False)
            async with self.swapper.beside(route) as report:
                told = {"probe": report.as_json(), **change.evidence}
                change = replace(change, evidence=told)
                with step(route.name, "record"):
                    await in_thread(self._registry.set_canary, agent, plan, change)
                self._run(agent, plan)
            self._pending.pop(agent, None)
            self._unwritten.pop(agent, None)
            return self._answer(agent, changed=True)

    def _answer(self, agent: str, *, changed: bool) -> dict[str, Any]:
        told = self.told(agent)["canary"]
        return {"agent": agent, "from": self.aliases.current(agent), "changed": changed, **told}

    def _run(self, agent: str, plan: CanaryPlan) -> None:
        age = (datetime.now(UTC) - plan.since).total_seconds()
        until = self._now() + max(0.0, plan.bounds.for_s - age)
        say("canary", agent=agent, version=plan.version, verdict="begun", share=plan.share)
        self._running[agent] = _Running(plan, Comparison(plan.bounds), until)
        self._ended.pop(agent, None)
        self.aliases.share(agent, Split(plan.version, plan.share, plan.key))

    def _forget(self, agent: str, how: str) -> None:
        """Give the canary to no new episode."""
        running = self._running.pop(agent, None)
        if running is not None:
            self.aliases.unshare(agent)
            told = running.seen.told()
            self._ended[agent] = {"version": running.plan.version, "how": how, "seen": told}

    async def _stop(
        self, agent: str, change: Change, *, now: bool, locked: bool = False
    ) -> dict[str, Any]:
        async with contextlib.nullcontext() if locked else self._lock:
            running = self._running.get(agent)
            if running is not None:
                told = {**running.seen.told(), **change.evidence}
                change = replace(change, evidence=told)
            version = await in_thread(self._registry.end_canary, agent, change)
            self._pending.pop(agent, None)
            self._unwritten.pop(agent, None)
            self._forget(agent, "stopped")
            if running is None:
                return {"agent": agent, "version": version, "unloaded": False, "leases": 0}
            route = Route(agent, running.plan.version)
            if now:
                self.aliases.leases.drop(agent, version=route.version)
            return {
                "agent": agent,
                "version": route.version,
                "unloaded": await self.swapper.retire(route),
                "leases": self.aliases.leased(route),
            }

    async def _swap(
        self,
        agent: str,
        version: int,
        change: Change,
        now: bool,
        watch: Bounds | None,
        *,
        locked: bool = False,
    ) -> dict[str, Any]:
        async with contextlib.nullcontext() if locked else self._lock:
            slug = adapter_slug(agent)
            running = self._running.get(slug)
            if running is not None and running.plan.version == version:
                change = replace(
                    change, evidence={**change.evidence, "canary": running.seen.told()}
                )
            if watch is not None:
                change = replace(change, evidence={**change.evidence, "watch": watch.model_dump()})
            try:
                result = await self.swapper.swap(slug, version, change, now=now)
            finally:
                await self._agree(slug)
            before = result["from"]
            if before is not None and before != version:
                self._watches.pop(slug, None)
                if watch is not None:
                    self._watch(Route(slug, version), Route(slug, before), watch)
                    result["watch"] = self.told(slug)["watch"]
            return result

    def _watch(self, route: Route, back: Route, bounds: Bounds) -> None:
        recent = self._recent.get(route.agent)
        before = recent.side(back) if recent is not None else None
        until = self._now() + bounds.for_s
        self._watches[route.agent] = _Watch(route, back, Comparison(bounds, before), until)
        self._ended.pop(route.agent, None)

    async def _agree(self, agent: str) -> None:
        """After a swap, or one that failed: what the disk says of the canary holds here, too."""
        running = self._running.get(agent)
        there = (self._registry.root / agent / CANARY_FILE).exists()
        if not there:
            self._pending.pop(agent, None)
        if running is None:
            return
        route = Route(agent, running.plan.version)
        if there:
            if self.aliases.split(agent) is None and self.aliases.current(agent) != route.version:
                plan = running.plan
                self.aliases.share(agent, Split(plan.version, plan.share, plan.key))
            return
        promoted = self.aliases.current(agent) == route.version
        self._forget(agent, "promoted" if promoted else "ended by a move to another version")
        if not promoted:
            self.swapper.start_retiring(route)

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
            del self._unwritten[agent]

    def _read_pending(self) -> None:
        for agent in self._registry.agents():
            try:
                plan = self._registry.canary(agent)
            except RegistryError as error:
                _log.error("%s", error)
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


def _same(one: CanaryPlan, other: CanaryPlan) -> bool:
    aside = {"since", "by", "passed"}
    return one.model_dump(exclude=aside) == other.model_dump(exclude=aside)
