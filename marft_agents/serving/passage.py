"""One request on its way through the gateway: what it holds, and what is known when it ends.

Invariant: whatever way a request ends, ``end`` runs once: its version, its replica and its ticket
are given back and every observer learns the outcome. An observer that fails is logged and breaks
no request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from marft_agents.serving.access import Client
from marft_agents.serving.admission import Ticket
from marft_agents.serving.aliases import Aliases, Route
from marft_agents.serving.replica import Replica

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request that reached a replica ended.

    ``status`` is the engine's, or that of the gateway's own refusal; ``None``: the client left
    before any. ``seconds`` until the last byte; ``first_s`` until the first byte of the reply's
    body. ``problem`` says why a reply is not whole; ``left``: because the client went away.
    Tokens are ``None`` where the engine did not count them.
    """

    route: Route
    replica: str
    client: str
    episode: str | None
    request_id: str | None
    streamed: bool
    status: int | None
    seconds: float
    first_s: float | None
    prompt_tokens: int | None
    completion_tokens: int | None
    problem: str | None
    left: bool = False

    @property
    def token_s(self) -> float | None:
        """Seconds per token after the first one of a stream."""
        if not self.streamed or self.first_s is None or (self.completion_tokens or 0) < 2:
            return None
        return (self.seconds - self.first_s) / (cast("int", self.completion_tokens) - 1)


Observer = Callable[[Outcome], None]


class Passage:
    """A request between its admission and its end."""

    def __init__(
        self,
        *,
        aliases: Aliases,
        route: Route,
        replica: Replica,
        ticket: Ticket,
        client: Client,
        episode: str | None,
        request_id: str | None,
        observers: Sequence[Observer],
    ) -> None:
        self.route = route
        self.replica = replica
        self.episode = episode
        self.streamed = False
        self.left = False
        self.status: int | None = None
        self.problem: str | None = None
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self._aliases = aliases
        self._ticket = ticket
        self._client = client
        self._request_id = request_id
        self._observers = observers
        self._began = time.monotonic()
        self._first: float | None = None
        self._ended = False
        aliases.begin(route, episode)
        replica.in_flight += 1

    def move(self, replica: Replica) -> None:
        """Another replica answers."""
        self.replica.in_flight -= 1
        self.replica = replica
        replica.in_flight += 1

    def saw(self, data: bytes) -> None:
        """Bytes of the reply, as the engine sent them."""
        if self._first is None and data:
            self._first = time.monotonic()

    def counted(self, prompt: int | None, completion: int | None) -> None:
        """Tokens, as the engine counts them; the last word counts."""
        self.prompt_tokens, self.completion_tokens = prompt, completion

    def end(self) -> None:
        """Give everything back; safe to call again."""
        if self._ended:
            return
        self._ended = True
        self._aliases.end(self.route, self.episode)
        self.replica.in_flight -= 1
        self._ticket.leave()
        outcome = self._outcome(time.monotonic())
        for observe in self._observers:
            try:
                observe(outcome)
            except Exception:
                _log.exception("an observer of requests failed")

    def _outcome(self, now: float) -> Outcome:
        return Outcome(
            route=self.route,
            replica=self.replica.name,
            client=self._client.name,
            episode=self.episode,
            request_id=self._request_id,
            streamed=self.streamed,
            status=self.status,
            seconds=now - self._began,
            first_s=None if self._first is None else self._first - self._began,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            problem=self.problem,
            left=self.left,
        )
