"""Instance attributes replaced for recording, and put back.

Invariant: only instances are patched, never classes, and ``undo`` restores only what still is ours.
"""

from __future__ import annotations

import weakref
from typing import Any

_MISSING = object()


class Patches:
    """Replaced attributes; holds the patched objects weakly, so recording keeps nothing alive."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []

    def set(self, target: Any, name: str, value: Any) -> None:
        """Set ``target.name`` and remember what the instance had there."""
        before = vars(target).get(name, _MISSING)
        setattr(target, name, value)
        self._done.append((weakref.ref(target), name, before, weakref.ref(value)))

    def undo(self) -> None:
        """Put everything back, newest first."""
        while self._done:
            reference, name, before, ours = self._done.pop()
            target = reference()
            if target is None or vars(target).get(name, _MISSING) is not ours():
                continue
            if before is _MISSING:
                delattr(target, name)
            else:
                setattr(target, name, before)
