"""Move an agent to another version while requests run.

Invariant: check, load and probe on every replica that takes traffic, write ``CURRENT``, then move
the alias; the old version is taken out only when its last request has ended and no episode keeps
it. Whatever fails, the agent keeps answering from the old version, nobody sees the new one, and the
alias and ``CURRENT`` agree. What the disk is to get is written while the engines load, so that the
alias waits for one rename; the line of the trail is on disk, too, before the swap is called done. A
swap goes on to its end when whoever asked for it has left. A version that every engine in the
traffic has loaded and probed already, and still has, is not loaded and probed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from marft_agents.errors import MarftError
from marft_agents.registry import Change
from marft_agents.schema import adapter_slug
from marft_agents.serving.aliases import Aliases, Route
from marft_agents.serving.fleet import Fleet
from marft_agents.serving.keeper import Keeper
from marft_agents.serving.loader import NoRoomError, StepError, step
from marft_agents.serving.prepared import Preparations
from marft_agents.serving.proofs import Brought
from marft_agents.serving.swap_events import SwapObserver, observed, spent
from marft_agents.serving.threads import in_thread

_log = logging.getLogger(__name__)
WAIT_FOR_DRAIN_S = 2.0
UNLOAD_AFTER_S = 0.5
"""How long an old version that nobody waits for stays, so that its unloading holds up neither the
swap's answer nor the new version's first replies."""


class Swapper:
    """Swaps of one gateway, one at a time."""

    def __init__(
        self, fleet: Fleet, aliases: Aliases, *, wait_for_drain_s: float = WAIT_FOR_DRAIN_S
    ) -> None:
        self.fleet = fleet
        self.aliases = aliases
        self._wait_for_drain_s = wait_for_drain_s
        self._lock = asyncio.Lock()
        self._retiring: dict[Route, asyncio.Task[bool]] = {}
        self._hurry = asyncio.Event()
        """Set while a slot is wanted."""
        self._swaps: set[asyncio.Task[dict[str, Any]]] = set()
        self.keeper = Keeper(aliases, self._lock)
        self.keeper.give_up = self.give_up
        self.observers: list[SwapObserver] = []
        self.preparations = Preparations(self)

    async def swap(
        self,
        agent: str,
        version: int,
        change: Change | None = None,
        *,
        now: bool = False,
        wait: bool = True,
    ) -> dict[str, Any]:
        """Serve ``version`` for ``agent``; a version that serves already is only probed again.

        ``change`` says for the audit trail who asks and why; a swap that fails is in it, too.
        Episodes keep the version they have, unless the swap is a rollback, or one that is to hold
        for them ``now``: they then get ``version`` at their next call. Without ``wait`` the old
        version is unloaded later.

        Returns:
            agent, from, to, probe, whether it was ``prepared``, so that it was neither loaded nor
            probed again, whether the old version was unloaded within the wait, how many episodes
            (``leases``) keep it, how many were ``moved``, and the ``seconds`` of each step:
            ``check``, ``load``, ``probe`` and ``record`` came one after the other, ``prepare``,
            ``compare`` and ``list`` beside them.

        Raises:
            StepError: naming the step that failed and what still serves.
            Refusal: while the server is being stopped.
        """
        self.fleet.require_taking()
        new = Route(adapter_slug(agent), version)
        work = self._swap(new, change or Change(), now=now, wait=wait)
        before = self.aliases.current(new.agent)
        told = observed(work, new.agent, new.version, self.observers, before)
        task = asyncio.create_task(told)
        self._swaps.add(task)
        self.fleet.swaps += 1
        task.add_done_callback(self._over)
        return await asyncio.shield(task)

    def _over(self, task: asyncio.Task[dict[str, Any]]) -> None:
        self._swaps.discard(task)
        self.fleet.swaps -= 1
        if not task.cancelled():
            task.exception()  # whoever asked may have left

    async def _swap(self, new: Route, change: Change, *, now: bool, wait: bool) -> dict[str, Any]:
        slug, version = new.agent, new.version
        moving = now or change.action == "rollback"
        room = self._has_room(new, spare=len(self._spare(new)))
        if moving and not room:  # what episodes keep must not hold up a rollback
            try:
                await in_thread(self._require_sense, new, change)
            except StepError as error:
                raise await self._stopped(new, change, error) from error
            self.aliases.leases.drop(slug, but=self.aliases.current(slug))
        await self._await_room(new)
        async with self._lock:
            before = self.aliases.current(slug)
            old = Route(slug, before) if before is not None else None
            moved = 0

            def point() -> None:
                nonlocal moved
                self.aliases.point(new)
                moved = self.aliases.move_over(new) if moving else 0

            try:
                if old != new or self.aliases.lost(slug) is not None:
                    brought = await self._move(new, change, point)
                else:
                    brought = await self._probe_again(new, change)
                    point()
            except StepError as error:
                raise await self._stopped(new, change, error) from error
        replaced = old if old != new else None
        return {
            "agent": slug,
            "from": before,
            "to": version,
            "probe": brought.report.as_json(),
            "prepared": brought.since is not None,
            "unloaded": await self.retire(replaced, wait=wait) if replaced else False,
            "leases": self.aliases.leased(replaced) if replaced else 0,
            "moved": moved,
            "seconds": spent(),
        }

    @contextlib.asynccontextmanager
    async def beside(self, route: Route, *, prepares: bool = False) -> AsyncGenerator[Brought]:
        """Check, load and probe a version beside the one in use; the block says what it is for.

        A version that nobody needs after the block, and that is not prepared, is unloaded.

        Args:
            prepares: it is for a swap to come, and takes no other agent's slot.

        Raises:
            StepError: naming the step that failed.
            Refusal: while the server is being stopped.
        """
        self.fleet.require_taking()
        await self._await_room(route, prepares=prepares)
        async with self._lock:
            try:
                yield await self._bring_up(route, prepares=prepares)
            finally:
                self._retire_unless_kept(route)

    def _retire_unless_kept(self, route: Route) -> None:
        if not self.aliases.is_needed(route) and route not in self.aliases.prepared():
            self.start_retiring(route)

    async def _bring_up(
        self, new: Route, allowed: Callable[[], None] | None = None, *, prepares: bool = False
    ) -> Brought:
        """Load and probe a version, or find that every engine has done so and still has it."""
        if new in self.aliases.kept():
            found = await self.fleet.proven(new, allowed)
            if not isinstance(found, str):
                return Brought(found.report, found.time)
            _log.info("%s is loaded and probed once more: %s", new.name, found)
            if new in self.aliases.prepared():
                self.start_retiring(new)  # which comes to nothing if it is up in the end
        await self._make_room(new, prepares=prepares)
        in_use = self.aliases.is_needed(new)
        return Brought(await self.fleet.bring_up(new, in_use=in_use, allowed=allowed))

    async def _probe_again(self, new: Route, change: Change) -> Brought:
        with step(new.name, "check"):
            await in_thread(self._require_movable, new, change)
        # A failed probe must not unload what serves, so this asks without loading.
        report = await self.fleet.probe_again(new)
        change = replace(change, evidence={**change.evidence, "probe": report.as_json()})
        with step(
            new.name, "record"
        ):  # somebody may have moved CURRENT without telling this server
            await in_thread(self.fleet.registry.move, new.agent, new.version, change)
        return Brought(report)

    def _has_room(self, new: Route, *, spare: int = 0) -> bool:
        """Whether there is a slot for it when so many others give up theirs."""
        slots, kept = self.fleet.limits.slots, self.aliases.kept()
        return slots is None or new in kept or len(kept) - spare < slots

    def _spare(self, new: Route, *, prepares: bool = False) -> list[Route]:
        """Prepared versions that give up their slots for it, the first one first."""
        prepared = self.aliases.prepared(new.agent if prepares else None)
        return [r for r in prepared if r != new and not self.aliases.is_needed(r)]

    async def _await_room(self, new: Route, *, prepares: bool = False) -> None:
        """Let versions that are about to go do so first."""
        until = time.monotonic() + self._wait_for_drain_s

        def has_room() -> bool:
            return self._has_room(new, spare=len(self._spare(new, prepares=prepares)))

        while self._retiring and not has_room() and time.monotonic() < until:
            self._hurry.set()
            await asyncio.wait(
                self._retiring.values(),
                timeout=until - time.monotonic(),
                return_when=asyncio.FIRST_COMPLETED,
            )
        self._hurry.clear()

    async def _make_room(self, new: Route, *, prepares: bool) -> None:
        """Unload prepared versions as far as their slots are needed.

        Raises:
            NoRoomError: that would not be enough.
        """
        spare = self._spare(new, prepares=prepares)
        with step(new.name, "check"):
            self._require_room(new, len(spare))
        for route in spare:
            if self._has_room(new):
                return
            _log.warning("%s was prepared, and gives up its slot for %s", route.name, new.name)
            self.aliases.remove(route)
            await self.fleet.unload(route)

    def _require_room(self, new: Route, spare: int) -> None:
        if self._has_room(new, spare=spare):
            return
        kept = self.aliases.kept()
        told = ", ".join(f"{route.name} ({why})" for route, why in kept.items())
        raise NoRoomError(
            f"step check of {new.name}:"
            f" the engine keeps {self.fleet.limits.slots} adapters and has {len(kept)}: {told};"
            f" {new.name} would be one more; wait until one of them is not needed any more, move"
            " over the episodes that keep old ones (--now), or restart serve with more:"
            " --max-cpu-loras",
            step="check",
            refused=False,  # another time there is room
        )

    def _note_failure(
        self, new: Route, before: int | None, change: Change, error: StepError
    ) -> None:
        registry, action = self.fleet.registry, change.action
        # The swap's own error matters more than one of the trail.
        with contextlib.suppress(MarftError, OSError), registry.changing(new.agent):
            registry.note(action, new.agent, before, new.version, change, result=str(error))

    def _require_movable(self, new: Route, change: Change) -> None:
        back = change.action == "rollback"
        registry = self.fleet.registry
        registry.require_movable(new.agent, new.version, force=change.force, back=back)

    def _require_sense(self, new: Route, change: Change) -> None:
        """Refuse what the disk speaks against, before any episode moves over."""
        with step(new.name, "check"):
            self._require_movable(new, change)
            self.fleet.replicas[0].loader.check(new.agent, new.version)

    async def _stopped(self, new: Route, change: Change, error: StepError) -> StepError:
        """What is said, and noted, of a swap that came to nothing."""
        before = self.aliases.current(new.agent)
        await in_thread(self._note_failure, new, before, change, error)
        name = None if before is None else Route(new.agent, before).name
        still = f"{name} still serves" if name else f"{new.agent} is not served"
        message = f"swap stopped at {error}; {still}"
        return StepError(message, step=error.step, refused=error.refused)

    async def _move(self, new: Route, change: Change, point: Callable[[], None]) -> Brought:
        """Bring it up, and meanwhile write what can be written; then move ``CURRENT`` and alias."""
        found: Future[dict[str, Any]] = Future()
        on_disk = partial(asyncio.get_running_loop().call_soon_threadsafe, point)
        writing = asyncio.create_task(in_thread(self._write, new, change, found, on_disk))
        try:
            brought = await self._bring_up(new, partial(self._require_movable, new, change))
        except BaseException as error:
            found.set_exception(error)
            with contextlib.suppress(StepError):
                await writing
            raise
        found.set_result(brought.evidence())
        try:
            await writing
        except StepError:
            self._retire_unless_kept(new)
            raise
        return brought

    def _write(
        self,
        new: Route,
        change: Change,
        found: Future[dict[str, Any]],
        on_disk: Callable[[], object],
    ) -> None:
        """Prepare the move, and when it was ``found`` that the version is up, move ``CURRENT``.

        Says that it is on disk, then waits for the line of the trail.
        """
        registry = self.fleet.registry
        with step(new.name, "record", part="prepare"):
            move = registry.prepare_move(new.agent, new.version, change)
        if found.exception() is not None:  # waits
            registry.discard_move(move)
            return
        with step(new.name, "record"):
            registry.commit_move(move, found.result())
        on_disk()
        try:
            registry.finish_move(move)
        except OSError as error:
            _log.error(
                "%s was swapped, and the disk does not confirm its line in the trail (%s); look"
                " after the disk, and at the trail with marft-agents adapters show",
                move.agent,
                error,
            )

    def start_retiring(self, route: Route, *, after_s: float = 0.0) -> asyncio.Task[bool]:
        """Give the version to no new episode, and unload it when nobody has it any more.

        Args:
            after_s: unload it not before so many seconds, unless its slot is wanted.
        """
        self.aliases.retire(route)
        task = self._retiring.get(route)
        if task is None or task.done():
            task = self._retiring[route] = asyncio.create_task(
                self._unload_when_idle(route, after_s)
            )
            task.add_done_callback(lambda done: self._forget(route, done))
        return task

    def _forget(self, route: Route, task: asyncio.Task[bool]) -> None:
        if self._retiring.get(route) is task:
            del self._retiring[route]

    def give_up(self, route: Route, error: StepError) -> bool:
        """Do without a version that cannot be relied on; whether it was done.

        A current one is needed, unless it is lost or damaged on disk and nothing serves it: its
        agent is then not answered, and the others are.
        """
        if self.aliases.give_up(route):
            self.start_retiring(route)
            return True
        if error.step != "check":
            return False
        if self.aliases.lost(route.agent) is None:
            if any(replica.ready for replica in self.fleet.replicas):
                return False
            self.aliases.lose(route, str(error))
        return True

    async def retire(self, route: Route, *, wait: bool = True) -> bool:
        """Whether it was unloaded within the wait; it is unloaded later otherwise.

        Episodes may keep it for long, so those are not waited for.
        """
        if not wait:
            self.start_retiring(route, after_s=UNLOAD_AFTER_S)
            return False
        task = self.start_retiring(route)
        wait_s = 0.0 if self.aliases.leased(route) else self._wait_for_drain_s
        done, _ = await asyncio.wait({task}, timeout=wait_s)
        return bool(done) and task.result()

    async def _unload_when_idle(self, route: Route, after_s: float) -> bool:
        if after_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(after_s):
                    await self._hurry.wait()
        while True:
            await self.aliases.drained(route)
            async with self._lock:
                if not self.aliases.is_retired(route):
                    return False  # it was swapped back meanwhile
                if self.aliases.is_needed(route):
                    continue  # it was swapped back, used, and swapped away again meanwhile
                self.aliases.remove(route)
                failed = await self.fleet.unload(route)
                for name, reason in failed.items():
                    _log.warning("could not unload %s from %s: %s", route.name, name, reason)
                return not failed
