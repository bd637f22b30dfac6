"""A turn that is over and not yet put together.

Invariant: a draft holds what was true when the call ended: bytes as sent and received, times, ids.
Making the turn of it parses, checks and links; that is for the log's thread, and gives the same
whenever it is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from marft_agents.recording.missing import say_if_ids_are_missing
from marft_agents.recording.reply import Choice, Reply
from marft_agents.recording.sampling import announced_logits, announced_mode, sampling_in_effect
from marft_agents.schema import Turn

if TYPE_CHECKING:
    from marft_agents.recording.call import Call
    from marft_agents.recording.exchange import Exchange

_SMALL = 1024


@dataclass(eq=False, slots=True)
class TurnDraft:
    """One turn of ``call``: choice ``index`` of ``exchange``, ``None`` where it gave none.

    ``started``: of the first of ``attempts``; ``problem``: what the call raised in the app.
    """

    call: Call
    exchange: Exchange
    index: int | None
    turn_id: str
    time: datetime
    started: float
    attempts: int
    problem: str | None
    place: int = 0
    """The turn's index in its episode."""

    @property
    def episode_id(self) -> str:
        return self.call.episode.id

    @property
    def size(self) -> int:
        """Bytes that it holds, roughly."""
        return _SMALL + self.exchange.size

    def event(self) -> Turn:
        """What is to be logged; asked once."""
        return self.call.episode.put_together(self)

    def turn(self) -> Turn:
        """The turn as the wire has it."""
        call, exchange = self.call, self.exchange
        call.episode.ledger.catch_up()
        given = exchange.choice(self.index) if self.index is not None else None
        choice, reply = given or Choice(), exchange.reply
        problem = exchange.error or self.problem
        turn = Turn(
            time=self.time,
            **call.identity(self.turn_id, exchange.messages, exchange.links),
            **_answer(exchange, reply, choice),
            index=self.place,
            latency_s=round(exchange.ended - self.started, 6),
            attempt=self.attempts,
            complete=reply.complete(choice) if reply else not exchange.streaming,
            error=problem,
        )
        if given is not None and problem is None and exchange.succeeded:
            say_if_ids_are_missing(exchange)
        return turn


def _answer(exchange: Exchange, reply: Reply | None, choice: Choice) -> dict[str, Any]:
    """The fields of a turn that come from the wire."""
    header = exchange.response_header
    adapter, mode = header("x-marft-adapter"), header("x-marft-logprobs-mode")
    plain = choice.finish_reason == "stop" and not choice.tool_calls
    return {
        "text": choice.text,
        "reasoning": choice.reasoning,
        "tool_calls": choice.tool_calls,
        "finish_reason": choice.finish_reason,
        "token_ids": choice.token_ids,
        "logprobs": None if announced_logits(mode) else choice.logprobs,
        "choice_index": choice.index,
        "prompt_token_ids": reply.prompt_token_ids if reply else None,
        "response_id": reply.response_id if reply else None,
        "adapter_start": adapter or (reply.first_model if reply else None),
        "adapter_end": adapter or (reply.last_model if reply else None),
        "logprob_mode": announced_mode(mode),
        "sampling": sampling_in_effect(
            exchange.request_body, header("x-marft-sampling-defaults"), plain_answer=plain
        ),
        "model": exchange.asked_model,
    }
