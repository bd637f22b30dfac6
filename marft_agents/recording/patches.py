"""Instance attributes replaced for recording, and put back.

Invariant: only instances are patched, never classes, and ``undo`` restores only what still is ours.
Copies and pickles of a patched object are of the object as it was: unrecorded, and with methods of
its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

from marft_agents.recording.safety import logger

_MISSING = object()
_REDUCE = "__reduce_ex__"


class Patches:
    """Replaced attributes; holds the patched objects weakly, so recording keeps nothing alive."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []
        self._sweep_at = 256
        self._said: list[str] = []

    def set(self, target: Any, name: str, value: Any) -> None:
        """Set ``target.name`` and remember what the instance had there."""
        reduce: Any = vars(target).get(_REDUCE)
        originals = getattr(reduce, "marft_originals", None)
        if originals is None:
            originals = dict[str, Any]()
            self._put(target, _REDUCE, _unpatched(weakref.ref(target), originals, self._said))
            originals[_REDUCE] = _MISSING if reduce is None else reduce
        originals.setdefault(name, self._put(target, name, value))

    def _put(self, target: Any, name: str, value: Any) -> Any:
        """Returns what was there before."""
        before = vars(target).get(name, _MISSING)
        setattr(target, name, value)
        self._done.append((weakref.ref(target), name, before, weakref.ref(value)))
        if len(self._done) >= self._sweep_at:  # a runtime may make an object for each call
            self._done = [done for done in self._done if done[0]() is not None]
            self._sweep_at = 2 * len(self._done) + 256
        return before

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


def _unpatched(
    reference: weakref.ref[Any], originals: dict[str, Any], said: list[str]
) -> Callable[[Any], Any]:
    """How ``copy.deepcopy`` and ``pickle`` see a patched object; one warning in ``said``."""

    def reduce(protocol: Any) -> Any:
        target = reference()
        own, kind = originals[_REDUCE], cast("Any", type(target))
        made: Any = kind.__reduce_ex__(target, protocol) if own is _MISSING else own(protocol)
        if not said:
            said.append(kind.__name__)
            logger.warning("marft-agents: a copy of a recorded %s is not recorded; wrap it", *said)
        if not isinstance(made, tuple) or not any(isinstance(part, dict) for part in made[2:3]):
            return cast("Any", made)
        parts = cast("tuple[Any, ...]", made)
        state = {k: originals.get(k, v) for k, v in parts[2].items()}
        state = {k: v for k, v in state.items() if v is not _MISSING}
        return (*parts[:2], state, *parts[3:])

    found: Any = reduce
    found.marft_originals = originals
    return found
