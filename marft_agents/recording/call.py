"""One model call by one agent, from the first HTTP attempt to the turns it becomes.

Invariant: a call becomes at least one turn, exactly once. Retries of the SDK are attempts of one
turn; ``n`` choices are ``n`` turns. What the prompt contained is decided when it is sent.
"""

from __future__ import annotations

import time
import uuid
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from marft_agents.recording.clean import jsonable, stored_messages
from marft_agents.recording.episode import LiveEpisode, describe_error
from marft_agents.recording.reply import Choice
from marft_agents.recording.sampling import announced_defaults, announced_mode, sampling_of
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
        self.turn_ids: list[str] = []
        self.finished = False
        self._selected_by = selected_by
        self._parent = (parent_agent, parent_turn)
        self._delivered = delivered
        self._step = episode.begin_turn()
        self._started = time.perf_counter()
        self._depends_on: list[str] | None = None
        self._reserved: dict[int, str] = {}
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

    @contextmanager
    def current(self) -> Generator[None]:
        """HTTP requests made inside, in this context, belong to this call."""
        token = CALL.set(self)
        try:
            yield
        finally:
            CALL.reset(token)

    def sends(self, exchange: Exchange) -> None:
        """An attempt goes out; the first one fixes what the prompt depends on."""
        self.exchanges.append(exchange)
        self._see(exchange.messages)

    def _see(self, messages: Sequence[JsonDict]) -> list[str]:
        if self._depends_on is None:
            with self.episode.lock:
                self._depends_on = self.episode.ledger.link(messages, self._delivered)
        return self._depends_on

    def register(self, choice: Choice) -> str:
        """Let later prompts be linked to this choice; returns its turn id."""
        if choice.index not in self._reserved:
            turn_id = self._reserved[choice.index] = self.new_turn_id(choice.index)
            ids = [c["id"] for c in choice.tool_calls or () if isinstance(c.get("id"), str)]
            with self.episode.lock:
                self.episode.ledger.add(
                    turn_id,
                    self.agent,
                    choice.text,
                    call_ids=filter(None, ids),
                    quotable=self.kind != "select",
                )
        return self._reserved[choice.index]

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
        attempt = 0
        for exchange in self.exchanges:
            attempt += 1
            last = exchange is self.exchanges[-1]
            if not (last or exchange.answered):
                continue
            exchange.close()
            self._log_exchange(exchange, attempt, error if last else None)
            attempt = 0

    def over(self, exchange: Exchange) -> None:
        """The app is through with an attempt's response; whoever made the call finishes it."""

    def abandon(self) -> None:
        """The episode is over and nobody will finish this call."""
        with self.episode.core.safety.guard("record an unfinished call"):
            self.finish()

    def _log_exchange(self, exchange: Exchange, attempt: int, error: BaseException | None) -> None:
        reply = exchange.reply
        choices = list(reply.choices.values()) if reply else []
        problem = exchange.error or (describe_error(error) if error else None)
        for choice in choices or [Choice()]:
            turn_id = self.register(choice) if choices else self.new_turn_id(0)
            complete = reply.complete(choice) if reply else not exchange.streaming
            self._log(
                Turn(
                    **self._identity(turn_id, exchange.messages),
                    **_answer(exchange, choice),
                    latency_s=round(exchange.ended - self._started, 6),
                    attempt=attempt,
                    complete=complete,
                    error=problem,
                )
            )
        self._reserved = {}
        if choices and problem is None and exchange.succeeded:
            exchange.say_if_ids_are_missing()

    def _log_unseen(self, error: BaseException | None, unseen: Unseen | None) -> None:
        unseen = unseen or Unseen(messages=())
        messages = stored_messages(jsonable(unseen.messages))
        self._see(messages)  # before its own text is known
        turn_id = self.register(Choice(text=unseen.text, tool_calls=unseen.tool_calls))
        self._log(
            Turn(
                **self._identity(turn_id, messages),
                text=jsonable(unseen.text),
                tool_calls=jsonable(unseen.tool_calls),
                latency_s=round(time.perf_counter() - self._started, 6),
                cached=unseen.cached,
                error=describe_error(error) if error else None,
            )
        )

    def _identity(self, turn_id: str, messages: list[JsonDict]) -> dict[str, Any]:
        return {
            "time": self.episode.core.clock(),
            "episode_id": self.episode.id,
            "turn_id": turn_id,
            "agent": self.agent,
            "kind": self.kind,
            "step": self._step,
            "messages": messages,
            "depends_on": [t for t in self._see(messages) if t != turn_id],
            "selected_by": self._selected_by,
            "parent_agent": self._parent[0],
            "parent_turn": self._parent[1],
        }

    def _log(self, turn: Turn) -> None:
        self.turn_ids.append(turn.turn_id)
        self.episode.add_turn(turn)


def _answer(exchange: Exchange, choice: Choice) -> dict[str, Any]:
    """The fields of a turn that come from the wire."""
    reply = exchange.reply
    adapter = exchange.response_header("x-marft-adapter")
    defaults = announced_defaults(exchange.response_header("x-marft-sampling-defaults"))
    return {
        "text": choice.text,
        "tool_calls": jsonable(choice.tool_calls),
        "finish_reason": choice.finish_reason,
        "token_ids": choice.token_ids,
        "logprobs": choice.logprobs,
        "choice_index": choice.index,
        "prompt_token_ids": reply.prompt_token_ids if reply else None,
        "response_id": reply.response_id if reply else None,
        "adapter_start": adapter or (reply.first_model if reply else None),
        "adapter_end": adapter or (reply.last_model if reply else None),
        "logprob_mode": announced_mode(exchange.response_header("x-marft-logprobs-mode")),
        "sampling": sampling_of(exchange.request_body, defaults),
        "model": exchange.asked_model,
    }
