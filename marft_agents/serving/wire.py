"""HTTP/1.1 to one engine: connections that are used again, replies handed on as they arrive.

Invariant: a connection carries one request at a time. It is used again only after a reply that was
whole, said so itself, and had nothing behind it; a reply that is let go of earlier takes its
connection with it. What one read brought is handed on at once and in one piece, without a task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import httptools

if TYPE_CHECKING:
    from marft_agents.serving.pool import Pool

MOST_HEAD = 64 * 1024
"""Bytes of a reply's head."""
_MOST_HELD = 256 * 1024
"""Bytes of a body that are kept while nobody takes them."""

Sink = Callable[[bytes, bool, Exception | None], None]
"""Told what came of a body, whether that was all, and what broke it off; it must not raise."""


class BadReplyError(ConnectionError):
    """What came is no HTTP that could be handed on."""


class Answer:
    """What the engine answered. The body is still to be taken, by ``read`` or ``flow``."""

    def __init__(self, connection: Connection) -> None:
        self.status_code = 0
        self.headers: dict[str, str] = {}
        """By name in lower case; of several of one name, the first."""
        self.complete = False
        """Whether the whole body has arrived."""
        self._connection: Connection | None = connection
        self._error: Exception | None = None
        self._parts: list[bytes] = []
        self._held = 0
        self._reading = False
        self._sink: Sink | None = None
        self._changed: asyncio.Future[None] | None = None

    async def begun(self) -> None:
        """Return when the head has come.

        Raises:
            ConnectionError, TimeoutError: it did not.
        """
        while not self.status_code:
            await self._change()

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            ConnectionError, TimeoutError: it broke off.
        """
        self._reading = True
        self.resume()
        while not self.complete:
            await self._change()
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    def flow(self, sink: Sink) -> None:
        """Hand the body on as it comes, what is here first."""
        self._sink = sink
        self.resume()
        parts, self._parts = self._parts, []
        if parts or self.complete or self._error is not None:
            sink(b"".join(parts), self.complete, self._error)

    def pause(self) -> None:
        """Take no more from the engine for now."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """Go on after ``pause``."""
        if self._connection is not None:
            self._connection.resume()

    def close(self) -> None:
        """Let go of it; one that is not over ends here for the engine, too."""
        self._sink = None
        if self._connection is not None:
            self._connection.abort()

    # -- of the connection -----------------------------------------------------------------

    def begin(self, status: int) -> None:
        self.status_code = status
        self._tell()

    def take(self, data: bytes, *, over: bool, error: Exception | None = None) -> None:
        if over or error is not None:
            self._connection, self.complete, self._error = None, over, error
        if self._sink is not None:
            self._sink(data, over, error)
            return
        if data:
            self._parts.append(data)
            self._held += len(data)
        if over or error is not None:
            self._tell()
        elif self._held > _MOST_HELD and not self._reading:
            self.pause()

    async def _change(self) -> None:
        if self._error is not None:
            raise self._error
        self._changed = asyncio.get_running_loop().create_future()
        await self._changed
        if self._error is not None:
            raise self._error

    def _tell(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


class Connection(asyncio.Protocol):
    """One connection of a pool; ``idle_since`` is on the loop's clock."""

    idle_since = 0.0

    def __init__(self, pool: Pool, read_timeout_s: float) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._parser: Any = httptools.HttpResponseParser(self)
        self._read_timeout_s = read_timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._answer: Answer | None = None
        self._asked = self._heard = 0.0
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._pool.remember(self)

    @property
    def closing(self) -> bool:
        return self._transport.is_closing()

    @property
    def waits_since(self) -> float | None:
        """When the request was sent whose answer is not over; ``None`` where nobody takes it."""
        return self._asked if self._answer is not None and not self._paused else None

    def ask(self, data: Sequence[bytes]) -> Answer:
        """Send a request; its answer is still to begin."""
        self._answer = answer = Answer(self)
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._head_size = 0
        self._interim = self._begun = self._over = self._keeps = self._stray = False
        self._asked = self._heard = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._read_timeout_s, self._look)
        self._transport.writelines(data)
        return answer

    def pause(self) -> None:
        if not self._paused and not self.closing:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and not self.closing:
            self._paused = False
            self._heard = self._pool.heard = self._loop.time()
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close it at once; nobody waits for its answer any more."""
        self._answer = None
        self._transport.abort()

    # -- of the transport ------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # nobody has asked
            self._transport.abort()
            return
        self._heard = self._pool.heard = self._loop.time()
        if not self._begun:
            self._head_size += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(BadReplyError(f"it answers no HTTP: {error}"))
            return
        if not self._begun and self._head_size > MOST_HEAD:
            self._fail(BadReplyError(f"the head of its answer is longer than {MOST_HEAD} bytes"))
            return
        parts, self._body = self._body, []
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        if self._over:
            self._end(answer, body)
        elif body:
            answer.take(body, over=False)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._pool.forget(self)
        if self._answer is None:
            return
        if self._begun and exc is None and self._ends_with_connection():
            answer, self._answer = self._answer, None
            answer.take(b"", over=True)
        else:
            self._fail(ConnectionError(str(exc) if exc else "it closed the connection"))

    # -- of the parser ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._stray = self._stray or self._over

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._begun:  # what comes behind the body is no header of ours
            self._headers.setdefault(name.lower().decode("latin-1"), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        status: int = self._parser.get_status_code()
        self._interim = status < 200
        if self._interim or self._over:
            self._headers = {}
            return
        self._begun = True
        if self._answer is not None:
            self._answer.headers = self._headers
            self._answer.begin(status)

    def on_body(self, body: bytes) -> None:
        if not self._over:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._begun and not self._over:
            self._over, self._keeps = True, self._parser.should_keep_alive()

    # -- inside ----------------------------------------------------------------------------

    def _end(self, answer: Answer, body: bytes) -> None:
        self._answer = None
        written = not self._transport.get_write_buffer_size()
        if self._keeps and written and not (self._stray or self._paused or self.closing):
            self._pool.give_back(self)
        else:
            self._transport.abort()
        answer.take(body, over=True)

    def _fail(self, error: Exception) -> None:
        answer, self._answer = self._answer, None
        self._transport.abort()
        if answer is not None:
            answer.take(b"", over=False, error=error)

    def _ends_with_connection(self) -> bool:
        coded = self._headers.get("transfer-encoding", "").lower().endswith("chunked")
        return not coded and "content-length" not in self._headers

    def _look(self) -> None:
        """Whether the engine has been silent for too long."""
        self._timer = None
        if self._answer is None:
            return
        now = self._loop.time()
        if self._paused:
            self._heard = now
        left = self._heard + self._read_timeout_s - now
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self._fail(TimeoutError())
