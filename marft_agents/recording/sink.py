"""From the app's threads to the disk, without the app ever waiting for the disk.

Invariant: ``put`` takes a lock for an instant and returns. One daemon thread writes in the order of
``put``. A full queue or a disk error loses the newest event, is counted for its episode in
``EpisodeEnded.dropped_events``, and is said once. A forked child starts with an empty queue: what
the parent had queued is the parent's to write.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import threading
import time
import weakref
from collections import Counter, deque
from typing import Protocol

from marft_agents.recording.safety import Safety
from marft_agents.schema import EpisodeEnded, EpisodeStarted, Event, RewardEvent

_RESERVE = 1024
_EXIT_TIMEOUT_S = 5.0


class EventLog(Protocol):
    """Anything that keeps events; ``marft_agents.log.LogWriter`` is one."""

    def write(self, event: Event) -> None: ...

    def close(self) -> None: ...


class Sink:
    """Bounded queue in front of an ``EventLog``."""

    def __init__(self, log: EventLog, safety: Safety, *, capacity: int = 10_000) -> None:
        self._log = log
        self._safety = safety
        self._capacity = capacity
        self._closed = False
        self._reset()
        _alive.add(self)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[Event] = deque()
        self._dropped: Counter[str] = Counter()
        self._accepted = 0
        self._handled = 0
        self._thread: threading.Thread | None = None

    def put(self, event: Event) -> None:
        """Queue ``event``; the borders of episodes and rewards have a reserve of their own."""
        border = isinstance(event, EpisodeStarted | EpisodeEnded | RewardEvent)
        with self._changed:
            limit = self._capacity + (_RESERVE if border else 0)
            if self._closed or len(self._queue) >= limit:
                self._dropped[event.episode_id] += 1
                lost = True
            else:
                self._queue.append(event)
                self._accepted += 1
                lost = False
                self._start()
                self._changed.notify_all()
        if lost:
            why = "is closed" if self._closed else f"holds {limit} unwritten events"
            self._safety.warn_once(
                "queue", f"marft-agents drops events: the recorder {why}; the app goes on"
            )

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything queued so far is written or counted lost; False on timeout."""
        with self._changed:
            target = self._accepted
            return self._changed.wait_for(lambda: self._handled >= target, timeout)

    def close(self, timeout: float | None = _EXIT_TIMEOUT_S) -> bool:
        """Flush, stop the thread and close the log; later events are dropped."""
        done = self.flush(timeout)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if done:
            if thread is not None and thread is not threading.current_thread():
                thread.join(timeout)
            with self._safety.guard("close the log"):
                self._log.close()
        return done

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            if multiprocessing.parent_process() is not None:
                _flush_at_worker_exit(self)
            self._thread = threading.Thread(target=self._run, name="marft-log", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                event = self._queue.popleft()
            try:
                self._write(event)
            finally:
                with self._changed:
                    self._handled += 1
                    self._changed.notify_all()

    def _write(self, event: Event) -> None:
        if isinstance(event, EpisodeEnded):
            with self._changed:
                lost = self._dropped.pop(event.episode_id, 0)
            if lost:
                event = event.model_copy(update={"dropped_events": event.dropped_events + lost})
        try:
            self._log.write(event)
        except Exception as error:
            with self._changed:
                self._dropped[event.episode_id] += 1
            self._safety.warn_once(
                "disk",
                f"marft-agents cannot write its log ({type(error).__name__}: {error});"
                " events are lost until it can, the app goes on",
            )


_alive: weakref.WeakSet[Sink] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for sink in list(_alive):
        sink._reset()  # pyright: ignore[reportPrivateUsage] same module


def _at_exit() -> None:
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    for sink in list(_alive):
        sink.flush(max(0.0, deadline - time.monotonic()))


def _flush_at_worker_exit(sink: Sink) -> None:
    """Workers of ``multiprocessing`` leave without ``atexit``; their own registry is run."""
    from multiprocessing import util

    reference = weakref.ref(sink)

    def flush() -> None:
        alive = reference()
        if alive is not None:
            alive.flush(_EXIT_TIMEOUT_S)

    util.Finalize(None, flush, exitpriority=10)


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
