"""From the app's threads to the disk, without the app ever waiting for the disk.

Invariant: ``put`` takes a lock for an instant and returns, and never raises. One daemon thread
prepares (redacts, hashes, encodes) and writes in the order of ``put``: a little later, when the app
has sent a request and waits itself, and a few events in one go. For while this thread works the
app's cannot; so where the app goes on before all is written, this thread rests after every few
events. ``flush`` and ``close`` wait for no such moment. The queue is bounded in events and in
bytes; a full queue or a disk error loses the newest event, which is counted for its episode in
``EpisodeEnded.dropped_events`` and said once. Small events that change what an episode means (its
borders, rewards, edits) are kept, in bounds, when the disk refuses them, and written when it works
again. A forked child starts with an empty queue: what the parent had queued is the parent's to
write.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from math import inf
from typing import NamedTuple

from marft_agents.recording import leaving
from marft_agents.recording.outlet import BORDERS, RESERVE, Draft, EventLog, Outlet
from marft_agents.recording.redact import Redactor
from marft_agents.recording.safety import Safety
from marft_agents.recording.size import held_bytes
from marft_agents.schema import Event

CAPACITY = 10_000
CAPACITY_BYTES = 128 * 2**20
_RESERVE_BYTES = 16 * 2**20
_IDLE_S = 30.0
"""Seconds without an event after which the thread ends; the next event starts another."""
_LINGER_S = 0.2
"""Seconds that an event waits for others, while nobody asks for it to be written."""
_MOMENT_S = 0.1
"""Seconds more that it waits for a moment in which the app waits, too."""
_SENDING_S = 0.002
"""About how long the app is busy with a request that it sends."""
_ROUNDS = 4
"""How often to look for events that come without waking anybody, before sleeping."""
_WORK_S = 0.002
"""Seconds of preparing after which what is ready is written, and the app's thread may go on."""
_REST_S = 0.01
"""Seconds of rest between one go and the next while the app has something to do."""
_FEW = 4
"""Events in one go then, at least."""
_GOES = 25
"""In about so many goes all is written that waited when the first began."""
_TOGETHER_BYTES = 2**20
"""What is written in one go, roughly."""
_MOST_LINGERING = 1000
_MOST_LINGERING_BYTES = 16 * 2**20


class _Queued(NamedTuple):
    event: Event | Draft
    size: int
    border: bool


class Sink:
    """Bounded queue in front of an ``EventLog``.

    Args:
        prepare: makes of an event what may be written, on the log's thread; an event for which it
            gives ``None`` or raises is left out. By default ``Redactor()``.
        capacity: events that may wait.
        capacity_bytes: what they may hold together, roughly; a single larger event is taken when
            nothing else waits.
    """

    def __init__(
        self,
        log: EventLog,
        safety: Safety,
        *,
        prepare: Callable[[Event], Event | None] | None = None,
        capacity: int = CAPACITY,
        capacity_bytes: int = CAPACITY_BYTES,
    ) -> None:
        self._safety = safety
        self._outlet = Outlet(log, safety, prepare or Redactor(safety=safety))
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._most_lingering = min(_MOST_LINGERING, capacity // 4)
        self._most_lingering_bytes = min(_MOST_LINGERING_BYTES, capacity_bytes // 4)
        self._closed = self._given_up = self._threadless = False
        self.after_fork()
        leaving.watch(self)

    def after_fork(self) -> None:
        """Begin anew in a child: the parent's thread and whoever held the lock are not here."""
        self._changed = threading.Condition()
        self._outlet.after_fork()
        self._queue: deque[_Queued] = deque()
        self._held = self._held_borders = 0
        self._accepted = self._handled = 0
        self._wanted = 0
        """How many events somebody waits for."""
        self._batch = 0
        """Of the queue, how many events to write now."""
        self._asleep = False
        self._few = _FEW
        """How many of them in one go, where nothing is urgent."""
        self._ripe = False
        """Whether events are to be written as soon as the app has nothing to do."""
        self._app_waits_from = inf
        """When the app is through with sending its newest request, by ``time.monotonic``, where no
        answer came since: from then on it waits for its model, as far as is known here."""
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> int:
        """Events that wait to be written."""
        return self._accepted - self._handled + self._outlet.kept

    @property
    def lost(self) -> int:
        """Events that never reached the log, since the start."""
        return self._outlet.lost

    # -- the app's side -----------------------------------------------------------------------

    def put(self, event: Event | Draft) -> None:
        """Queue ``event``; borders of episodes, rewards and edits have a reserve of their own."""
        if isinstance(event, Event):
            queued = _Queued(event, held_bytes(event), isinstance(event, BORDERS))
        else:
            queued = _Queued(event, event.size, False)
        with self._changed:
            why = self._refusal(queued)
            if why is None:
                self._queue.append(queued)
                self._held += queued.size
                self._held_borders += queued.size if queued.border else 0
                self._accepted += 1
                if self._thread is None:
                    self._start()
                if self._asleep or self._is_urgent():
                    self._changed.notify_all()
        if why is not None:
            self._outlet.lose(event)
            self._safety.warn_once(
                "queue", f"marft-agents drops events: the recorder {why}; the app goes on"
            )
        elif leaving.now():
            self.at_exit(leaving.TIMEOUT_S)  # the log's thread may not live to see another event
        elif self._threadless:
            self._safety.warn_once(
                "threadless",
                "marft-agents cannot start a thread for its log; events wait in memory until"
                " flush, close or the end of the process, the app goes on",
            )

    def app_waits(self) -> None:
        """A request goes out: until its answer comes, the app mostly has nothing to do."""
        self._app_waits_from = time.monotonic() + _SENDING_S
        if self._ripe:
            with self._changed:
                self._ripe = False
                self._changed.notify_all()

    def app_goes_on(self) -> None:
        """An answer is here, and the app has something to do."""
        self._app_waits_from = inf

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything queued so far is written or counted lost; False on timeout."""
        with self._changed:
            target = self._accepted
            if self._thread is threading.current_thread():
                return self._handled >= target
            threaded = self._handled >= target or self._start()
            self._wanted = max(self._wanted, target)
            self._changed.notify_all()
            if threaded:
                return self._changed.wait_for(lambda: self._handled >= target, timeout)
        while self._handled < target and self._next(wait=False):
            """No thread can be started any more: written here."""
        return self._handled >= target

    def close(self, timeout: float = leaving.TIMEOUT_S) -> bool:
        """Flush, stop the thread and close the log; later events are dropped.

        Returns within ``timeout`` seconds; False when events are left unwritten, which is said.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            self._closed = True
            if self._accepted and not self._outlet.closed:
                self._start()  # closing may hang as writing may: not on the app's thread
        done = self.flush(timeout)
        with self._changed:
            self._changed.notify_all()
            thread = self._thread
        if done and thread is not None and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
        if done and (thread is None or not thread.is_alive()):
            self._outlet.close()
        self._say_what_is_missing(done)
        return done

    def at_exit(self, timeout: float) -> None:
        """The process ends: write what can be written within ``timeout`` seconds."""
        if not self._given_up:
            self._say_what_is_missing(self.flush(timeout))

    def _refusal(self, new: _Queued) -> str | None:
        """Why an event cannot be queued."""
        limit = self._capacity + (RESERVE if new.border else 0)
        if self._closed:
            return "is closed (close it after the last episode; a new MarftRecorder goes on)"
        if len(self._queue) >= limit:
            return f"holds {limit} unwritten events"
        reserved = new.border and self._held_borders + new.size <= _RESERVE_BYTES
        if self._held and self._held + new.size > self._capacity_bytes and not reserved:
            return f"holds {self._held // 2**20} MiB of unwritten events"
        return None

    def _say_what_is_missing(self, done: bool) -> None:
        missing = self._accepted - self._handled
        if done or not missing:
            return
        self._given_up = True
        self._safety.warn_once(
            "given up",
            f"marft-agents leaves {missing} events unwritten: its log does not take them;"
            " the app goes on",
        )

    def _start(self) -> bool:
        """Whether a thread takes care of the queue; the caller holds the lock."""
        if self._thread is not None and self._thread.is_alive():
            return True
        thread = threading.Thread(target=self._run, name="marft-log", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads, or none while the interpreter ends
            self._threadless = True
            return False
        leaving.flush_at_worker_exit(self)
        self._thread, self._threadless = thread, False
        return True

    # -- the log's side -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._write_all()
        finally:
            with self._changed:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _write_all(self) -> None:
        going = True
        while going:
            try:
                going = self._next(wait=True)
            except BaseException as error:  # SystemExit, too, would end nothing but the log
                self._safety.warn_once(
                    "broken log",
                    f"marft-agents lost an event: its log raised {type(error).__name__}: {error}",
                )
        if self._closed:
            self._outlet.close()

    def _next(self, *, wait: bool) -> bool:
        """Write the oldest events; False when there are none (and none will come)."""
        with self._changed:
            if wait and self._batch <= 0:
                self._await_events()
            elif wait:
                self._rest()
            few = self._few if wait and not self._is_urgent() else len(self._queue)
            if not self._queue:
                if wait and not self._closed:  # nobody may be left to close this recorder
                    self._thread = None
                return False
        taken: list[_Queued] = []
        try:
            self._outlet.write(self._prepared(taken, few))
        finally:
            with self._changed:
                self._handled += len(taken)
                self._held -= sum(queued.size for queued in taken)
                self._held_borders -= sum(queued.size for queued in taken if queued.border)
                self._changed.notify_all()
        return True

    def _prepared(self, taken: list[_Queued], few: int) -> Iterator[Event]:
        """The oldest events, ready to be written, as many as belong together; at most ``few``.

        ``taken``: told of each that left the queue.
        """
        until, size = time.monotonic() + _WORK_S, 0
        while len(taken) < few and size < _TOGETHER_BYTES and time.monotonic() < until:
            with self._changed:
                if not self._queue or (taken and self._batch <= 0):
                    return
                queued = self._queue.popleft()
                self._batch -= 1
            taken.append(queued)
            size += queued.size
            ready = self._outlet.prepared(queued.event)
            if ready is not None:
                yield ready

    def _await_events(self) -> None:
        """Wait for events, and then for more of them; the caller holds the lock.

        For a while this looks by itself: waking a thread would cost the app more than ``put``.
        """
        for _ in range(_ROUNDS):
            self._changed.wait_for(self._is_urgent, _LINGER_S)
            if self._queue or self._closed:
                break
        else:
            self._asleep = True
            self._changed.wait_for(lambda: self._queue or self._closed, _IDLE_S)
            self._asleep = False
            if self._queue:
                self._changed.wait_for(self._is_urgent, _LINGER_S)
        if self._queue and not self._is_urgent():
            self._await_a_moment()
        self._batch = len(self._queue)
        self._few = max(_FEW, self._batch // _GOES)

    def _rest(self) -> None:
        """Let an app that has something to do go on; the caller holds the lock."""
        if time.monotonic() < self._app_waits_from and not self._is_urgent():
            self._changed.wait_for(self._is_urgent, _REST_S)

    def _await_a_moment(self) -> None:
        """Wait, not for long, until the app waits for a model; the caller holds the lock."""
        self._ripe = True
        self._changed.wait_for(lambda: not self._ripe or self._is_urgent(), _MOMENT_S)
        came, self._ripe = not self._ripe, False
        if came:
            self._changed.wait_for(self._is_urgent, _SENDING_S)

    def _is_urgent(self) -> bool:
        """Whether somebody waits, or much does; the caller holds the lock."""
        return (
            self._closed
            or self._handled < self._wanted
            or len(self._queue) >= self._most_lingering
            or self._held >= self._most_lingering_bytes
        )
