"""Where the SDK is opened: its default runner, models, providers and guardrails, as instances.

Invariant: what is put on an object does nothing outside a recorded run; it is put on once, whoever
needs it, and is taken off with the last recorder.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from marft_agents.recording import MarftRecorder, Patches


class User:
    """A recorder that needs the doors; knows the names of its agents."""

    def __init__(self, recorder: MarftRecorder) -> None:
        self.recorder = weakref.ref(recorder)
        self.names: set[str] = set()

    @property
    def open(self) -> bool:
        recorder = self.recorder()
        return recorder is not None and not recorder.core.closed

    def release(self) -> None:
        DOORS.leave()


class Doors:
    """Replaced methods of long-lived objects; ``replace`` is safe to repeat."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._patches = Patches()
        self._users: weakref.WeakKeyDictionary[MarftRecorder, User] = weakref.WeakKeyDictionary()

    def enter(self, recorder: MarftRecorder) -> User:
        """Let ``recorder`` use the doors until it is closed."""
        with self._lock:
            user = self._users.get(recorder)
            if user is None:
                user = self._users[recorder] = User(recorder)
                recorder.keep(user)
            return user

    def leave(self) -> None:
        """A recorder was closed: put everything back if it was the last one."""
        with self._lock:
            if not self.users():
                self._patches.undo()

    def users(self) -> list[User]:
        """The recorders that are open."""
        with self._lock:
            return [user for user in list(self._users.values()) if user.open]

    def replace(self, target: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put ``make(original)`` in place of a method, unless that was done before."""
        with self._lock:
            if not self.users() or getattr(vars(target).get(name), "marft_door", False):
                return
            made = make(getattr(target, name))
            made.marft_door = True
            self._patches.set(target, name, made)


DOORS = Doors()
