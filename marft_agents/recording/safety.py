"""The recorder's own failures: logged once, never the app's problem; under pytest, raised.

Invariant: whatever goes wrong inside ``guard`` ends there, unless the recorder is strict. What is
said holds no secret of a known shape (messages of errors quote what they were given), nor a key
that the app's own requests carry.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import TypeVar

from marft_agents.recording import leaving
from marft_agents.recording.patterns import MASK, is_telling, mask

_T = TypeVar("_T")

_MOST_KEYS = 100

logger = logging.getLogger("marft_agents.recording")


class Safety:
    """``raise_errors`` None: strict exactly while a pytest test is running."""

    def __init__(self, raise_errors: bool | None = None) -> None:
        self._raise_errors = raise_errors
        self._said: set[Hashable] = set()
        self.keys: tuple[str, ...] = ()
        """Keys in use, as far as ``hide`` was told of them."""
        self.after_fork()
        leaving.watch(self)

    def after_fork(self) -> None:
        """The lock may have been held by a thread that a forked child does not have."""
        self._lock = threading.Lock()

    def at_exit(self, timeout: float) -> None:
        """Nothing to wait for."""

    @property
    def strict(self) -> bool:
        if self._raise_errors is None:
            return "PYTEST_CURRENT_TEST" in os.environ
        return self._raise_errors

    @property
    def spoke(self) -> bool:
        """Whether anything was said yet."""
        return bool(self._said)

    def warn_once(self, key: Hashable, message: str) -> None:
        """Log a warning, the first time only for each ``key``."""
        if self._first(key):
            self._log(logging.WARNING, message)

    def failed(self, what: str, error: Exception) -> None:
        """A bug or a refusal in the recorder: raised when strict, else logged once."""
        if self.strict:
            raise error
        if self._first((what, type(error))):
            trace = "".join(traceback.format_exception(error))
            self._log(logging.ERROR, f"marft-agents could not {what}; the app goes on\n{trace}")

    def guard(self, what: str) -> AbstractContextManager[None]:
        """Keep an exception of the recorder away from the app."""
        return _Guard(self, what)

    def attempt(self, what: str, action: Callable[[], _T]) -> _T | None:
        """``action()``, or ``None`` where the recorder failed."""
        try:
            return action()
        except Exception as error:
            self.failed(what, error)
        return None

    def hide(self, header: str | None) -> None:
        """Keep the key in an ``Authorization`` (or other) header out of all that is written."""
        key = (header or "").rpartition(" ")[2]
        if key not in self.keys and len(self.keys) < _MOST_KEYS and is_telling(key):
            self.keys = (*self.keys, key)

    def without_keys(self, text: str) -> str:
        """``text`` without the keys in use."""
        for key in self.keys:
            if key in text:
                text = text.replace(key, MASK.format("api-key"))
        return text

    def _log(self, level: int, message: str) -> None:
        with suppress(Exception):  # a handler of the app's may raise
            logger.log(level, "%s", mask(self.without_keys(message))[0])

    def _first(self, key: Hashable) -> bool:
        with self._lock:
            new = key not in self._said
            self._said.add(key)
            return new


class _Guard:
    """One ``Safety.guard``; a class, because the app waits for several a call."""

    __slots__ = ("_safety", "_what")

    def __init__(self, safety: Safety, what: str) -> None:
        self._safety = safety
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._safety.failed(self._what, error)
        return True
