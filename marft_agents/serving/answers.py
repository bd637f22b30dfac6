"""How the gateway answers: streams that are always closed, bodies that must be objects, errors.

Invariant: whatever goes wrong is an answer in the wire format of OpenAI clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from marft_agents.serving.refusals import Refusal
from marft_agents.serving.scope import note_problem
from marft_agents.serving.upstream import Answer, gone


class Relay(StreamingResponse):
    """A streamed reply that always closes what it reads from, however it ends."""

    def __init__(self, *args: Any, on_close: Callable[[], Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # In a task of its own a chunk does not climb through everything around the application.
        pump = asyncio.ensure_future(self.stream_response(send))
        watch = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait((pump, watch), return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            pump.cancel()
            watch.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.gather(pump, watch, return_exceptions=True)
                await self._on_close()


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
