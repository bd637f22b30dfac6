"""Where an episode begins and ends.

Invariant: a run of a wrapped root joins the episode it happens in, or is one; the contextvar is set
only while the app waits for the next item, never across a ``yield``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from autogen_agentchat.base import TaskResult
from autogen_agentchat.messages import BaseChatMessage

from marft_agents.recording import EndReason, EpisodeHandle, LiveEpisode, describe_error
from marft_agents_autogen.seats import Binding, Seat, close_stream

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


class Run:
    """One run of a wrapped root, inside the episode it joined or opened."""

    def __init__(self, seat: Seat, binding: Binding, task: Any) -> None:
        self._binding = binding
        self._episode: LiveEpisode | None = None
        self._own = False
        self._result: TaskResult | None = None
        self._safety = binding.recorder.core.safety
        if not binding.recorder.core.closed:
            self._safety.attempt("begin a run", lambda: self._begin(seat, task))

    def _begin(self, seat: Seat, task: Any) -> None:
        episode = seat.episode()
        self._own = episode is None
        if episode is None:
            episode = self._binding.recorder.open_episode(_task(task), _runtime())
        self._episode = episode
        self._binding.running.append(episode)

    def entered(self) -> AbstractContextManager[None]:
        """The episode as the current one, for code that the run starts from here."""
        return self._episode.active() if self._episode else nullcontext()

    def observe(self, item: Any) -> None:
        if isinstance(item, TaskResult):
            self._result = item

    def close(self, error: BaseException | None) -> None:
        """The run is over, by its result, an exception, or because nobody reads it any more."""
        with self._safety.guard("end a run"):
            self._close(error)

    def _close(self, error: BaseException | None) -> None:
        episode, self._episode = self._episode, None
        if episode is None:
            return
        self._binding.running.remove(episode)
        reason, detail = self._outcome(error)
        if not self._own:
            episode.report(reason, detail)
            return
        if self._result is not None and self._binding.on_end is not None:
            with self._safety.guard("call on_end"):
                self._binding.on_end(EpisodeHandle(episode), self._result)
        episode.report(reason, detail)
        if reason == "failed":
            episode.decide(reason, detail)
        episode.end()

    def _outcome(self, error: BaseException | None) -> tuple[EndReason, str | None]:
        if self._result is None:
            if error is None or isinstance(error, GeneratorExit):
                return "failed", "the run was left before its result"
            return "failed", describe_error(error)
        reason = self._result.stop_reason
        return ("terminated" if self._binding.end == "terminated" else ending(reason)), reason


def patch_runs(root: Any, seat: Seat, binding: Binding) -> None:
    """Make each outermost run of ``root`` an episode."""
    original = root.run_stream

    @functools.wraps(original)
    async def run_stream(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        run = Run(seat, binding, kwargs.get("task", args[0] if args else None))
        stream = original(*args, **kwargs)
        problem: BaseException | None = None
        try:
            while True:
                try:
                    with run.entered():
                        item = await anext(stream)
                except StopAsyncIteration:
                    break
                run.observe(item)
                yield item
        except BaseException as error:
            problem = error
            raise
        finally:
            with run.entered():
                await close_stream(stream)
            run.close(problem)

    binding.patches.set(root, "run_stream", run_stream)
    if type(root).run is not getattr(_base_group_chat(), "run", None):
        _patch_run(root, seat, binding)


def _patch_run(root: Any, seat: Seat, binding: Binding) -> None:
    """Agents have a ``run`` of their own, which does not go through ``run_stream``."""
    original = root.run

    @functools.wraps(original)
    async def run(*args: Any, **kwargs: Any) -> Any:
        going = Run(seat, binding, kwargs.get("task", args[0] if args else None))
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

    binding.patches.set(root, "run", run)


def _base_group_chat() -> Any:
    from autogen_agentchat.teams import BaseGroupChat

    return BaseGroupChat


def _task(task: Any) -> Any:
    if isinstance(task, BaseChatMessage):
        return task.to_text()
    if isinstance(task, list | tuple):
        items: Any = task
        return [{"source": m.source, "content": m.to_text()} for m in items]
    return task


@functools.cache
def _runtime() -> str:
    try:
        return f"autogen-agentchat {version('autogen-agentchat')}"
    except PackageNotFoundError:
        return "autogen-agentchat"
