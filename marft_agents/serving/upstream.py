"""The engine as the gateway sees it: one async client.

Invariant: a request whose client has gone is cancelled upstream. An engine that is gone, cannot be
reached or is too slow is a refusal that says which.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from marft_agents.serving.calls import KEEPALIVE_S, tls
from marft_agents.serving.client import root_url
from marft_agents.serving.masking import masking
from marft_agents.serving.pool import Pool
from marft_agents.serving.refusals import Refusal
from marft_agents.serving.wire import Answer, BadReplyError

_PASSED_ON = frozenset({b"accept", b"x-request-id", b"traceparent", b"tracestate"})
_NO_LINE = frozenset(b"\r\n\0")


def _never_dead() -> str | None:
    return None


class Upstream:
    """Connection to one engine.

    Args:
        url: the engine's address.
        death: says why the engine's process is gone; ``None`` while it runs.
        api_key: sent to the engine, for one that was started elsewhere.
        read_timeout_s: longest wait for the next byte of an answer.
    """

    def __init__(
        self,
        url: str,
        *,
        death: Callable[[], str | None] = _never_dead,
        api_key: str | None = None,
        read_timeout_s: float = 600.0,
    ) -> None:
        self.url = root_url(url)
        self.death = death
        self._key = api_key
        self.masked = masking(api_key)
        """A text of the engine's without secrets, its key among them."""
        self._read_timeout_s = read_timeout_s
        self._pool: Pool | None = None
        self._heads: dict[str, bytes] = {}

    @property
    def connections(self) -> int:
        """How many are open, idle ones included."""
        return 0 if self._pool is None else self._pool.connections

    @property
    def silent_s(self) -> float:
        """How long no request that is under way had a byte of its answer; 0 where there is none."""
        return 0.0 if self._pool is None else self._pool.silent_s

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def move(self, url: str) -> None:
        """The engine was started again, at another address."""
        self.url = root_url(url)
        self._heads.clear()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.retire()

    def require_alive(self) -> None:
        """Refuse with 503 when the engine's process is gone."""
        if reason := self.death():
            raise Refusal(503, f"the engine behind this server is gone: {reason}")

    async def post(self, path: str, body: bytes, request: Request) -> Answer:
        """Send a request on; the answer's body is still to be read and closed.

        Raises:
            ClientDisconnect: when the client went away meanwhile.
            Refusal: when the engine is gone, unreachable or too slow.
        """
        self.require_alive()
        head = self._head(path, request.scope["headers"], len(body))
        pool = self._pool
        if pool is None:  # belongs to the loop that it is made in
            pool = self._pool = Pool(
                self.url,
                read_timeout_s=self._read_timeout_s,
                keepalive_s=KEEPALIVE_S,
                tls=tls(),
            )
        try:
            async with WhileThere(request.receive):
                answer = await pool.ask((head, body))
        except OSError as error:
            raise self.refusal(error) from error
        coding = answer.headers.get("content-encoding", "identity")
        if coding != "identity":
            answer.close()
            raise self.refusal(BadReplyError(f"it answers in {coding[:40]!r}, which it may not"))
        return answer

    async def read(self, answer: Answer, request: Request) -> bytes:
        """The whole body of an answer.

        Raises:
            ClientDisconnect: when the client went away meanwhile.
            Refusal: when the engine broke off.
        """
        try:
            if answer.complete:
                return await answer.read()
            async with WhileThere(request.receive):
                return await answer.read()
        except OSError as error:
            raise self.refusal(error) from error

    def refusal(self, error: Exception) -> Refusal:
        """What a client is told of an engine that gave no whole answer."""
        if isinstance(error, TimeoutError) and error.errno is None:  # else the network gave up
            return Refusal(504, "the engine gave no answer in time")
        if reason := self.death():
            return Refusal(503, f"the engine behind this server is gone: {reason}")
        reason = str(error) or type(error).__name__
        return Refusal(503, f"the engine behind this server cannot be reached ({reason})")

    # -- inside ----------------------------------------------------------------------------

    def _head(self, path: str, given: list[tuple[bytes, bytes]], length: int) -> bytes:
        """What stands before the body; of several headers of one name the last is passed on."""
        own = self._heads.get(path) or self._heads.setdefault(path, self._own_head(path))
        passed = {
            name: value
            for name, value in given
            if name in _PASSED_ON and _NO_LINE.isdisjoint(value)
        }
        passed.setdefault(b"accept", b"*/*")
        lines = b"".join([b"%b: %b\r\n" % pair for pair in passed.items()])
        return b"%b%bcontent-length: %d\r\n\r\n" % (own, lines, length)

    def _own_head(self, path: str) -> bytes:
        """Of every request to ``path``."""
        parts = urlsplit(self.url)
        lines = [f"POST {parts.path}{path} HTTP/1.1", f"host: {parts.netloc}"]
        lines += ["content-type: application/json", "accept-encoding: identity"]
        lines += ["user-agent: marft-agents"]
        if self._key:
            lines.append(f"authorization: Bearer {self._key}")
        return "".join(f"{line}\r\n" for line in lines).encode()


async def gone(receive: Receive) -> None:
    """Return when the client has disconnected; its request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class WhileThere:
    """A block that is cancelled when the client disconnects, and then ends with ClientDisconnect.

    It watches in one task beside the block's own, as ``asyncio.timeout`` does with a timer. The
    request's body must have been read.
    """

    __slots__ = ("_cancels", "_left", "_receive", "_task", "_watch")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._left = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancels = task, task.cancelling()
        self._watch = asyncio.ensure_future(gone(self._receive))
        self._watch.add_done_callback(self._over)

    def _over(self, watch: asyncio.Future[None]) -> None:
        if not watch.cancelled() and watch.exception() is None:
            self._left = True
            self._task.cancel()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watch.remove_done_callback(self._over)
        self._watch.cancel()
        cancelled = kind is not None and issubclass(kind, asyncio.CancelledError)
        if self._left and self._task.uncancel() <= self._cancels and cancelled:
            raise ClientDisconnect from error
