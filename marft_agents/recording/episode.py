"""One running episode: who asks what in which order, and which turn saw which.

Invariant: an event's place in the order (turn ``index``, ``step``) is decided under the episode's
lock, where it is also handed to the log. An episode ends once, in the process where it began; calls
that begin later are not its own. The current episodes are a contextvar, so tasks and threads that
inherit the context share them and others do not. However long an episode lasts, what is held of it
is bounded (``newest``).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, cast, get_args

from marft_agents.recording.clean import as_text, jsonable, without_secrets
from marft_agents.recording.core import Core
from marft_agents.recording.defaults import filled
from marft_agents.recording.linking import Ledger
from marft_agents.recording.newest import MOST_NAMES, MOST_TURNS, Newest
from marft_agents.recording.payloads import without_payloads
from marft_agents.recording.reviews import give_edit, give_reward
from marft_agents.schema import (
    EndReason,
    EpisodeEnded,
    EpisodeStarted,
    HumanEvent,
    JsonDict,
    ToolEvent,
    Turn,
)

if TYPE_CHECKING:
    from marft_agents.recording.call import Call
    from marft_agents.recording.drafts import TurnDraft

_EPISODES: ContextVar[tuple[LiveEpisode, ...]] = ContextVar("marft_episodes", default=())


def _mapping(metadata: Any) -> JsonDict:
    """Metadata of any kind as a mapping; an app that passes a bare value keeps it."""
    plain = jsonable(metadata)
    if isinstance(plain, dict):
        return cast("JsonDict", plain)
    return {} if plain is None else {"value": plain}


class LiveEpisode:
    """State of an episode between its two border events."""

    def __init__(self, core: Core, episode_id: str, parent_id: str | None = None) -> None:
        self.core = core
        self.id = episode_id
        self.parent_id = parent_id
        self.closed = False
        self.has_inner = False
        """Whether an episode began inside this one."""
        self._process = os.getpid()
        self.lock = threading.RLock()
        _alive.add(self)
        self.ledger = Ledger()
        self.messages: Newest[str, str] = Newest(MOST_NAMES)
        """Turn id behind each framework message id."""
        self.open_calls: set[Call] = set()
        """Calls that nobody but the HTTP layer can finish."""
        self._turns: Newest[str, str] = Newest(MOST_TURNS)
        """Who spoke each turn."""
        self._count = 0
        """Turns that there ever were: the next one's index."""
        self._replies: Newest[tuple[str, int], int] = Newest(MOST_NAMES)
        """What was said under each response id and choice."""
        self._step = 0
        self._answered = False
        self._seen: Newest[str, None] = Newest(MOST_NAMES)
        self._cut: tuple[EndReason, str | None] | None = None
        """The first truncated run's end."""
        self._last_detail: str | None = None
        self._decided: tuple[EndReason, str | None] | None = None

    def start(self, task: Any, metadata: Mapping[str, Any] | None, runtime: str | None) -> None:
        given = _mapping(metadata)
        if self.parent_id is None:
            task, given = filled(self.core, self.id, task, given)
        self.core.emit(
            EpisodeStarted(
                time=self.core.clock(),
                episode_id=self.id,
                task=without_payloads(without_secrets(jsonable(task))),
                metadata=without_payloads(without_secrets(given)),
                runtime=runtime,
                parent_id=self.parent_id,
            )
        )

    def begin_turn(self) -> int:
        """The step of a turn that begins now: a new one if the environment has answered."""
        with self.lock:
            if self._answered:
                self._step += 1
                self._answered = False
            return self._step

    def add_turn(self, turn: Turn) -> None:
        """Give a finished turn its index and log it."""
        with self.lock:
            place = self._place(turn.turn_id, turn.agent)
            self.core.emit(turn.model_copy(update={"index": place, **self._once_more(turn)}))

    def add_draft(self, draft: TurnDraft) -> None:
        """Give a finished turn its index; it is put together and logged on the log's thread."""
        with self.lock:
            draft.place = self._place(draft.turn_id, draft.call.agent)
            self.core.emit(draft)

    def put_together(self, draft: TurnDraft) -> Turn:
        """The turn of a draft; asked once for each, in their order."""
        turn = draft.turn()
        with self.lock:
            changes = self._once_more(turn)
        return turn.model_copy(update=changes) if changes else turn

    def _place(self, turn_id: str, agent: str) -> int:
        """The index of a turn that is over now."""
        place, self._count = self._count, self._count + 1
        self._turns[turn_id] = agent
        return place

    def _once_more(self, turn: Turn) -> JsonDict:
        """What to change in a turn whose response id was there before.

        Readers take equal ids for copies of one record. The same reply again comes from a cache
        between here and the server; another reply is a client's or server's id used twice.
        """
        if turn.response_id is None:
            return {}
        reply = turn.response_id, turn.choice_index
        own = {"response_id": f"{turn.response_id}#{turn.turn_id}"}
        said = hash((turn.text, tuple(turn.token_ids or ()), repr(turn.tool_calls)))
        before = self._replies.get(reply)
        if before is None:
            self._replies[reply] = said
            # One of the ids that are no longer held could be the same, and lose this turn.
            return own if self._replies.let_go else {}
        return {**own, "cached": turn.cached or before == said}

    def turn_ids(self, agent: str | None = None) -> tuple[str, ...]:
        """Ids of the newest ``MOST_TURNS`` turns (of one agent), in order of completion."""
        with self.lock:
            return tuple(t for t, name in self._turns.items() if agent in (None, name))

    def knows(self, turn_id: str) -> bool | None:
        """Whether a turn is of this episode; ``None`` where it may be one that is let go."""
        with self.lock:
            return turn_id in self._turns or (None if self._turns.let_go else False)

    def first_time(self, key: str) -> bool:
        """Whether ``key`` (an event of the runtime) was not seen in this episode before."""
        with self.lock:
            new = key not in self._seen
            self._seen[key] = None
            return new

    def tool(
        self,
        name: str,
        *,
        agent: str | None = None,
        call_id: str | None = None,
        arguments: Any = None,
        result: Any = None,
        ok: bool = True,
        environment: bool = True,
    ) -> None:
        """A tool or code execution. ``environment`` False: an agent or a handoff behind a tool."""
        with self.lock:
            self._answered = self._answered or environment
            event = ToolEvent(
                time=self.core.clock(),
                episode_id=self.id,
                agent=agent,
                name=name,
                call_id=call_id,
                arguments=without_payloads(jsonable(arguments)),
                result=without_payloads(jsonable(result)),
                ok=ok,
                index=self._count,
            )
            self.core.emit(event)

    def human(self, name: str | None, text: str | None) -> None:
        """A human spoke."""
        with self.lock:
            self._answered = True
            event = HumanEvent(
                time=self.core.clock(),
                episode_id=self.id,
                name=name,
                text=text,
                index=self._count,
            )
            self.core.emit(event)

    def edit(self, turn_id: str, text: str, editor: str | None = None) -> None:
        """Somebody put ``text`` in place of what a turn said."""
        give_edit(self.core, self.id, turn_id, text, editor)
        with self.lock:
            self.ledger.add(turn_id, self._turns.get(turn_id, ""), as_text(text))

    def reward(self, value: Any, agent: str | None, turn_id: str | None, source: str) -> None:
        give_reward(self.core, self.id, value, agent=agent, turn_id=turn_id, source=source)

    def report(self, reason: EndReason, detail: str | None) -> None:
        """A run inside this episode has ended so."""
        if reason == "truncated" and self._cut is None:
            self._cut = reason, detail
        self._last_detail = detail or self._last_detail

    def decide(self, reason: EndReason, detail: str | None) -> None:
        """The app says how the episode ends, whatever the runtime reports."""
        if reason not in get_args(EndReason):
            known = ", ".join(get_args(EndReason))
            problem = ValueError(f"an episode ends as one of {known}, not {reason!r}")
            self.core.safety.failed("read how an episode ends; the runtime's word stands", problem)
            return
        self._decided = (reason, None if detail is None else as_text(detail))

    def end(self, error: BaseException | None = None) -> None:
        """Finish open calls and log the end: the app's word, else the error, else the runs'."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
        for call in list(self.open_calls):
            call.abandon()
        if os.getpid() != self._process:
            return  # a forked copy of the app; the episode ends where it began
        reason, detail = self._decided or self._ending(error)
        self.core.emit(
            EpisodeEnded(time=self.core.clock(), episode_id=self.id, reason=reason, detail=detail)
        )

    def say_if_nothing_was_recorded(self) -> None:
        """An episode without a call is no use to anybody; most often a ``wrap`` was forgotten."""
        core = self.core
        if self._count or self.has_inner or core.closed or not core.enabled:
            return
        if core.safety.spoke or os.getpid() != self._process:
            return  # the reason was given, or so much is wrong that this is not the news
        cure = (
            "nothing was wrapped: pass the team or the agent that runs to recorder.wrap(...), or"
            " the openai client to recorder.attach_client(client, agent=...)"
        )
        if core.attached:
            cure = (
                "what ran there is not what was wrapped (a new team? a copy?), or ran in a thread"
                " of your own (use `with episode.active():` there), or asked no model"
            )
        core.safety.warn_once(
            "no call", f"marft-agents recorded no model call in episode {self.id[:80]!r}; {cure}"
        )

    def _ending(self, error: BaseException | None) -> tuple[EndReason, str | None]:
        if error is not None:
            return "failed", describe_error(error)
        return self._cut or ("terminated", self._last_detail)

    def active(self) -> AbstractContextManager[None]:
        """Make this the current episode of its recorder in this thread or task."""
        return _Active(self)

    def where_it_is_not(self) -> AbstractContextManager[None]:
        """``active`` where this is not the current episode; may be entered time after time."""
        return _ActiveAgain(self)


class _Active:
    """An episode as the current one; a class, because integrations enter it at every step."""

    __slots__ = ("_episode", "_token")

    def __init__(self, episode: LiveEpisode) -> None:
        self._episode = episode

    def __enter__(self) -> None:
        self._token: Token[tuple[LiveEpisode, ...]] = _EPISODES.set(
            (*_EPISODES.get(), self._episode)
        )

    def __exit__(self, *_: object) -> None:
        try:
            _EPISODES.reset(self._token)
        except ValueError:
            """Left in another context, where ``closed`` keeps the episode from being current."""


class _ActiveAgain:
    """An episode as the current one, for each piece of a stream.

    What a context holds is a tuple that never changes, so what was found for one holds for as long
    as the context holds the same: an episode that has ended since is current nowhere anyway.
    """

    __slots__ = ("_episode", "_held", "_token", "_with_it")

    def __init__(self, episode: LiveEpisode) -> None:
        self._episode = episode
        self._held: tuple[LiveEpisode, ...] | None = None
        self._with_it: tuple[LiveEpisode, ...] | None = None
        self._token: Token[tuple[LiveEpisode, ...]] | None = None

    def __enter__(self) -> None:
        held = _EPISODES.get()
        if held is not self._held:
            self._held, episode = held, self._episode
            current = episode.closed or current_episode(episode.core) is episode
            self._with_it = None if current else (*held, episode)
        if self._with_it is not None:
            self._token = _EPISODES.set(self._with_it)

    def __exit__(self, *_: object) -> None:
        token, self._token = self._token, None
        if token is not None:
            with suppress(ValueError):  # left in another context, as above
                _EPISODES.reset(token)


_alive: weakref.WeakSet[LiveEpisode] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for episode in list(_alive):
        episode.lock = threading.RLock()  # the one that held it may not exist here
        episode.ledger.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


def current_episode(core: Core) -> LiveEpisode | None:
    """The innermost open episode of this recorder in the current context."""
    for episode in reversed(_EPISODES.get()):
        if episode.core is core and not episode.closed:
            return episode
    return None


def describe_error(error: BaseException) -> str:
    """``ValueError: what was wrong``, in at most 500 characters."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:  # the app's own exceptions may fail at this
        return name
    return (f"{name}: {text}" if text else name)[:500]
