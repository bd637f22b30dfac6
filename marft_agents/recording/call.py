"""One model call by one agent, from the first HTTP attempt to the turns it becomes.

Invariant: a call becomes at least one turn, exactly once. Retries of the SDK are attempts of one
turn; ``n`` choices are ``n`` turns. What the prompt contained is decided when it is sent.
"""

from __future__ import annotations

import time
import uuid
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from marft_agents.recording.clean import jsonable, stored_messages
from marft_agents.recording.drafts import TurnDraft
from marft_agents.recording.episode import LiveEpisode, describe_error
from marft_agents.recording.linking import Links
from marft_agents.schema import JsonDict, Turn, TurnKind

if TYPE_CHECKING:
    from marft_agents.recording.exchange import Exchange

CALL: ContextVar[Call | None] = ContextVar("marft_call", default=None)
TAG = "marft:"
_tagged: weakref.WeakValueDictionary[str, Call] = weakref.WeakValueDictionary()


def tagged_call(user: object) -> Call | None:
    """The call whose ``Call.tag`` is the ``user`` field of a request."""
    return _tagged.get(user) if isinstance(user, str) and user.startswith(TAG) else None


@dataclass(frozen=True, slots=True)
class Unseen:
    """What a runtime knows of a call that made no HTTP request: a cached or foreign reply."""

    messages: Sequence[JsonDict]
    text: str | None = None
    tool_calls: list[JsonDict] | None = None
    cached: bool = False


class _Current:
    """A call as the current one; a class, because every piece of a stream passes one."""

    __slots__ = ("_call", "_token")

    def __init__(self, call: Call) -> None:
        self._call = call

    def __enter__(self) -> None:
        self._token: Token[Call | None] = CALL.set(self._call)

    def __exit__(self, *_: object) -> None:
        CALL.reset(self._token)


class Call:
    """Identity of a call (agent, kind, episode) plus the exchanges made for it.

    ``delivered``: (text, turn id) of framework messages that were handed to the agent.
    """

    def __init__(
        self,
        episode: LiveEpisode,
        agent: str,
        kind: TurnKind = "act",
        *,
        selected_by: str | None = None,
        delivered: Sequence[tuple[str, str]] = (),
        parent_agent: str | None = None,
        parent_turn: str | None = None,
    ) -> None:
        self.episode = episode
        self.agent = agent
        self.kind: TurnKind = kind
        self.exchanges: list[Exchange] = []
        """Its attempts, until it is over: they and the call hold each other."""
        self.sent = False
        """Whether there was one."""
        self.turn_ids: list[str] = []
        self.finished = False
        self._selected_by = selected_by
        self._parent = (parent_agent, parent_turn)
        self._delivered = delivered
        self._step = episode.begin_turn()
        self._started = time.perf_counter()
        self._tag: str | None = None

    @property
    def tag(self) -> str:
        """A request with this as its ``user`` field belongs to this call, wherever it is sent.

        For runtimes that send outside the context of the call; the field is taken out again.
        """
        if self._tag is None:
            self._tag = TAG + uuid.uuid4().hex
            _tagged[self._tag] = self
        return self._tag

    def current(self) -> AbstractContextManager[None]:
        """HTTP requests made inside, in this context, belong to this call.

        May be entered again when it was left.
        """
        return _Current(self)

    def sends(self, exchange: Exchange) -> None:
        """An attempt goes out; what its prompt contains is decided now."""
        before = self.exchanges[-1] if self.exchanges else None
        self.exchanges.append(exchange)
        self.sent = True
        self.episode.ledger.later(self._link, exchange, before)

    def _link(self, exchange: Exchange, before: Exchange | None) -> None:
        if before is not None and before.messages == exchange.messages:  # tried again
            exchange.links = before.links
        else:
            exchange.links = self.episode.ledger.found(exchange.messages, self._delivered)

    def register(self, exchange: Exchange, index: int) -> str:
        """Let later prompts be linked to this choice; returns its turn id."""
        turn_id = exchange.turn_ids.get(index)
        if turn_id is None:
            turn_id = exchange.turn_ids[index] = self.new_turn_id(index)
            self.episode.ledger.later(self._enter_choice, exchange, index, turn_id)
        return turn_id

    def _enter_choice(self, exchange: Exchange, index: int, turn_id: str) -> None:
        choice = exchange.choice(index)
        if choice is not None:
            self._enter(turn_id, choice.text, choice.tool_calls)

    def _enter(self, turn_id: str, text: str | None, tool_calls: list[JsonDict] | None) -> None:
        ids = [c["id"] for c in tool_calls or () if isinstance(c.get("id"), str)]
        quotable = self.kind != "select"
        self.episode.ledger.note(turn_id, self.agent, text, filter(None, ids), quotable)

    def new_turn_id(self, index: int) -> str:
        """An id for what choice ``index`` becomes."""
        return self.episode.core.new_id()

    def finish(self, error: BaseException | None = None, unseen: Unseen | None = None) -> None:
        """The call is over: log its turns. Later calls of this do nothing."""
        with self.episode.lock:
            if self.finished:
                return
            self.finished = True
        self.episode.open_calls.discard(self)
        if not self.exchanges:
            self._log_unseen(error, unseen)
            return
        attempts: list[Exchange] = []
        for exchange in list(self.exchanges):
            attempts.append(exchange)
            last = exchange is self.exchanges[-1]
            if last or exchange.answered:
                exchange.close()
                self._log_exchange(attempts, error if last else None)
                attempts = []
        self.exchanges.clear()

    def over(self, exchange: Exchange) -> None:
        """The app is through with an attempt's response; whoever made the call finishes it."""

    def abandon(self) -> None:
        """The episode is over and nobody will finish this call."""
        with self.episode.core.safety.guard("record an unfinished call"):
            self.finish()

    def _log_exchange(self, attempts: Sequence[Exchange], error: BaseException | None) -> None:
        """Log the turns of the last of ``attempts``, the one that counted."""
        exchange = attempts[-1]
        problem = describe_error(error) if error else None
        for index, turn_id in list(exchange.turn_ids.items()) or [(None, self.new_turn_id(0))]:
            self.turn_ids.append(turn_id)
            self.episode.add_draft(
                TurnDraft(
                    self,
                    exchange,
                    index,
                    turn_id,
                    time=self.episode.core.clock(),
                    started=attempts[0].started,
                    attempts=len(attempts),
                    problem=problem,
                )
            )

    def _log_unseen(self, error: BaseException | None, unseen: Unseen | None) -> None:
        unseen = unseen or Unseen(messages=())
        messages = stored_messages(jsonable(unseen.messages))
        turn_id = self.new_turn_id(0)
        with self.episode.ledger.reading:  # before its own text is known
            self.episode.ledger.catch_up()
            links = self.episode.ledger.found(messages, self._delivered)
            self._enter(turn_id, unseen.text, unseen.tool_calls)
        self.turn_ids.append(turn_id)
        self.episode.add_turn(
            Turn(
                time=self.episode.core.clock(),
                **self.identity(turn_id, messages, links),
                text=jsonable(unseen.text),
                tool_calls=jsonable(unseen.tool_calls),
                latency_s=round(time.perf_counter() - self._started, 6),
                cached=unseen.cached,
                error=describe_error(error) if error else None,
            )
        )

    def identity(self, turn_id: str, messages: list[JsonDict], links: Links) -> dict[str, Any]:
        """The fields of a turn that say whose it is and what it saw."""
        return {
            "episode_id": self.episode.id,
            "turn_id": turn_id,
            "agent": self.agent,
            "kind": self.kind,
            "step": self._step,
            "messages": messages,
            "depends_on": links.turn_ids,
            "depends_on_complete": links.complete,
            "selected_by": self._selected_by,
            "parent_agent": self._parent[0],
            "parent_turn": self._parent[1],
        }
