"""The engine as the gateway sees it: one async client.

Invariant: a request whose client has gone is cancelled upstream. An engine that is gone, cannot be
reached or is too slow is a refusal that says which.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping
from types import TracebackType
from typing import Any

import aiohttp
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive
from yarl import URL

from marft_agents.serving.calls import KEEPALIVE_S, tls
from marft_agents.serving.client import root_url
from marft_agents.serving.refusals import Refusal

_PASSED_ON = frozenset({b"accept", b"x-request-id", b"traceparent", b"tracestate"})
_OWN = {"content-type": "application/json", "accept-encoding": "identity"}
_LARGE = 1 << 20
"""Bytes of a body that are better not handed to the connection in one piece."""


def _never_dead() -> str | None:
    return None


class Answer:
    """What the engine answered; the body is still to be read, and the answer to be closed."""

    __slots__ = ("_response", "headers", "status_code")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status_code = response.status
        self.headers: Mapping[str, str] = response.headers
        """Names in any case."""

    @property
    def complete(self) -> bool:
        """Whether the whole body has arrived."""
        return self._response.content.is_eof()

    async def read(self) -> bytes:
        return await self._response.read()

    def more(self) -> Coroutine[Any, Any, bytes]:
        """What has come since, as soon as there is something; nothing at the end."""
        return self._response.content.readany()

    async def aclose(self) -> None:
        """Let go of it; an answer that is not over ends here for the engine, too."""
        self._response.close()


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
        self._key = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=5.0, sock_read=read_timeout_s
        )
        self._session: aiohttp.ClientSession | None = None
        self._urls: dict[str, URL] = {}

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:  # belongs to the loop that it is made in
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=tls())
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers=self._key,
                timeout=self._timeout,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def move(self, url: str) -> None:
        """The engine was started again, at another address."""
        self.url = root_url(url)
        self._urls.clear()

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
        given: list[tuple[bytes, bytes]] = request.scope["headers"]
        passed = {k.decode(): v.decode("latin-1") for k, v in given if k in _PASSED_ON}
        url = self._urls.get(path) or self._urls.setdefault(path, URL(self.url + path))
        data: Any = body if len(body) < _LARGE else io.BytesIO(body)
        with self._refusals():
            async with WhileThere(request.receive):
                response = await self._http.post(
                    url, data=data, headers=passed | _OWN, allow_redirects=False
                )
        return Answer(response)

    async def read(self, answer: Answer, request: Request) -> bytes:
        """The whole body of an answer.

        Raises:
            ClientDisconnect: when the client went away meanwhile.
            Refusal: when the engine broke off.
        """
        with self._refusals():
            if answer.complete:
                return await answer.read()
            async with WhileThere(request.receive):
                return await answer.read()

    @contextlib.contextmanager
    def _refusals(self) -> Generator[None]:
        try:
            yield
        except TimeoutError as error:
            raise Refusal(504, "the engine gave no answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            self.require_alive()
            raise Refusal(
                503, f"the engine behind this server cannot be reached ({_reason(error)})"
            ) from error

    async def stream(self, answer: Answer) -> AsyncIterator[bytes]:
        """Chunks as they come.

        Raises:
            Refusal: when the engine broke off before the end.
        """
        with self._refusals():
            while chunk := await answer.more():
                yield chunk


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


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
