"""What the log's thread does with events: prepares them, writes them, bears with the disk.

Invariant: events are written in their order, and each ends in exactly one way: it is in the log, it
is kept (in bounds, and only those that change what an episode means) until the disk works again, or
it is counted as lost for its episode, whose end says how many were.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

from marft_agents.recording.safety import Safety
from marft_agents.schema import EditEvent, EpisodeEnded, EpisodeStarted, Event, RewardEvent

RESERVE = 1024
BORDERS = (EpisodeStarted, EpisodeEnded, RewardEvent, EditEvent)
_COUNTED_EPISODES = 100_000


class EventLog(Protocol):
    """Anything that keeps events; ``marft_agents.log.LogWriter`` is one."""

    def write(self, event: Event) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class WritesMany(Protocol):
    """A log that takes several events in one go."""

    def write_many(self, events: Sequence[Event]) -> int:
        """How many of them, from the first on, are in the log: fewer where the disk refused.

        Where it raises, none of them is.
        """
        ...


class Draft(Protocol):
    """An event that is put together on the log's thread, once, by ``event``."""

    @property
    def episode_id(self) -> str: ...

    @property
    def size(self) -> int: ...

    def event(self) -> Event: ...


class Outlet:
    """The way into ``log``. ``prepare`` makes of an event what may be written, or ``None``.

    ``lose`` may be called from any thread; the rest is for one at a time.
    """

    def __init__(
        self, log: EventLog, safety: Safety, prepare: Callable[[Event], Event | None]
    ) -> None:
        self._log = log
        self._many = log if isinstance(log, WritesMany) else None
        self._safety = safety
        self._prepare = prepare
        self.closed = False
        self.lost = 0
        self.after_fork()

    def after_fork(self) -> None:
        """Begin anew in a child: what waits is the parent's."""
        self._lock = threading.Lock()
        self._kept: deque[Event] = deque()
        self._dropped: Counter[str] = Counter()

    @property
    def kept(self) -> int:
        """Events that the disk has refused and that are not given up."""
        return len(self._kept)

    def lose(self, event: Event | Draft) -> None:
        """Count an event that is not written."""
        with self._lock:
            self.lost += 1
            if isinstance(event, EpisodeEnded):
                self._dropped.pop(event.episode_id, None)  # nothing is left to tell it in
                return
            self._dropped[event.episode_id] += 1
            if len(self._dropped) > _COUNTED_EPISODES:
                del self._dropped[next(iter(self._dropped))]

    def prepared(self, event: Event | Draft) -> Event | None:
        """What is to be written of an event; ``None`` where it is lost, which is counted.

        Raises:
            BaseException: what is no ``Exception``, of the app's redaction; that event is lost.
        """
        try:
            ready = self._ready(event)
        except BaseException:
            self.lose(event)
            raise
        if ready is None:
            self.lose(event)
        return ready

    def write(self, events: Iterable[Event]) -> None:
        """Write events; when this returns or raises, none of those taken is left.

        Raises:
            BaseException: the last that ``events`` or the log raised and that is no ``Exception``.
        """
        ready: list[Event] = []
        problem: BaseException | None = None
        try:
            for event in events:
                ready.append(event)
        except BaseException as error:  # SystemExit, too, is nothing to those before it
            problem = error
        for event in ready[self._written_together(ready) :]:
            try:
                works = self._write(event)
            except BaseException as error:
                self.lose(event)
                problem = error
                continue
            if works:
                problem = self._rewrite() or problem
        if problem is not None:
            raise problem

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._rewrite()
            with self._safety.guard("close the log"):
                self._log.close()

    # -- inside ------------------------------------------------------------------------------

    def _ready(self, event: Event | Draft) -> Event | None:
        if not isinstance(event, Event):
            with self._safety.guard("put a turn together"):
                return self._ready(event.event())
            return None
        try:
            ready = self._prepare(event)
        except Exception as error:
            self._safety.warn_once(
                "redact",
                "marft-agents could not redact an event and so did not write it"
                f" ({type(error).__name__}: {error}); it is counted as lost, the app goes on",
            )
            return None
        if ready is None:
            self._safety.warn_once(
                "dropped",
                f"marft-agents left out an event ({type(event).__name__}) because the redact"
                " function returned None for it; it is counted as lost, and so are others like it",
            )
        return ready

    def _written_together(self, events: Sequence[Event]) -> int:
        """How many events, from the first on, the log took in one go."""
        if self._many is None or len(events) < 2 or self._kept:
            return 0
        try:
            done = self._many.write_many([self._final(event) for event in events])
        except BaseException:
            return 0  # one by one, it shows for which
        for event in events[:done]:
            self._forget(event)
        return done

    def _write(self, event: Event) -> bool:
        """Whether the log takes events; one that it does not take is kept or lost."""
        if self._written(event):
            return True
        if isinstance(event, BORDERS) and len(self._kept) < RESERVE:
            self._kept.append(event)
        else:
            self.lose(event)
        return False

    def _rewrite(self) -> BaseException | None:
        """The disk works (again): write what was kept from its errors.

        Returns the last that the log raised and that is no ``Exception``.
        """
        kept, self._kept = self._kept, deque[Event]()
        problem: BaseException | None = None
        for event in kept:
            try:
                written = self._written(event)
            except BaseException as error:
                written, problem = False, error
            if not written:
                self.lose(event)
        return problem

    def _written(self, event: Event) -> bool:
        """Whether the log took ``event``, which is True also for one that it never will."""
        try:
            self._log.write(self._final(event))
        except Exception as error:
            self._safety.warn_once(
                "disk",
                f"marft-agents cannot write its log ({type(error).__name__}: {error});"
                " events are lost until it can, the app goes on",
            )
            if isinstance(error, OSError):
                return False
            self.lose(event)
            return True
        self._forget(event)
        return True

    def _final(self, event: Event) -> Event:
        """An end that says how many events of its episode were lost."""
        if not isinstance(event, EpisodeEnded):
            return event
        with self._lock:
            lost = self._dropped.get(event.episode_id, 0)
        if not lost:
            return event
        return event.model_copy(update={"dropped_events": event.dropped_events + lost})

    def _forget(self, event: Event) -> None:
        """What was lost of an episode is told."""
        if isinstance(event, EpisodeEnded):
            with self._lock:
                self._dropped.pop(event.episode_id, None)
