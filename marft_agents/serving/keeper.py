"""What one replica must have loaded before it takes traffic, and what it must not keep.

Invariant: a replica becomes ready only under the lock that swaps hold, after every wanted version
was loaded and probed on it; so no swap is missed. An adapter of this registry that nobody keeps is
unloaded, so an engine's list stays bounded whatever call failed before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from marft_agents.errors import MarftError, ServerError
from marft_agents.serving.aliases import Aliases, Route
from marft_agents.serving.loader import StepError
from marft_agents.serving.replica import Replica
from marft_agents.serving.threads import in_thread

_log = logging.getLogger(__name__)
_ROUNDS = 5


def _never(route: Route, error: StepError) -> bool:
    del route, error
    return False


class Keeper:
    """Looks after the replicas of one gateway.

    Args:
        lock: held by every change of what is loaded.
    """

    def __init__(self, aliases: Aliases, lock: asyncio.Lock) -> None:
        self._aliases = aliases
        self._lock = lock
        self._settling: dict[str, asyncio.Task[None]] = {}
        self.give_up: Callable[[Route, StepError], bool] = _never
        """Does without a version that cannot be loaded; False when it cannot."""

    async def settle(self, replica: Replica, also: Sequence[Route] = ()) -> None:
        """Load and probe every wanted version, and ``also`` some, then let it take traffic.

        Whoever comes while it is under way waits for the same end.

        Raises:
            MarftError: when it cannot; the replica is then down, with the reason.
        """
        await asyncio.shield(self.settle_later(replica, also))

    def settle_later(self, replica: Replica, also: Sequence[Route] = ()) -> asyncio.Task[None]:
        """Begin to ``settle``; from now on the replica takes no traffic."""
        task = self._settling.get(replica.name)
        if task is None:
            replica.become("restoring", "its adapters are being loaded and probed")
            task = asyncio.create_task(self._settle(replica, also))
            self._settling[replica.name] = task
            task.add_done_callback(lambda done: self._over(replica.name, done))
        return task

    def _over(self, name: str, task: asyncio.Task[None]) -> None:
        del self._settling[name]
        if not task.cancelled():
            task.exception()  # whoever waited may have left; the replica's state tells

    async def has_lost(self, replica: Replica, listed: set[tuple[str, int]]) -> bool:
        """Whether a wanted version is missing.

        A list may be older than the last swap, so one that lacks something is asked for again while
        no swap is under way.

        Raises:
            ServerError: when the engine cannot be asked.
        """
        if self._has_all(listed):
            return False
        async with self._lock:
            return not self._has_all(await in_thread(replica.loader.listed))

    async def sweep(self, replica: Replica, listed: set[tuple[str, int]]) -> None:
        """Unload what nobody keeps, unless a swap is under way, which may be loading it.

        Raises:
            ServerError: when the engine cannot be asked.
        """
        if not self._strangers(listed) or self._lock.locked():
            return
        async with self._lock:
            await self._unload_strangers(replica, await in_thread(replica.loader.listed))

    async def regain(self, replica: Replica) -> list[Route]:
        """Load current versions that were lost, where the disk has them again; which those are."""
        lost = [route for route in self._aliases.routes() if self._aliases.lost(route.agent)]
        found: list[Route] = []
        for route in [] if self._lock.locked() else lost:
            async with self._lock:
                with contextlib.suppress(MarftError):
                    await in_thread(replica.loader.bring_up, route.agent, route.version)
                    self._aliases.point(route)
                    found.append(route)
        return found

    # -- inside ----------------------------------------------------------------------------

    def _has_all(self, listed: set[tuple[str, int]]) -> bool:
        return all((route.agent, route.version) in listed for route in self._aliases.wanted())

    async def _settle(self, replica: Replica, also: Sequence[Route]) -> None:
        loader = replica.loader
        probed: set[Route] = set()
        try:
            if loader.baseline is None:
                await in_thread(loader.take_baseline)
            for _ in range(_ROUNDS):
                for route in [r for r in self._wanted(also) if r not in probed]:
                    replica.reason = f"{route.name} is being loaded and probed"
                    try:
                        await in_thread(loader.bring_up, route.agent, route.version)
                    except StepError as error:
                        if not (self._is_its_own(error) and self.give_up(route, error)):
                            raise
                        _log.error("%s is given up: %s", route.name, error)
                        also = [other for other in also if other != route]
                        continue
                    probed.add(route)
                async with self._lock:
                    listed = await in_thread(loader.listed)
                    missing = {r for r in self._wanted(also) if (r.agent, r.version) not in listed}
                    probed -= missing
                    if probed.issuperset(self._wanted(also)):
                        await self._unload_strangers(replica, listed)
                        replica.become("ready")
                        return
            raise ServerError("it does not keep what it loads, or versions change too fast for it")
        except MarftError as error:
            replica.become("down", str(error))
            raise
        except BaseException:
            replica.become("down", "its restoration was broken off")
            raise

    @staticmethod
    def _is_its_own(error: StepError) -> bool:
        """Whether the version is at fault, and not the engine."""
        return error.refused or error.step == "probe"

    def _wanted(self, also: Sequence[Route]) -> list[Route]:
        return [*dict.fromkeys([*self._aliases.wanted(), *also])]

    def _strangers(self, listed: set[tuple[str, int]]) -> list[Route]:
        kept = self._aliases.kept()
        routes = [Route(*named) for named in sorted(listed)]
        return [r for r in routes if r not in kept and not self._aliases.is_needed(r)]

    async def _unload_strangers(self, replica: Replica, listed: set[tuple[str, int]]) -> None:
        for route in self._strangers(listed):
            _log.info("%s still has %s, which nobody keeps", replica.name, route.name)
            with contextlib.suppress(MarftError):  # the next look tries again
                await in_thread(replica.loader.unload, route.agent, route.version)
