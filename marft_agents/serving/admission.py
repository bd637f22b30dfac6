"""How many requests are let in at once, and how much of them is kept in memory.

Invariant: at most ``max_in_flight`` requests are under way and ``max_waiting`` wait, none longer
than ``max_wait_s``; their bodies hold at most ``max_bytes``. What is beyond is refused at once and
told when to come again. A free place goes to the client that has fewest; no client's requests keep
another's from the line. A ticket gives back what it holds once, however its request ends.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

from marft_agents.serving.keys import Client
from marft_agents.serving.refusals import Refusal

MAX_IN_FLIGHT = 256
"""A replica; about what an engine runs at once, the rest of it would wait there."""
MAX_BYTES = 512 * 1024 * 1024
MAX_WAIT_S = 5.0
_LONGEST_RETRY_S = 60
_RECENT = 64


class Ticket:
    """One request, from its arrival to its end."""

    def __init__(self, admission: Admission, client: Client) -> None:
        self.client = client
        self._admission = admission
        self._bytes = 0
        self._entered = False

    def spend(self, size: int) -> None:
        """Keep ``size`` more bytes of the request in memory.

        Raises:
            Refusal: 429 when all requests together would hold too much.
        """
        self._admission.keep(size)
        self._bytes += size

    def enter_at_once(self) -> bool:
        """Take a place among the requests under way, if one is free; whether it was.

        Raises:
            Refusal: 429 when the client has all the places it may have.
        """
        self._entered = self._entered or self._admission.take_free(self.client)
        return self._entered

    async def enter(self) -> None:
        """Take a place, perhaps after a wait.

        Raises:
            Refusal: 429 with ``Retry-After`` when there is none, or not in time.
        """
        if not self.enter_at_once():
            await self._admission.take(self.client)
            self._entered = True

    def leave(self) -> None:
        """It has ended; safe to call again."""
        self._admission.free(self._bytes)
        self._bytes = 0
        if self._entered:
            self._entered = False
            self._admission.give_back(self.client)


class Admission:
    """The limits of one gateway.

    Attributes:
        in_flight: requests under way.
        kept_bytes: what bodies of requests hold in memory.
        refused: how many were turned away since the start.
    """

    def __init__(
        self,
        max_in_flight: int = MAX_IN_FLIGHT,
        *,
        max_waiting: int | None = None,
        max_wait_s: float = MAX_WAIT_S,
        max_bytes: int = MAX_BYTES,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_in_flight = max_in_flight
        self.max_waiting = max(1, max_in_flight // 4) if max_waiting is None else max_waiting
        self.max_wait_s = max_wait_s
        self.max_bytes = max_bytes
        self.in_flight = 0
        self.kept_bytes = 0
        self.refused = 0
        self._now = now
        self._running: dict[str, int] = {}
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}
        self._ends: deque[float] = deque(maxlen=_RECENT)

    @property
    def waiting(self) -> int:
        """Requests in the line."""
        return sum(len(line) for line in self._lines.values())

    def arrive(self, client: Client) -> Ticket:
        """A request whose body is still to be read."""
        return Ticket(self, client)

    # -- of tickets ------------------------------------------------------------------------

    def keep(self, size: int) -> None:
        """Count bytes that are about to be kept."""
        if self.kept_bytes + size > self.max_bytes:
            raise self._refusal("the bodies of the requests under way fill this server's memory")
        self.kept_bytes += size

    def free(self, size: int) -> None:
        """Count bytes that are kept no longer."""
        self.kept_bytes -= size

    def take_free(self, client: Client) -> bool:
        """Take a place for ``client`` if one is free and nobody waits for it."""
        name, most = client.name, client.max_in_flight
        if most is not None and self._has(name) >= most:
            raise self._refusal(
                f"the key {name!r} has as many requests under way as it may: {most}"
            )
        if self.in_flight >= self.max_in_flight or self._lines:
            return False
        self._let_in(name)
        return True

    async def take(self, client: Client) -> None:
        """Wait in the line for a place for ``client``."""
        name = client.name
        place = asyncio.get_running_loop().create_future()
        self._line_up(name, place)
        try:
            async with asyncio.timeout(self.max_wait_s):
                await place
        except BaseException as error:
            self._stand_back(name, place)
            if isinstance(error, TimeoutError):
                raise self._full() from None
            raise

    def give_back(self, client: Client) -> None:
        """A place of ``client`` is free again; the next in line has it."""
        self._ends.append(self._now())
        self._let_out(client.name)

    # -- inside ----------------------------------------------------------------------------

    def _has(self, name: str) -> int:
        return self._running.get(name, 0) + len(self._lines.get(name, ()))

    def _let_in(self, name: str) -> None:
        self.in_flight += 1
        self._running[name] = self._running.get(name, 0) + 1

    def _let_out(self, name: str) -> None:
        self.in_flight -= 1
        self._running[name] -= 1
        if not self._running[name]:
            del self._running[name]
        while self._lines and self.in_flight < self.max_in_flight:
            neediest = min(self._lines, key=lambda other: self._running.get(other, 0))
            place = self._next_of(neediest)
            if not place.done():  # one that is about to stand back is done already
                self._let_in(neediest)
                place.set_result(None)

    def _next_of(self, name: str) -> asyncio.Future[None]:
        line = self._lines.pop(name)
        place = line.popleft()
        if line:
            self._lines[name] = line  # behind the others, who are next among equals
        return place

    def _line_up(self, name: str, place: asyncio.Future[None]) -> None:
        """At the end of the line; in a full one, in the place of the client that has most there."""
        if self.waiting >= self.max_waiting:
            greediest = max(self._lines, key=lambda other: len(self._lines[other]), default=name)
            mine = len(self._lines.get(name, ()))
            if not self.max_waiting or mine + 1 >= len(self._lines.get(greediest, ())):
                raise self._full()
            last = self._lines[greediest].pop()
            if not last.done():
                last.set_exception(self._full())
        self._lines.setdefault(name, deque()).append(place)

    def _stand_back(self, name: str, place: asyncio.Future[None]) -> None:
        """Leave the line, or the place that was given at the very moment of leaving."""
        if place.done() and not place.cancelled() and place.exception() is None:
            self._let_out(name)
            return
        line = self._lines.get(name)
        if line is not None and place in line:
            line.remove(place)
            if not line:
                del self._lines[name]

    def _full(self) -> Refusal:
        return self._refusal(f"{self.max_in_flight} requests are under way, and the line is full")

    def _refusal(self, reason: str) -> Refusal:
        self.refused += 1
        wait = self.retry_after_s()
        refusal = Refusal(429, f"{reason}; try again in {wait} s", code="rate_limit_exceeded")
        refusal.headers["Retry-After"] = str(wait)
        return refusal

    def retry_after_s(self) -> int:
        """Seconds until what is under way and waits will have ended, as fast as requests end now.

        At least 1, at most 60.
        """
        if len(self._ends) < 2:
            return 1
        rate = len(self._ends) / max(1e-3, self._now() - self._ends[0])
        return min(_LONGEST_RETRY_S, max(1, math.ceil((self.waiting + 1) / rate)))
