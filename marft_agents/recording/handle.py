"""What an application holds of an episode.

Invariant: an ``EpisodeHandle`` stays valid after the end: rewards may come any time later.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from marft_agents.recording.clean import as_text
from marft_agents.recording.core import Core
from marft_agents.recording.episode import LiveEpisode, current_episode
from marft_agents.schema import EndReason


class EpisodeHandle:
    """One episode, as the application sees it."""

    def __init__(self, live: LiveEpisode) -> None:
        self._live = live

    @property
    def id(self) -> str:
        """The episode's id, for ``recorder.reward(id, …)`` now or in another process."""
        return self._live.id

    def reward(
        self,
        value: float | None,
        *,
        agent: str | None = None,
        turn_id: str | None = None,
        source: str = "app",
    ) -> None:
        """Score the episode, one agent, or one turn; the latest per source counts."""
        self._live.reward(value, agent, turn_id, source)

    def edit(self, turn_id: str, text: str, *, editor: str | None = None) -> None:
        """A human (or code) put ``text`` in place of what a turn said.

        The turn keeps its ids and is not trained on as a sample of the policy.
        """
        self._live.edit(turn_id, text, editor)

    def end(self, reason: EndReason, detail: str | None = None) -> None:
        """Decide how the episode ends, instead of what the runtime will report.

        A message limit counts as ``truncated``. Where the limit is the designed end (a round robin
        of exactly one round), say ``end("terminated")``.
        """
        self._live.decide(reason, detail)

    def turns(self, agent: str | None = None) -> tuple[str, ...]:
        """Turn ids finished so far, in order of completion; of a long episode the newest 4096."""
        return self._live.turn_ids(agent)

    def active(self) -> AbstractContextManager[None]:
        """Make this the current episode in another thread, which does not inherit it."""
        return self._live.active()

    def __repr__(self) -> str:
        return f"EpisodeHandle(id={self.id!r})"


def end_run(
    episode: LiveEpisode,
    reason: EndReason,
    detail: str | None,
    on_end: Callable[[EpisodeHandle, Any], object] | None = None,
    result: Any = None,
) -> None:
    """End an episode that a run opened, after ``on_end`` has had its chance to reward it.

    Whatever ``on_end`` raises, the episode ends; ``SystemExit`` and the like go on from there.
    """
    try:
        if on_end is not None:
            with episode.core.safety.guard("call on_end"):
                _say_unawaited(episode, on_end(EpisodeHandle(episode), result))
    finally:
        episode.report(reason, detail)
        if reason == "failed":
            episode.decide(reason, detail)
        episode.end()


def _say_unawaited(episode: LiveEpisode, made: object) -> None:
    """A coroutine that ``on_end`` returned does nothing: nobody can await it here."""
    if not inspect.isawaitable(made):
        return
    close = getattr(made, "close", None) or getattr(made, "cancel", None)
    if callable(close):
        close()
    episode.core.safety.warn_once(
        "on_end awaits",
        "marft-agents: on_end returned something to await, and nobody can await it: what it was to"
        " do (a reward?) is not done; use `async with recorder.episode() as episode:` around the"
        " run and await there",
    )


class EpisodeContext:
    """``with`` and ``async with`` around one episode; both yield an ``EpisodeHandle``."""

    def __init__(
        self,
        core: Core,
        task: Any,
        episode_id: str | None,
        metadata: Mapping[str, Any] | None,
    ) -> None:
        self._core = core
        self._task = task
        self._id = episode_id
        self._metadata = metadata
        self._live: LiveEpisode | None = None
        self._active: AbstractContextManager[None] | None = None

    def __enter__(self) -> EpisodeHandle:
        core = self._core
        parent = current_episode(core)
        given = "" if self._id is None else as_text(self._id)
        name = given.encode("utf-8", "backslashreplace").decode() or core.new_id()
        if given and core.enabled:
            core.given_id(name)
        self._live = LiveEpisode(core, name, parent.id if parent else None)
        if parent is not None:
            parent.has_inner = True
        with core.safety.guard("log the start of an episode"):
            runtimes = ", ".join(sorted(core.runtimes)) or None
            self._live.start(self._task, self._metadata, runtimes)
        self._active = self._live.active()
        self._active.__enter__()
        return EpisodeHandle(self._live)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._active is not None:
            self._active.__exit__(None, None, None)
        if self._live is not None:
            with self._core.safety.guard("log the end of an episode"):
                self._live.end(error)
                if error is None:
                    self._live.say_if_nothing_was_recorded()

    async def __aenter__(self) -> EpisodeHandle:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, trace)
