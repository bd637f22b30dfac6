"""Token ids of a text, text of token ids, and what a chat would look like to the model.

Invariant: they take the same key, fields and names as a chat does, and act for the version that a
chat would be answered from; none of them is recorded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as HttpRoute

from marft_agents.serving.fields import DETOKENIZE, RENDER, TOKENIZE

Serve = Callable[[Request, str], Awaitable[Response]]


def other_routes(serve: Serve) -> list[HttpRoute]:
    """``serve`` answers a request from a path of the engine."""

    def route(path: str) -> HttpRoute:
        async def answer(request: Request) -> Response:
            return await serve(request, path)

        return HttpRoute(path, answer, methods=["POST"])

    return [route(path) for path in (TOKENIZE, DETOKENIZE, RENDER)]
