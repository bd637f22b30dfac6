"""How the gateway answers: streams that are always closed, bodies that must be objects, errors.

Invariant: whatever goes wrong is an answer in the wire format of OpenAI clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from marft_agents.serving.refusals import Refusal
from marft_agents.serving.scope import WRITE, note_problem
from marft_agents.serving.stepping import Done, begin
from marft_agents.serving.upstream import gone
from marft_agents.serving.wire import Answer


class Translator(Protocol):
    """What becomes of an engine's stream for the client."""

    def feed(self, data: bytes) -> bytes:
        """What the client is to see now that the engine has sent ``data``."""
        ...

    def end(self, error: Exception | None) -> bytes:
        """What is left to see when nothing more comes, for whatever reason."""
        ...

    def failed(self, mistake: Exception) -> None:
        """The stream cannot go on, by a mistake of our own."""

    def close(self) -> None:
        """Nothing more is sent, however it came to that."""


class Relay(Response):
    """A streamed reply: what the engine sends is sent on where it arrives, without a task.

    Whatever happens, ``answer`` and ``translator`` are closed in the end.
    """

    def __init__(self, answer: Answer, translator: Translator, headers: Mapping[str, str]) -> None:
        self.status_code = answer.status_code
        self.background = None
        self._answer = answer
        self._translator = translator
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        pump = _Pump(self._answer, self._translator, send, scope.get(WRITE, _cannot))
        watch: asyncio.Future[None] | None = None
        try:
            await send({"type": "http.response.start", **head})
            watch = asyncio.ensure_future(gone(receive))
            watch.add_done_callback(pump.stop)
            self._answer.flow(pump.take)
            await pump.over
        finally:
            if watch is not None:
                watch.cancel()
            pump.stop()
            self._answer.close()
            self._translator.close()


def _cannot(_: bytes) -> bool:
    """The web server has no short cut."""
    return False


class _Pump:
    """From an engine's stream to its client; ``over`` is done when there is no more to do."""

    def __init__(
        self, answer: Answer, translator: Translator, send: Send, write: Callable[[bytes], bool]
    ) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answer = answer
        self._translator = translator
        self._send = send
        self._write = write
        self._waiting: list[bytes] = []
        """What came while the client was too slow for what was before it."""
        self._ended = False
        self._slow: asyncio.Task[None] | None = None

    def take(self, data: bytes, over: bool, error: Exception | None) -> None:
        """The engine has sent something; it is not this that may fail."""
        if self.over.done():
            return
        try:
            seen = self._translator.feed(data) if data else b""
            if over or error is not None:
                seen += self._translator.end(error)
                self._ended = True
            if self._slow is not None:
                self._waiting.append(seen)
            elif self._ended or (seen and not self._write(seen)):
                self._put(seen)
        except Exception as mistake:
            self._fail(mistake)

    def stop(self, _: object = None) -> None:
        """Send nothing more."""
        if not self.over.done():
            self.over.set_result(None)
        if self._slow is not None:
            self._slow.cancel()

    def _put(self, seen: bytes) -> None:
        """Send it now, without a task as long as the client keeps up."""
        sending = begin(self._send(self._message(seen)))
        if not isinstance(sending, Done):
            self._answer.pause()
            self._slow = asyncio.get_running_loop().create_task(self._go_on(sending))
        elif self._ended:
            self.over.set_result(None)

    async def _go_on(self, sending: Awaitable[None]) -> None:
        """Send what waits, and take more when the client has caught up."""
        try:
            told = self._ended
            await sending
            while self._waiting:
                seen, told = b"".join(self._waiting), self._ended
                self._waiting.clear()
                await self._send(self._message(seen))
            self._slow = None
            if not told:
                self._answer.resume()
            elif not self.over.done():
                self.over.set_result(None)
        except Exception as mistake:
            self._fail(mistake)

    def _message(self, seen: bytes) -> Message:
        return {"type": "http.response.body", "body": seen, "more_body": not self._ended}

    def _fail(self, mistake: Exception) -> None:
        self._translator.failed(mistake)
        if not self.over.done():
            self.over.set_exception(mistake)


def is_stream(response: Answer) -> bool:
    """Whether the engine answers with an event stream."""
    return response.headers.get("content-type", "").startswith("text/event-stream")


_WITHOUT_V1 = {"/chat/completions", "/completions", "/models", "/responses"}
"""Where clients ask whose base_url is the server's address alone."""


async def _answer_refusal(request: Request, error: Refusal) -> Response:
    note_problem(request, error.message)
    return error.response()


async def _answer_http(request: Request, error: HTTPException) -> Response:
    path = request.url.path[:200]
    hint = "; base_url of the app ends in /v1" if path in _WITHOUT_V1 else ""
    refusal = Refusal(error.status_code, f"{request.method} {path} is not served here{hint}")
    refusal.headers |= error.headers or {}
    return refusal.response()


async def _answer_gone(_: Request, __: ClientDisconnect) -> Response:
    return Response(status_code=499)


async def _answer_failure(request: Request, error: Exception) -> Response:
    note_problem(request, type(error).__name__)
    return Refusal(500, "this server failed to answer; its log says why").response()


HANDLERS: dict[Any, Any] = {
    Refusal: _answer_refusal,
    HTTPException: _answer_http,
    ClientDisconnect: _answer_gone,
    Exception: _answer_failure,
}


class Direct:
    """Some routes without the layers of a framework around them; ``app`` has the others.

    ``routes`` is by method and path. What an endpoint raises is answered as elsewhere.
    """

    def __init__(
        self, app: ASGIApp, routes: Mapping[tuple[str, str], Callable[..., Awaitable[Response]]]
    ) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http":
            endpoint = self._routes.get((scope["method"], scope["path"]))
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        request = QuickRequest(scope, receive, send)
        try:
            response = await endpoint(request)
        except Exception as error:
            kinds = [kind for kind in type(error).__mro__ if kind in HANDLERS]
            await (await HANDLERS[kinds[0]](request, error))(scope, receive, send)
            if kinds[0] is Exception:
                raise
            return
        await response(scope, receive, send)


class _Once(Headers):
    """Headers that are looked at often: each is found at once, the first of its name."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope=scope)
        raw: list[tuple[bytes, bytes]] = scope["headers"]
        self._found = {k.decode("latin-1"): v.decode("latin-1") for k, v in reversed(raw)}

    def __getitem__(self, key: str) -> str:
        return self._found[key.lower()]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.lower() in self._found

    def get(self, key: str, default: Any = None) -> Any:
        return self._found.get(key.lower(), default)


class QuickRequest(Request):
    """A request whose headers are looked at often."""

    @property
    def headers(self) -> Headers:
        if not hasattr(self, "_headers"):
            self._headers = _Once(self.scope)
        return self._headers
