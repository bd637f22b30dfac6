"""The user's app: how it is found by name, and how one call of it is made and bounded in time.

Invariant: a call gives a value or a ``Failure``, never an exception of the app's. An async function
runs on the current event loop; a sync one gets a thread of its own, which inherits the context.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from marft_agents.errors import ConfigError
from marft_agents.rewards import load_function

Run = Callable[[Any, Any], Any]
"""The user's ``run(task, recorder)``, sync or async."""

TIMEOUT = "timeout"
GRACE_S = 1.0
GRACE_TIMES = 5
"""A run that has to stop is told so, and again a second later, five times in all."""


@dataclass(frozen=True)
class Failure:
    """Why a run gave no result: the error's name, or ``TIMEOUT``."""

    kind: str
    message: str


def load_run(spec: str) -> Run:
    """The function that ``package.module:function`` names.

    Raises:
        ConfigError: the spec, the module or the function is wrong, or it does not take two
            arguments.
    """
    found = load_function(spec, "--online")
    try:
        inspect.signature(found).bind("task", "recorder")
    except TypeError as error:
        raise ConfigError(
            f"--online {spec}: it is called as {spec.rpartition(':')[2]}(task, recorder), and"
            f" cannot be: {error}"
        ) from error
    except ValueError:  # a built-in without a signature
        pass
    return found


async def call_app(
    run: Run, task: Any, recorder: object, *, timeout: float
) -> tuple[object, Failure | None]:
    """What ``run`` returned, or why it returned nothing.

    After ``timeout`` seconds, or when the caller is cancelled, it is told to stop. A thread cannot
    be stopped: it goes on unheard.
    """
    inner = asyncio.ensure_future(_guarded(run, task, recorder))
    try:
        await asyncio.wait({inner}, timeout=timeout)
        ended = inner.done()
    finally:
        await _stop(inner)
        if inner.done() and not inner.cancelled():
            inner.exception()  # asyncio would complain of an interrupt that nobody looked at
    if not ended:
        return None, Failure(TIMEOUT, f"took longer than {timeout:g} s")
    if inner.cancelled():
        return None, Failure("CancelledError", "the run cancelled itself")
    returned, error = inner.result()
    if error is None:
        return returned, None
    return None, Failure(type(_first(error)).__name__, described(error))


async def _stop(task: asyncio.Future[Any]) -> None:
    """Tell a task to stop, and again where its clean-up waits for something that hangs."""
    for _ in range(GRACE_TIMES):
        if task.done():
            return
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE_S)


async def _guarded(run: Run, task: Any, recorder: object) -> tuple[object, BaseException | None]:
    try:
        if _is_async(run):
            return await run(task, recorder), None
        returned, error = await _in_thread(run, task, recorder)
        if isinstance(returned, Awaitable):
            returned = await returned
        return returned, error
    except (Exception, SystemExit) as error:
        return None, error


def _is_async(run: Run) -> bool:
    return inspect.iscoroutinefunction(run) or inspect.iscoroutinefunction(
        getattr(run, "__call__", None)  # noqa: B004 an object whose call is async, not whether it is callable
    )


def _in_thread(
    run: Run, task: Any, recorder: object
) -> asyncio.Future[tuple[object, BaseException | None]]:
    """Call ``run`` in a thread of its own, which keeps nobody waiting at the end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[object, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: tuple[object, BaseException | None]) -> None:
        if not future.done():
            future.set_result(result)

    def work() -> None:
        try:
            result = context.run(run, task, recorder), None
        except BaseException as error:  # SystemExit would only end the thread
            result = None, error
        with suppress(RuntimeError):  # the loop is closed, nobody waits any more
            loop.call_soon_threadsafe(settle, result)

    threading.Thread(target=work, name="marft-run", daemon=True).start()
    return future


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def described(error: BaseException) -> str:
    """``ValueError: what was wrong`` on one line; of a group, its first member.

    Frameworks put whole tracebacks into their messages; those are cut off.
    """
    error = _first(error)
    try:
        text = " ".join(str(error)[:2000].split("\nTraceback", 1)[0].split())
    except Exception:  # the app's own exceptions may fail at this
        text = ""
    return f"{type(error).__name__}: {text}"[:200] if text else type(error).__name__
