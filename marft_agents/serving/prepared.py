"""Versions that are loaded and probed ahead of their swap, beside the one in use.

Invariant: a prepared version gets no request. It is given up for whatever serves and needs its slot
of the engine, and by itself after ``KEEP_S``; an agent has one at most. What is known of it is in
the engines' ``Proofs`` alone, so a swap of it rests on nothing that an engine may have lost.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from marft_agents.errors import RegistryError
from marft_agents.schema import adapter_slug
from marft_agents.serving.aliases import Route
from marft_agents.serving.loader import StepError, step
from marft_agents.serving.log_lines import say
from marft_agents.serving.proofs import Brought
from marft_agents.serving.swap_events import observed, spent

if TYPE_CHECKING:
    from marft_agents.serving.swap import Swapper

KEEP_S = 600.0
"""How long a prepared version waits for its swap."""


@dataclass
class _Kept:
    """``until`` is on the clock of the wall."""

    route: Route
    until: datetime
    timer: asyncio.TimerHandle


class Preparations:
    """Prepares versions for the swaps of one gateway."""

    def __init__(self, swapper: Swapper, *, keep_s: float = KEEP_S) -> None:
        self.keep_s = keep_s
        self._swapper = swapper
        self._aliases = swapper.aliases
        self._kept: dict[str, _Kept] = {}
        self._tasks: set[asyncio.Task[dict[str, Any]]] = set()

    async def prepare(self, agent: str, version: int) -> dict[str, Any]:
        """Load and probe ``version`` on every replica beside the one in use, and keep it.

        Saying it again keeps it anew. It goes on to its end when whoever asked has left.

        Returns:
            agent, version, probe, the ``seconds`` of each step, ``until`` when and for how many
            seconds (``keep_s``) it is kept (``None`` for a canary, which is kept while it is one),
            and ``already``: whether it was up.

        Raises:
            StepError: naming the step that failed; nothing of what serves has changed.
            NoRoomError: when the engine has no slot for it.
            Refusal: while the server is being stopped.
        """
        self._swapper.fleet.require_taking()
        route = Route(adapter_slug(agent), version)
        in_use, observers = self._aliases.current(route.agent), self._swapper.observers
        work = observed(
            self._prepare(route), route.agent, version, observers, in_use, what="prepare"
        )
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return await asyncio.shield(task)

    def told(self, agent: str) -> dict[str, Any]:
        """The agent's prepared version, and until when it is kept."""
        kept = self._kept.get(agent)
        if kept is None or kept.route not in self._aliases.prepared(agent):
            return {"prepared": None}
        version, until = kept.route.version, _said(kept.until)
        return {"prepared": {"version": version, "until": until}}

    # -- inside ----------------------------------------------------------------------------

    def _over(self, task: asyncio.Task[dict[str, Any]]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked may have left

    async def _prepare(self, route: Route) -> dict[str, Any]:
        try:
            with step(route.name, "check"):
                self._require_sense(route)
            async with self._swapper.beside(route, prepares=True) as brought:
                former = [r for r in self._aliases.prepared(route.agent) if r != route]
                self._aliases.prepare(route)
                for other in former:
                    self._swapper.start_retiring(other)
        except StepError as error:
            message = f"preparing stopped at {error}; what serves is as before"
            raise type(error)(message, step=error.step, refused=error.refused) from error
        until = self._keep(route)
        kept = {"until": until and _said(until), "keep_s": until and self.keep_s}
        return _answer(route, brought) | kept | {"seconds": spent()}

    def _require_sense(self, route: Route) -> None:
        if self._aliases.current(route.agent) == route.version:
            raise RegistryError(f"{route.name} is in use already; there is nothing to prepare")

    def _keep(self, route: Route) -> datetime | None:
        if route not in self._aliases.prepared(route.agent):
            return None
        if (before := self._kept.pop(route.agent, None)) is not None:
            before.timer.cancel()
        until = datetime.now(UTC) + timedelta(seconds=self.keep_s)
        timer = asyncio.get_running_loop().call_later(self.keep_s, self._expire, route)
        self._kept[route.agent] = _Kept(route, until, timer)
        return until

    def _expire(self, route: Route) -> None:
        self._kept.pop(route.agent, None)
        if route in self._aliases.prepared(route.agent):
            say("expired", agent=route.agent, version=route.version)
            self._swapper.start_retiring(route)


def _said(when: datetime) -> str:
    return when.isoformat(timespec="seconds")


def _answer(route: Route, brought: Brought) -> dict[str, Any]:
    return {
        "agent": route.agent,
        "version": route.version,
        "probe": brought.report.as_json(),
        "already": brought.since is not None,
    }
