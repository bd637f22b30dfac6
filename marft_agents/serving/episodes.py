"""The episodes that the gateway records: who is in which, when they begin and end.

Invariant: an episode begins once, with ``POST /episodes`` or its first call, and ends when the app
says so. One that nobody uses ends in the log only (``failed``, "idle"): its next call goes on where
it was, and the app's own end is the later one, which counts. Used from one event loop only.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Hashable, Mapping
from contextlib import contextmanager
from typing import Any

from marft_agents.recording.call import Call
from marft_agents.recording.core import Core
from marft_agents.recording.drafts import TurnDraft
from marft_agents.recording.episode import LiveEpisode
from marft_agents.recording.newest import MOST_NAMES, MOST_TURNS, Newest
from marft_agents.schema import EndReason, Episode, JsonDict, Turn
from marft_agents.serving.refusals import Refusal

RUNTIME = "gateway"
_IDLE = "idle: "
MAX_EPISODES = 10_000
RETRY_WINDOW_S = 120.0
"""Longer than SDKs wait between two attempts."""


class GatewayEpisode(LiveEpisode):
    """A live episode whose calls come over HTTP, and may come after a restart."""

    def __init__(self, core: Core, episode_id: str, now: Callable[[], float]) -> None:
        super().__init__(core, episode_id)
        self._now = now
        self.given: tuple[Any, Any] | None = None
        """Task and metadata of the request that began it; ``None``: its first call did."""
        self.ended: tuple[EndReason, str | None] | None = None
        """The app's own word."""
        self.borders_elsewhere = False
        """Whether the app logs its begin and end itself."""
        self.in_flight = 0
        self.last_used = now()
        self.turns: deque[JsonDict] = deque(maxlen=MOST_TURNS)
        self._held: dict[Hashable, tuple[Call, float]] = {}
        self._answers: Newest[tuple[str, int], None] = Newest(MOST_NAMES)

    def add_turn(self, turn: Turn) -> None:
        """Log a finished turn.

        Engines take a client's ``X-Request-Id`` into the reply's id, so a client that sends the
        same one twice gets the same id twice; a log reader would take the second for a copy. Once
        ids are let go, every one could be such a second.
        """
        if turn.response_id is not None:
            answer = turn.response_id, turn.choice_index
            if answer in self._answers or self._answers.let_go:
                own = f"{turn.response_id}#{turn.turn_id}"
                turn = turn.model_copy(update={"response_id": own})
            self._answers[answer] = None
        super().add_turn(turn)
        self._tell(turn)

    def add_draft(self, draft: TurnDraft) -> None:
        """The turn is put together at once: it is told of before its client can act on it."""
        self.add_turn(draft.turn())

    def _tell(self, turn: Turn) -> None:
        told = {"turn_id": turn.turn_id, "agent": turn.agent, "response_id": turn.response_id}
        self.turns.append(told)

    def newest(self) -> JsonDict:
        """The newest turns, and how many there were before them."""
        return {"turns": list(self.turns), "earlier_turns": self._count - len(self.turns)}

    def speaker(self, turn_id: str | None) -> str | None:
        """Who spoke a turn of this episode; ``None`` also for one that is let go."""
        return None if turn_id is None else self._turns.get(turn_id)

    def forgot_earlier(self) -> None:
        """There were turns before those that it will be told of."""
        self.ledger.let_go = self._turns.let_go = self._answers.let_go = True

    def reopen(self) -> None:
        """Go on after an end that only the clock decided."""
        self.closed, self._decided = False, None

    @contextmanager
    def busy(self) -> Generator[None]:
        """While a call is under way, the episode is not idle."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            self.last_used = self._now()

    def hold(self, key: Hashable, call: Call) -> None:
        """Keep a failed call whose client may try again."""
        other = self.held(key)  # of a client that makes the same call twice at once
        if other is not None and other is not call:
            other.finish()
        self._held[key] = call, self._now()

    def held(self, key: Hashable) -> Call | None:
        """The call of an earlier attempt, no longer held."""
        return self._held.pop(key, (None, 0.0))[0] if self._held else None

    def release(self, before: float = math.inf) -> None:
        """Log failed calls that nobody has tried again since ``before``."""
        for key, (call, since) in list(self._held.items()):
            if since < before:
                del self._held[key]
                call.finish()

    @classmethod
    def resumed(cls, core: Core, episode: Episode, now: Callable[[], float]) -> GatewayEpisode:
        """As it was when the log ended, by its newest turns at least."""
        live = cls(core, episode.episode_id, now)
        if episode.turns and episode.turns[0].index > 0:
            live.forgot_earlier()
        for turn in episode.turns:
            live._count = max(live._count, turn.index)
            live._place(turn.turn_id, turn.agent)
            live._tell(turn)
            if turn.response_id is not None:
                live._answers[turn.response_id, turn.choice_index] = None
            ids = [c["id"] for c in turn.tool_calls or () if isinstance(c.get("id"), str)]
            live.ledger.add(
                turn.turn_id,
                turn.agent,
                turn.text,
                call_ids=[i for i in ids if i],
                quotable=turn.kind != "select",
            )
            live._step = max(live._step, turn.step)
        for tool in episode.tools:
            live.first_time(f"tool {tool.call_id}")
            live._answered = live._answered or tool.index >= live._count
        end = episode.ended
        if end is not None:
            live.closed = True
            by_clock = end.reason == "failed" and (end.detail or "").startswith(_IDLE)
            live.ended = None if by_clock else (end.reason, end.detail)
        return live


class Episodes:
    """Every episode that this gateway knows, most recently used last.

    Args:
        idle_s: after so long without a call, an episode ends in the log.
        resumable: what an earlier gateway recorded lately, by id.
    """

    def __init__(
        self,
        core: Core,
        *,
        idle_s: float = 3600.0,
        resumable: Mapping[str, Episode] | None = None,
        limit: int = MAX_EPISODES,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._idle_s = idle_s
        self._resumable = dict(resumable or {})
        self._limit = limit
        self._now = now
        self._known: OrderedDict[str, GatewayEpisode] = OrderedDict()
        self.on_end: Callable[[str], object] = lambda _: None
        """Told of every episode that ends, by the app's word or because nobody uses it."""

    def get(self, episode_id: str) -> GatewayEpisode | None:
        """The episode, if it was used here lately, or at an earlier gateway with this log."""
        if episode_id not in self._known and episode_id in self._resumable:
            live = GatewayEpisode.resumed(self._core, self._resumable.pop(episode_id), self._now)
            self._add(live)
        return self._known.get(episode_id)

    def begin(self, episode_id: str | None, task: Any, metadata: JsonDict) -> GatewayEpisode:
        """Start an episode; saying the same again (a retry) gives the same one.

        Raises:
            Refusal: when its first call has begun it already, or another task did.
        """
        known = self.get(episode_id) if episode_id is not None else None
        if known is not None:
            if known.given == (task, metadata) and known.ended is None:
                return known
            raise Refusal(
                409,
                f"the episode {known.id!r} exists already; begin an episode before its first call,"
                " and each with an id of its own (or leave the id out)",
            )
        live = GatewayEpisode(self._core, episode_id or self._core.new_id(), self._now)
        live.given = task, metadata
        live.start(task, metadata, RUNTIME)
        self._add(live)
        return live

    def use(self, episode_id: str, *, by_app: bool = False) -> GatewayEpisode | None:
        """The episode of a call, begun now if need be; ``None`` when the app has ended it.

        ``by_app``: the app records the episode, too; its begin and end are the app's to log.
        """
        live = self.get(episode_id)
        if live is None:
            live = GatewayEpisode(self._core, episode_id, self._now)
            live.borders_elsewhere = by_app
            if not by_app:
                live.start(None, None, RUNTIME)
            self._add(live)
        if live.ended is not None:
            return None
        if live.closed:
            live.reopen()
        self._touch(live)
        return live

    def end(self, episode_id: str, reason: EndReason, detail: str | None) -> GatewayEpisode:
        """The app's word on how the episode ended; saying it again changes nothing.

        Raises:
            Refusal: for an episode that is not known, or was ended otherwise.
        """
        live = self.get(episode_id)
        if live is None:
            raise Refusal(404, f"no episode {episode_id!r} has begun at this server")
        if live.ended is not None:
            if live.ended[0] != reason:
                raise Refusal(409, f"the episode {live.id!r} has ended already, {live.ended[0]}")
            return live
        live.release()
        live.reopen()
        live.decide(reason, detail)
        live.end()
        live.ended = reason, detail
        self._touch(live)
        self.on_end(live.id)
        return live

    def sweep(self) -> None:
        """End idle episodes in the log, and forget those that ended long ago."""
        now = self._now()
        for live in list(self._known.values()):
            live.release(now - RETRY_WINDOW_S)
            if live.in_flight or now - live.last_used <= self._idle_s:
                continue
            if live.closed or live.borders_elsewhere:
                live.release()
                del self._known[live.id]
            else:
                self._idle(live, f"{_IDLE}no call for {self._idle_s:g} s")
                live.last_used = now

    def close(self) -> None:
        """Log what is held back; open episodes stay open, for the next gateway to go on with."""
        for live in self._known.values():
            live.release()

    def _idle(self, live: GatewayEpisode, detail: str) -> None:
        live.release()
        live.decide("failed", detail)
        live.end()
        self.on_end(live.id)

    def _touch(self, live: GatewayEpisode) -> None:
        live.last_used = self._now()
        self._known.move_to_end(live.id)

    def _add(self, live: GatewayEpisode) -> None:
        self._known[live.id] = live
        self._touch(live)
        surplus = len(self._known) - self._limit
        for oldest in list(self._known.values())[:surplus] if surplus > 0 else ():
            if not oldest.in_flight:
                oldest.release()
                if not (oldest.closed or oldest.borders_elsewhere):
                    self._idle(oldest, f"{_IDLE}{self._limit} other episodes were used since")
                del self._known[oldest.id]
