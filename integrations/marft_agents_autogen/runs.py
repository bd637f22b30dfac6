"""Where an episode begins and ends.

Invariant: a run of a wrapped root joins the episode it happens in, or is one; runs inside it
only join. The frame is entered only while the app waits for the next item, never across a
``yield``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from autogen_agentchat.base import TaskResult
from autogen_agentchat.messages import BaseChatMessage

from marft_agents.recording import (
    EndReason,
    LiveEpisode,
    describe_error,
    end_run,
)
from marft_agents_autogen.compat import message_text
from marft_agents_autogen.frames import Run, episode_in, first, innermost
from marft_agents_autogen.seats import Binding, Seat, close_stream

Rewalk = Callable[[Binding], None]

_LIMITS = re.compile(
    r"Maximum number of messages \d+ reached, current message count: \d+"
    r"|Maximum number of turns \d+ reached\.?"
    r"|Token usage limit reached, total token count: \d+, prompt token count: \d+,"
    r" completion token count: \d+\.?"
    r"|Timeout of [\d.]+ seconds reached"
    r"|Max rounds reached\.?"
)


def ending(stop_reason: str | None) -> EndReason:
    """``truncated`` when nothing but limits stopped the team."""
    rest, limits = _LIMITS.subn("", stop_reason or "")
    return "truncated" if limits and not rest.strip(" ,") else "terminated"


class Going:
    """One call of ``run`` or ``run_stream``, inside the episode it joined or opened."""

    def __init__(self, seat: Seat, rewalk: Rewalk, task: Any) -> None:
        self._seat = seat
        self._safety = seat.recorder.core.safety
        self._frame: Run | None = None
        self._own = False
        self._result: TaskResult | None = None
        if not seat.closed:
            self._safety.attempt("begin a run", lambda: self._begin(rewalk, task))

    def _begin(self, rewalk: Rewalk, task: Any) -> None:
        seat, below = self._seat, innermost()
        outer = first(below, seat)
        if isinstance(outer, Run) and outer.seat is seat:
            return  # ``run`` goes through ``run_stream``
        episode = episode_in(outer, seat)
        if seat.root is not None and outer is None:
            with self._safety.guard("look for new agents and clients"):
                rewalk(seat.root)
        if episode is None:
            if seat.root is None:
                return
            episode = seat.recorder.open_episode(_task(task), seat.root.runtime)
            self._own = True
        again = not episode.first_time(f"run of {id(seat)}")
        if again and outer is None and task is not None:
            _told(episode, task)
        self._frame = Run(seat, episode, below)

    def entered(self) -> AbstractContextManager[None]:
        """The frame of this run as the current one, for code that it starts from here."""
        return self._frame.entered() if self._frame else nullcontext()

    def observe(self, item: Any) -> bool:
        """Take note of an item; whether items of its class tell anything."""
        telling = _is_result(type(item))
        if telling:
            self._result = item
        return telling

    def close(self, error: BaseException | None) -> None:
        """The run is over, by its result, an exception, or because nobody reads it any more."""
        with self._safety.guard("end a run"):
            self._close(error)

    def _close(self, error: BaseException | None) -> None:
        frame, self._frame = self._frame, None
        if frame is None:
            return
        frame.close()
        episode, binding = frame.episode, self._seat.root
        reason, detail = self._outcome(error)
        if binding is None or not self._own:
            if frame.outer is None:  # how a nested run ends is its caller's affair
                episode.report(reason, detail)
            return
        on_end = binding.on_end if self._result is not None else None
        end_run(episode, reason, detail, on_end, self._result)

    def _outcome(self, error: BaseException | None) -> tuple[EndReason, str | None]:
        left = error is None or isinstance(error, GeneratorExit)
        if error is not None and not left:  # older versions give a result first, then raise
            return "failed", describe_error(error)
        if self._result is None:
            return "failed", "the run was left before its result"
        reason, binding = self._result.stop_reason, self._seat.root
        designed = binding is not None and binding.end == "terminated"
        return ("terminated" if designed else ending(reason)), reason


def patch_runs(obj: Any, seat: Seat, binding: Binding, rewalk: Rewalk) -> None:
    """See each run of ``obj``; those of a root are episodes."""
    original = obj.run_stream
    # After its first item a group chat only passes on what its agents say, each in its own task.
    passes_on = getattr(original, "__func__", None) is _base_group_chat().run_stream

    @functools.wraps(original)
    async def run_stream(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        going = Going(seat, rewalk, kwargs.get("task", args[0] if args else None))
        inside, problem, silent = going.entered(), None, None
        stream = aiter(original(*args, **kwargs))
        try:
            while True:
                try:
                    with inside:
                        item = await anext(stream)
                except StopAsyncIteration:
                    return
                if type(item) is not silent and not going.observe(item):
                    silent = type(item)  # pieces come by the dozen
                yield item
                if passes_on:
                    break
            async for item in stream:
                if type(item) is not silent and not going.observe(item):
                    silent = type(item)
                yield item
        except BaseException as error:
            problem = error
            raise
        finally:
            with inside:
                await close_stream(stream)
            going.close(problem)

    binding.patches.set(obj, "run_stream", run_stream)
    if type(obj).run is not getattr(_base_group_chat(), "run", None):
        _patch_run(obj, seat, binding, rewalk)


def _patch_run(obj: Any, seat: Seat, binding: Binding, rewalk: Rewalk) -> None:
    """Agents have a ``run`` of their own, which does not go through ``run_stream``."""
    original = obj.run

    @functools.wraps(original)
    async def run(*args: Any, **kwargs: Any) -> Any:
        going = Going(seat, rewalk, kwargs.get("task", args[0] if args else None))
        problem: BaseException | None = None
        try:
            with going.entered():
                result = await original(*args, **kwargs)
            going.observe(result)
            return result
        except BaseException as error:
            problem = error
            raise
        finally:
            going.close(problem)

    binding.patches.set(obj, "run", run)


def _base_group_chat() -> Any:
    from autogen_agentchat.teams import BaseGroupChat

    return BaseGroupChat


@functools.lru_cache(maxsize=256)
def _is_result(kind: type[Any]) -> bool:
    """Asked per class: AutoGen's classes are slow to ask, and streams have many items."""
    return issubclass(kind, TaskResult)


def _task(task: Any) -> Any:
    if isinstance(task, BaseChatMessage):
        return message_text(task)
    if isinstance(task, list | tuple):
        items: Any = task
        return [{"source": m.source, "content": message_text(m)} for m in items]
    return task


def _told(episode: LiveEpisode, task: Any) -> None:
    """A run that goes on with new input: the app's answer to the runs before it."""
    if isinstance(task, str):
        episode.human("user", task)
    for message in [task] if isinstance(task, BaseChatMessage) else task:
        if isinstance(message, BaseChatMessage):
            episode.human(message.source, message_text(message))
