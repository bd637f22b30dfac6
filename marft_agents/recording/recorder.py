"""``MarftRecorder``: the one object an application holds.

Invariant: what is wrong with how the recorder is set up (an unsupported object, a client used for
two agents) is raised where it is set up; what goes wrong while the app runs never reaches the app.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast

from marft_agents.errors import ConfigError
from marft_agents.log import LogWriter, Retention
from marft_agents.recording.capture import Claim, capture
from marft_agents.recording.core import Core, Inject, Models, random_id, utc_now
from marft_agents.recording.defaults import episode_defaults
from marft_agents.recording.episode import LiveEpisode, current_episode
from marft_agents.recording.handle import EpisodeContext, EpisodeHandle
from marft_agents.recording.integrations import check_options, find_integration
from marft_agents.recording.redact import Redact, Redactor
from marft_agents.recording.reviews import give_edit, give_reward
from marft_agents.recording.safety import Safety
from marft_agents.recording.sink import CAPACITY, CAPACITY_BYTES, EventLog, Sink
from marft_agents.schema import Event

_T = TypeVar("_T")


class Attachment(Protocol):
    """Something put onto the app's objects that ``close`` takes off again."""

    def release(self) -> None: ...


def _is_text(name: str) -> bool:
    """Half a surrogate pair is none: it could not be written."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


class _Nowhere:
    """Keeps nothing: the log of a recorder that is off."""

    def write(self, event: Event) -> None: ...

    def close(self) -> None: ...


def _routes(models: Any) -> Models:
    if models == "auto":
        return "auto"
    if models is None or isinstance(models, Mapping):
        return dict(cast("Mapping[str, str]", models or {}))
    raise ConfigError(
        f"models is 'auto' or a mapping from agent to model name, not {models!r}; for one model a"
        ' agent: MarftRecorder(models={"planner": "planner"})'
    )


class MarftRecorder:
    """Records episodes of multi-agent applications into ``log_dir``.

    Args:
        log_dir: folder for the log segments; made at the first event.
        models: agent → model name to send instead of the app's, e.g. ``{"planner": "planner"}``;
            ``"auto"`` sends each agent to the model of its own name where the server lists one.
        log: where events go instead of ``log_dir``, e.g. ``marft_agents.testing.InMemoryLog()``.
        inject: ``auto`` asks each server once whether it takes the extra request fields;
            ``always`` and ``never`` decide it.
        raise_errors: whether the recorder's own failures are raised; by default only under pytest.
        capacity: events that may wait for the disk before new ones are dropped and counted.
        capacity_bytes: what these events may hold together, roughly.
        redact: what is taken out of events before they are written. ``default`` masks keys, tokens
            and passwords of well-known shapes; ``off`` masks nothing; a ``Redaction`` does more.
        retention: which old segments of ``log_dir`` to remove; by default none.
        keep_caches: leave the app's caches of replies on; by default they are passed by while
            recording, because a cached reply is no sample of the policy.
        enabled: ``False`` makes a recorder that touches nothing and logs nothing.
    """

    def __init__(
        self,
        log_dir: str | Path = "logs",
        *,
        models: Models | None = None,
        log: EventLog | None = None,
        inject: Inject = "auto",
        raise_errors: bool | None = None,
        capacity: int = CAPACITY,
        capacity_bytes: int = CAPACITY_BYTES,
        redact: Redact = "default",
        retention: Retention | None = None,
        keep_caches: bool = False,
        enabled: bool = True,
        clock: Callable[[], datetime] = utc_now,
        ids: Callable[[], str] = random_id,
    ) -> None:
        safety = Safety(raise_errors)
        redactor = Redactor(redact, safety)
        if log is not None and retention is not None:
            raise ConfigError("retention is for log_dir, and log= puts the events elsewhere")
        if not enabled:
            log = _Nowhere()
        if log is None and log_dir == "":
            raise ConfigError("log_dir is empty; name a folder, or '.' for the current one")
        if log is None and Path(log_dir).is_file():
            raise ConfigError(f"log_dir is a folder, and {str(log_dir)!r} is a file")
        sink = Sink(
            log if log is not None else LogWriter(log_dir, retention=retention),
            safety,
            prepare=redactor,
            capacity=capacity,
            capacity_bytes=capacity_bytes,
        )
        self.core = Core(sink, safety, _routes(models), inject, clock, ids, keep_caches=keep_caches)
        """For integrations."""
        self.enabled = self.core.enabled = enabled
        self._attachments: weakref.WeakSet[Attachment] = weakref.WeakSet()

    def wrap(self, obj: _T, **options: Any) -> _T:
        """Record ``obj`` (a team or agent of a supported runtime) from now on; returns ``obj``.

        Works before or after a first run, and again without effect. Each outermost run is an
        episode, unless it happens inside ``with recorder.episode()``.

        Raises:
            IntegrationError: no supported runtime.
            ConfigError: an option with a value that it cannot have.
            MissingExtraError: the runtime is not fully installed.
        """
        integration = find_integration(obj)
        check_options(options, integration)
        if self.core.closed:
            self.core.safety.warn_once(
                "wrapped after close",
                "marft-agents: what is wrapped by a recorder that is closed is not recorded; close"
                " it after the last episode, or make a new MarftRecorder",
            )
        elif self.enabled:
            integration.wrap(obj, self, **options)
        return obj

    def episode(
        self,
        task: Any = None,
        *,
        id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> EpisodeContext:
        """An episode around a ``with`` or ``async with`` block; yields its handle.

        It ends ``failed`` when the block raises, ``truncated`` when a run inside hit a limit, else
        ``terminated``; ``EpisodeHandle.end`` overrides that.
        """
        return EpisodeContext(self.core, task, id, metadata)

    def defaults(
        self, *, task: Any = None, metadata: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[list[str]]:
        """Task and metadata for episodes that start inside a ``with`` block and give none.

        The app's own task, and its own metadata keys, win. Threads count as inside when they
        inherit the context, as ``asyncio.to_thread`` does it. Yields a list that fills with the
        ids of the episodes; an episode inside another one takes nothing and is not in it.
        """
        return episode_defaults(self.core, task, metadata)

    def reward(
        self,
        episode_id: str,
        value: float | None,
        *,
        agent: str | None = None,
        turn_id: str | None = None,
        source: str = "app",
    ) -> None:
        """Score an episode by its id, any time later, from any process."""
        give_reward(self.core, episode_id, value, agent=agent, turn_id=turn_id, source=source)

    def edit(self, episode_id: str, turn_id: str, text: str, *, editor: str | None = None) -> None:
        """Say, any time later, that a turn's text was replaced; it is then no policy sample."""
        give_edit(self.core, episode_id, turn_id, text, editor)

    def attach_client(self, client: Any, agent: str) -> None:
        """Record the chat completions of an openai SDK client as turns of ``agent``.

        Calls outside an episode pass through unrecorded, with one warning.

        Raises:
            IntegrationError: no openai SDK client.
            ConfigError: the client already belongs to another agent, or ``agent`` is no name.
        """
        named: Any = agent
        if not isinstance(named, str) or not named.strip() or not _is_text(named):
            raise ConfigError(
                f"attach_client(client, agent={agent!r}): agent is a name, e.g. 'coder'"
            )
        if self.enabled:
            self.capture(client, agent)

    def flush(self, timeout: float | None = 10.0) -> bool:
        """Wait until the events so far are written or counted lost; False when that took longer.

        What a disk refused is in ``EpisodeEnded.dropped_events`` and in the one warning about it.
        """
        return self.core.sink.flush(timeout)

    def close(self) -> None:
        """Flush, and take the recorder off everything it was put on."""
        self.core.closed = True
        for attachment in list(self._attachments):
            attachment.release()
        self.core.sink.close()

    def __enter__(self) -> MarftRecorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- for integrations ---------------------------------------------------------------------

    def capture(self, client: Any, agent: str | None = None) -> Claim:
        """Record HTTP calls of an openai SDK client made inside a ``Call``, or all as ``agent``."""
        claim = capture(client, self.core, agent)
        self._attachments.add(claim)
        self.core.attached = True
        return claim

    def keep(self, attachment: Attachment) -> None:
        """Have ``close`` release ``attachment``; whoever it is put on must hold it."""
        self._attachments.add(attachment)
        self.core.attached = True
        runtime = getattr(attachment, "runtime", None)
        if isinstance(runtime, str):
            self.core.runtimes.add(runtime)

    def current(self) -> LiveEpisode | None:
        """The episode that the current context is in."""
        return current_episode(self.core)

    def open_episode(self, task: Any, runtime: str) -> LiveEpisode:
        """Start an episode that the integration ends with ``LiveEpisode.end``."""
        episode = LiveEpisode(self.core, self.core.new_id())
        episode.start(task, None, runtime)
        return episode


__all__ = ["EpisodeHandle", "MarftRecorder"]
