"""Coroutines that rarely wait, begun where there is no task.

Invariant: one that does not wait costs no task and no turn of the loop; one that does goes on in a
task as if it had begun there.
"""

from __future__ import annotations

import types
from collections.abc import Awaitable, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Done(Generic[_T]):
    """What a coroutine returned without ever waiting."""

    result: _T


def begin(work: Awaitable[_T]) -> Done[_T] | Awaitable[_T]:
    """Run it up to where it waits; what it raises is raised. The rest is to be awaited."""
    steps = work.__await__()
    try:
        waits_for = next(steps)
    except StopIteration as end:
        return Done(end.value)
    return _rest(steps, waits_for)


@types.coroutine
def _rest(steps: Generator[Any, Any, _T], waits_for: Any) -> Generator[Any, Any, _T]:
    """What is left of something that was begun and waits."""
    while True:
        try:
            sent: Any = yield waits_for
        except BaseException as error:
            step, given = steps.throw, error
        else:
            step, given = steps.send, sent
        try:
            waits_for = step(given)
        except StopIteration as end:
            return end.value
