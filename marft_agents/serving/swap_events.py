"""What a swap did, step by step, for whoever measures or logs it.

Invariant: every swap that began ends in one ``SwapEvent``, after one for every step it came to;
an observer that fails is logged and stops no swap.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, TypeVar

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
Result = Literal["ok", "refused", "failed"]
What = Literal["swap", "prepare"]
"""Whether a version is to serve now, or is loaded and probed for a swap to come."""


@dataclass(frozen=True, slots=True)
class SwapEvent:
    """One step of a swap, or the swap as a whole where ``whole``.

    ``step``: of the whole, the one that it stopped at. ``refused``: the version is at fault and
    not the engine.
    """

    agent: str
    version: int
    whole: bool
    step: str | None
    replica: str | None
    result: Result
    seconds: float
    problem: str | None = None
    origin: int | None = None
    """Of the whole: the version that served when it began."""
    by: str | None = None
    """Of the whole: the name of the operator's key."""
    what: What = "swap"


asked_by: ContextVar[str | None] = ContextVar("marft_swap_asked_by", default=None)
"""Name of the key of whoever asks for what is done now; ``None`` for this server itself."""
SwapObserver = Callable[[SwapEvent], None]


class _Steps:
    """Steps of one swap, which may run in several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[tuple[str, str | None], float] = {}
        self._failed: dict[tuple[str, str | None], Exception] = {}

    def note(self, step: str, replica: str | None, seconds: float, error: Exception | None) -> None:
        key = step, replica
        with self._lock:
            self._seconds[key] = self._seconds.get(key, 0.0) + seconds
            if error is not None:
                self._failed[key] = error

    def events(self, agent: str, version: int) -> list[SwapEvent]:
        with self._lock:
            found, failed = dict(self._seconds), dict(self._failed)
        events: list[SwapEvent] = []
        for (step, replica), seconds in found.items():
            error = failed.get((step, replica))
            result, problem = _result(error), _said(error)
            events.append(SwapEvent(agent, version, False, step, replica, result, seconds, problem))
        return events


_STEPS: ContextVar[_Steps | None] = ContextVar("marft_swap_steps", default=None)


def spent() -> dict[str, float]:
    """Seconds of every step of the swap under way so far, of the slowest replica each."""
    steps, out = _STEPS.get(), dict[str, float]()
    for event in steps.events("", 0) if steps is not None else ():
        if event.step is not None:
            out[event.step] = max(event.seconds, out.get(event.step, 0.0))
    return out


@contextlib.contextmanager
def timed_step(step: str, replica: str | None) -> Generator[None]:
    """Note how long the block takes and how it ends, where a swap is under way."""
    steps = _STEPS.get()
    if steps is None:
        yield
        return
    began, failed = time.monotonic(), None
    try:
        yield
    except Exception as error:
        failed = error
        raise
    finally:
        steps.note(step, replica, time.monotonic() - began, failed)


async def observed(
    work: Awaitable[_T],
    agent: str,
    version: int,
    observers: Sequence[SwapObserver],
    origin: int | None = None,
    *,
    what: What = "swap",
) -> _T:
    """The result of a swap or a preparation; its steps and end are told to the observers."""
    steps, began = _Steps(), time.monotonic()
    token = _STEPS.set(steps)
    failed: BaseException | None = None
    try:
        return await work
    except BaseException as error:
        failed = error
        raise
    finally:
        _STEPS.reset(token)
        seconds, result = time.monotonic() - began, _result(failed)
        step: str | None = getattr(failed, "step", None)
        said, by = _said(failed), asked_by.get()
        whole = SwapEvent(agent, version, True, step, None, result, seconds, said, origin, by, what)
        for event in [*steps.events(agent, version), whole]:
            _tell(event, observers)


def _tell(event: SwapEvent, observers: Sequence[SwapObserver]) -> None:
    for observe in observers:
        try:
            observe(event)
        except Exception:
            _log.exception("an observer of swaps failed")


def _result(error: BaseException | None) -> Result:
    if error is None:
        return "ok"
    return "refused" if getattr(error, "refused", False) else "failed"


def _said(error: BaseException | None) -> str | None:
    return None if error is None else str(error) or type(error).__name__
