"""One recorded request on its way through the gateway.

Invariant: what fails here never fails the request. The engine is asked for token ids and
log-probabilities; of these the client sees what it asked for itself. A turn is handed to the
log before the client can act on its reply, and is on disk a moment later.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from contextlib import ExitStack

from marft_agents.recording import Call, LiveEpisode
from marft_agents.recording.exchange import Exchange
from marft_agents.schema import JsonDict, TurnKind
from marft_agents.serving.episodes import GatewayEpisode
from marft_agents.serving.rewrite import NOTHING

_DONE = re.compile(rb"(?:^|\n)data: ?\[DONE\]\s*$")
_MOST_CHOICES = 128


class HttpCall(Call):
    """A model call that begins with a request to the gateway and ends with its response.

    ``key`` tells the attempts of one call together; ``None``: the client never tries again.
    ``parent``: agent and turn on whose behalf a nested call is made.
    """

    def __init__(
        self,
        episode: LiveEpisode,
        agent: str,
        kind: TurnKind,
        key: Hashable | None,
        choices: int,
        parent: tuple[str | None, str | None] = (None, None),
    ) -> None:
        super().__init__(episode, agent, kind, parent_agent=parent[0], parent_turn=parent[1])
        self.key = key
        self.ids = {i: episode.core.new_id() for i in range(min(choices, _MOST_CHOICES))}
        """Turn ids, told to the client before the turns exist."""
        self._fresh = dict(self.ids)
        episode.open_calls.add(self)

    def new_turn_id(self, index: int) -> str:
        return self._fresh.pop(index, None) or super().new_turn_id(index)

    def abandon(self) -> None:
        """The episode ends while this call is under way, or waits to be tried again."""
        for exchange in self.exchanges:
            if not exchange.closed and not exchange.answered:
                exchange.error = exchange.error or "the episode ended before the reply"
        super().abandon()


class Watch:
    """Of a call that is not recorded: nothing happens."""

    hidden: frozenset[str] = NOTHING

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        self.headers = dict(headers or {})
        """For the client, beside the reply's own."""

    def outgoing(self, body: JsonDict) -> JsonDict:
        """The body to send to the engine."""
        return body

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """The answer begins."""

    def feed(self, data: bytes) -> None:
        """The engine has sent ``data``, which the client does not have yet."""

    def over(self, problem: str | None = None) -> None:
        """Nothing more will come, because of ``problem`` if the answer is not whole."""


class Recorded(Watch):
    """Of one attempt of a recorded call."""

    def __init__(self, episode: GatewayEpisode, call: HttpCall, exchange: Exchange) -> None:
        super().__init__(
            {"X-Marft-Episode": episode.id, "X-Marft-Turn": ",".join(call.ids.values())}
        )
        self._episode = episode
        self._call = call
        self._exchange = exchange
        self._safety = episode.core.safety
        self._open = ExitStack()
        call.sends(exchange)
        self._open.enter_context(episode.busy())

    def outgoing(self, body: JsonDict) -> JsonDict:
        """With the fields of token fidelity; where a reply would differ, they are hidden in it."""
        own: JsonDict = {}
        if not body.get("return_token_ids"):
            own["return_token_ids"] = True
        # Alternatives without log-probabilities are an error of the client, which it is to see.
        if not body.get("logprobs") and not body.get("top_logprobs"):
            own["logprobs"] = True
        self.hidden = frozenset(name.removeprefix("return_") for name in own)
        self._exchange.request_body = body | own
        return body | own

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        with self._safety.guard("record a reply"):
            self._exchange.begin(status, headers)

    def feed(self, data: bytes) -> None:
        if self._exchange.closed:
            return
        with self._safety.guard("read a reply"):
            self._exchange.feed(data)
            reply = self._exchange.reply
            if reply is not None and reply.streamed and reply.finished and _DONE.search(data):
                self.over()

    def over(self, problem: str | None = None) -> None:
        with self._open.pop_all(), self._safety.guard("record a call"):
            exchange, call = self._exchange, self._call
            if not exchange.closed:
                whole = exchange.reply is not None and exchange.reply.finished
                if problem is not None and not whole:
                    exchange.error = exchange.error or problem
                exchange.close()
            again = call.key is not None and not exchange.answered and exchange.may_be_retried
            if again and not call.finished:
                self._episode.hold(call.key, call)
            else:
                call.finish()
