"""The ends of a process, and its copies: nothing queued is left behind where that can be helped.

Invariant: an interpreter that ends (``SystemExit`` included) and a worker of ``multiprocessing``
give their logs a few seconds, once and all together. A fork begins with fresh locks and empty
queues. ``os._exit`` and signals that kill give no chance: then what ``flush`` waited for is what is
safe.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import time
import weakref
from typing import Protocol

TIMEOUT_S = 5.0


class Leaver(Protocol):
    """Something that has to know of the end of a process and of its forks."""

    def at_exit(self, timeout: float) -> None: ...

    def after_fork(self) -> None: ...


_watched: weakref.WeakSet[Leaver] = weakref.WeakSet()
_workers: weakref.WeakSet[Leaver] = weakref.WeakSet()
_leaving = False


def watch(leaver: Leaver) -> None:
    """Tell ``leaver`` of exits and forks for as long as it lives."""
    _watched.add(leaver)


def now() -> bool:
    """Whether this interpreter has begun to end."""
    return _leaving


def flush_at_worker_exit(leaver: Leaver) -> None:
    """Workers of ``multiprocessing`` leave without ``atexit``; their own registry is run."""
    if multiprocessing.parent_process() is None or leaver in _workers:
        return
    from multiprocessing import util

    _workers.add(leaver)
    reference = weakref.ref(leaver)

    def flush() -> None:
        alive = reference()
        if alive is not None:
            alive.at_exit(TIMEOUT_S)

    util.Finalize(None, flush, exitpriority=10)


def _at_exit() -> None:
    global _leaving
    _leaving = True
    deadline = time.monotonic() + TIMEOUT_S
    for leaver in list(_watched):
        leaver.at_exit(max(0.0, deadline - time.monotonic()))


def _after_fork_in_child() -> None:
    _workers.clear()
    for leaver in list(_watched):
        leaver.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
