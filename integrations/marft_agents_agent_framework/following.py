"""Staying with what a call returned until it is over.

Invariant: the app gets an object of the kind that it would have got, and everything that runs for
it runs inside the scope: an awaitable while it is awaited, a stream at each pull. Agent Framework
sends the request of a stream at its first pull, wherever that is, so a scope that is only open
while the call is made would be over by then.
"""

from __future__ import annotations

import inspect
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Awaitable
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any, Protocol

from agent_framework import ResponseStream

from marft_agents.recording.safety import Safety


class Scope(Protocol):
    """Something that goes on while a result is awaited or read. Its first end counts."""

    safety: Safety

    def entered(self) -> AbstractContextManager[None]: ...

    def read(self) -> None:
        """A stream was read to its end; its result, made of the parts, comes next."""
        ...

    def done(self, result: Any) -> None:
        """It has a result; for streams, the final one."""
        ...

    def failed(self, error: BaseException | None) -> None:
        """It has none; ``None``: nobody read it to its end."""
        ...


_left: deque[Scope] = deque()
"""Scopes of streams that were let go. Garbage collection may find these anywhere, inside any lock,
so nothing is done about them there."""


def settle() -> None:
    """End what went on for streams that nobody has any more."""
    while _left:
        scope = _left.popleft()
        with scope.safety.guard("see a stream dropped"):
            scope.failed(None)


def follow(result: Any, scope: Scope) -> Any:
    """``result``, or something of its kind in its place, that reports to ``scope``."""
    settle()
    if isinstance(result, ResponseStream):
        scope.safety.attempt("follow a stream", lambda: _attach(result, scope))
        return result  # pyright: ignore[reportUnknownVariableType] of whatever
    if inspect.isawaitable(result):
        return _awaited(result, scope)
    if hasattr(result, "__aiter__"):
        return _read(result, scope)
    with scope.safety.guard("see a result"):
        scope.done(result)
    return result


async def _awaited(result: Awaitable[Any], scope: Scope) -> Any:
    try:
        with scope.entered():
            value = await result
    except BaseException as error:
        with scope.safety.guard("see a failure"):
            scope.failed(error)
        raise
    return follow(value, scope)


async def _read(items: Any, scope: Scope) -> AsyncGenerator[Any, None]:
    problem: BaseException | None = None
    finished = False
    seen: list[Any] = []
    iterator = items.__aiter__()
    try:
        while True:
            try:
                with scope.entered():  # never across a yield
                    item = await anext(iterator)
            except StopAsyncIteration:
                break
            seen.append(item)
            yield item
        finished = True
    except GeneratorExit:
        raise
    except BaseException as error:
        problem = error
        raise
    finally:
        close = getattr(iterator, "aclose", None)
        if close is not None:
            await close()
        with scope.safety.guard("see the end of a stream"):
            scope.done(seen) if finished else scope.failed(problem)


class _Pull:
    """Around one pull of a stream."""

    def __init__(self, scope: Scope, ends: list[bool]) -> None:
        self._scope, self._ends = scope, ends
        self._entered = scope.entered()

    def __enter__(self) -> None:
        self._entered.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(ValueError):  # closed from another context, where nothing of it is set
            self._entered.__exit__(None, None, None)
        if isinstance(error, StopAsyncIteration):
            self._ends.append(True)
        elif error is not None:
            with self._scope.safety.guard("see a failure"):
                self._scope.failed(error)


def _attach(stream: Any, scope: Scope) -> None:
    ends: list[bool] = []

    def final(result: Any) -> None:
        with scope.safety.guard("see a result"):
            scope.done(result)

    def closed() -> None:
        with scope.safety.guard("see a stream closed"):
            scope.read() if ends else scope.failed(None)

    stream.with_pull_context_manager(lambda: _Pull(scope, ends))
    stream.with_result_hook(final)
    stream.with_cleanup_hook(closed)
    weakref.finalize(stream, _left.append, scope).atexit = False
