"""What an operator asks about canaries, and every swap, for their sake.

Invariant: a canary is loaded and probed like any version, and ``CURRENT`` does not move. The file
``CANARY`` and the split of the alias table agree after every action. Every change has its line in
the trail. An action goes on to its end when whoever asked has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from marft_agents.errors import RegistryError
from marft_agents.registry import Bounds, CanaryPlan, Change
from marft_agents.registry.audit import CanaryAction
from marft_agents.registry.canary import CANARY_FILE, Then
from marft_agents.schema import adapter_slug
from marft_agents.serving.aliases import Route, Split
from marft_agents.serving.canary import Comparison, Recent
from marft_agents.serving.loader import step
from marft_agents.serving.log_lines import say
from marft_agents.serving.swap import Swapper
from marft_agents.serving.threads import in_thread

_T = TypeVar("_T")


@dataclass
class Running:
    """A canary under way; ``until`` is on the monotonic clock."""

    plan: CanaryPlan
    seen: Comparison
    until: float
    settled: bool = False
    """Whether what is to be done once it has stood the test was done, or is refused."""


@dataclass
class Watch:
    """A promoted version that goes back by itself if it is worse than the one before was."""

    route: Route
    back: Route
    seen: Comparison
    until: float
    again_at: float = 0.0
    """When to try once more to go back, after a try that failed."""


class CanaryActions:
    """Starts and ends canaries, and makes every swap.

    Args:
        now: a monotonic clock.
    """

    def __init__(self, swapper: Swapper, *, now: Callable[[], float] = time.monotonic) -> None:
        self.swapper = swapper
        self.aliases = swapper.aliases
        self._registry = swapper.fleet.registry
        self._now = now
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._running: dict[str, Running] = {}
        self._watches: dict[str, Watch] = {}
        self._ended: dict[str, dict[str, Any]] = {}
        self._pending: dict[str, CanaryPlan] = {}
        """Of an earlier server, not loaded yet."""
        self._unwritten: dict[str, tuple[CanaryAction, Change]] = {}
        self._recent: dict[str, Recent] = {}

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
        wait: bool = True,
    ) -> dict[str, Any]:
        """:meth:`Swapper.swap`, with what it means for a canary.

        With ``watch``, the version goes back by itself if it does worse than the one before did.

        Raises:
            StepError: naming the step that failed and what still serves.
        """
        return await self._whole(
            self._swap(agent, version, change or Change(), now, watch, wait=wait)
        )

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

    # -- inside ----------------------------------------------------------------------------

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
                await in_thread(self._registry.require_canary, agent, plan, force=change.force)
                if self.aliases.current(agent) is None:
                    raise RegistryError(f"agent {agent!r} is not served; promote a version first")
            if running is not None:
                plan = plan.model_copy(update={"key": running.plan.key})
                if _same(plan, running.plan):
                    return self._answer(agent, changed=False)
            async with self.swapper.beside(route) as brought:
                told = {**brought.evidence(), **change.evidence}
                change = replace(change, evidence=told)
                with step(route.name, "record"):
                    await in_thread(self._registry.set_canary, agent, plan, change)
                    if running is not None and self._running.get(agent) is not running:
                        raise RegistryError("it was found worse meanwhile, and is taken out")
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
        self._running[agent] = Running(plan, Comparison(plan.bounds), until)
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
        wait: bool = True,
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
                result = await self.swapper.swap(slug, version, change, now=now, wait=wait)
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
        self._watches[route.agent] = Watch(route, back, Comparison(bounds, before), until)
        self._ended.pop(route.agent, None)

    async def _agree(self, agent: str) -> None:
        """After a swap, or one that failed: what the disk says of the canary holds here, too."""
        if agent not in self._pending and agent not in self._running:
            return
        if await in_thread((self._registry.root / agent / CANARY_FILE).exists):
            return
        self._pending.pop(agent, None)
        running = self._running.get(agent)
        if running is None:
            return
        route = Route(agent, running.plan.version)
        promoted = self.aliases.current(agent) == route.version
        self._forget(agent, "promoted" if promoted else "ended by a move to another version")
        if not promoted:
            self.swapper.start_retiring(route)


def _same(one: CanaryPlan, other: CanaryPlan) -> bool:
    aside = {"since", "by", "passed"}
    return one.model_dump(exclude=aside) == other.model_dump(exclude=aside)
