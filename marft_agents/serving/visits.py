"""One HTTP request from its first byte to its last, under one id.

Invariant: every answer bears an ``X-Request-Id``, errors included, and no two requests of the
recent past bear the same one: a client's own is taken where it is well-formed and new, else another
is made. The engine gets the same id, so its response id, the recorded turn and the log agree.
Whoever observes a visit breaks none.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from marft_agents.serving.passage import Outcome
from marft_agents.serving.scope import VISIT

_log = logging.getLogger(__name__)
_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")
_HEADER = b"x-request-id"
_MOST_GIVEN = 20_000
_LATELY_S = 600.0
_AHEAD = 64


@dataclass(slots=True)
class Visit:
    """A request: ``asked_id`` is what the client called it, where that was not taken.

    ``client`` is the name of its key, once that is known. ``outcome`` is what a replica made of it.
    """

    id: str
    asked_id: str | None
    method: str
    path: str
    peer: str | None
    began: float
    client: str | None = None
    status: int | None = None
    episode: str | None = None
    turns: str | None = None
    seconds: float = 0.0
    outcome: Outcome | None = None
    problem: str | None = None

    @property
    def refused(self) -> bool:
        """Whether this server turned it away, and no replica was asked."""
        return self.outcome is None and self.status is not None and self.status >= 400


VisitObserver = Callable[[Visit], None]


class RequestIds:
    """Which ids were given lately."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._given: OrderedDict[bytes, float] = OrderedDict()

    def take(self, asked: bytes | None) -> bytes:
        """``asked`` where it can be had, else a new id."""
        if asked is None or not _ID.fullmatch(asked):
            return _new_id()
        given, now = self._given, self._now()
        while given and (len(given) >= _MOST_GIVEN or next(iter(given.values())) < now - _LATELY_S):
            given.popitem(last=False)
        if asked in given:
            return _new_id()
        given[asked] = now
        return asked


class _NewIds:
    """Random ids; asking the system for each alone takes longer than the rest of making it."""

    def __init__(self) -> None:
        self._ahead: list[str] = []

    def __call__(self) -> bytes:
        if not self._ahead:
            digits = os.urandom(16 * _AHEAD).hex()
            self._ahead = [digits[i : i + 32] for i in range(0, len(digits), 32)]
        return self._ahead.pop().encode()


_new_id = _NewIds()


class Visits:
    """Around the whole application; ``observers`` learn of every request that has ended."""

    def __init__(
        self, observers: Sequence[VisitObserver] = (), *, ids: RequestIds | None = None
    ) -> None:
        self.observers = list(observers)
        self._ids = ids or RequestIds()
        self._open: dict[str, Visit] = {}

    def outcome(self, outcome: Outcome) -> None:
        """What a replica made of a request; an observer of the gateway."""
        visit = self._open.get(outcome.request_id or "")
        if visit is not None:
            visit.outcome = outcome

    def around(self, app: ASGIApp) -> ASGIApp:
        """The application, observed."""

        async def observed(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            await self._visit(app, scope, receive, send)

        return observed

    async def _visit(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        asked, headers = _without_id(scope["headers"])
        taken = self._ids.take(asked)
        scope = {**scope, "headers": [*headers, (_HEADER, taken)]}
        visit = scope[VISIT] = _visit_of(scope, taken, asked)
        self._open[visit.id] = visit

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                _begin(visit, message, taken)
            await send(message)

        try:
            await app(scope, receive, sending)
        except BaseException as error:
            visit.problem = visit.problem or type(error).__name__
            raise
        finally:
            self._open.pop(visit.id, None)
            self._end(visit)

    def _end(self, visit: Visit) -> None:
        visit.seconds = time.monotonic() - visit.began
        for observe in self.observers:
            try:
                observe(visit)
            except Exception:
                _log.exception("an observer of visits failed")


def _visit_of(scope: Scope, taken: bytes, asked: bytes | None) -> Visit:
    client = scope.get("client")
    return Visit(
        id=taken.decode(),
        asked_id=None if asked is None or asked == taken else asked.decode("latin-1"),
        method=scope["method"],
        path=scope["path"],
        peer=None if client is None else client[0],
        began=time.monotonic(),
    )


def _without_id(
    headers: list[tuple[bytes, bytes]],
) -> tuple[bytes | None, list[tuple[bytes, bytes]]]:
    asked = [value for name, value in headers if name == _HEADER]
    rest = [pair for pair in headers if pair[0] != _HEADER] if asked else headers
    return (asked[0] if len(asked) == 1 else None), rest


def _begin(visit: Visit, message: Message, taken: bytes) -> None:
    visit.status = message["status"]
    kept: list[tuple[bytes, bytes]] = []
    for name, value in message.get("headers", ()):
        if name == b"x-marft-turn":
            visit.turns = value.decode("latin-1")
        elif name == b"x-marft-episode":
            visit.episode = value.decode("latin-1")
        if name != _HEADER:
            kept.append((name, value))
    message["headers"] = [*kept, (_HEADER, taken)]
