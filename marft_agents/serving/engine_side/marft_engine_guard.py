"""Inside an engine: every route asks for the key that ``serve`` gave it.

Invariant: without the key nothing answers, whatever the path or the method. An engine's own key
check leaves out routes that load adapters or generate. This file stands alone, because the engine
may live in an environment without this package.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Any

VARIABLE = "MARFT_ENGINE_KEY"
_BODY = b'{"error":{"message":"this engine answers to its gateway only","type":"x","code":401}}'


class RequireKey:
    """ASGI middleware; the key comes from the environment, where command lines do not show it."""

    def __init__(self, app: Any) -> None:
        key = os.environ.get(VARIABLE)
        if not key:
            raise RuntimeError(f"{VARIABLE} is not set")
        self._app = app
        self._wanted = hashlib.sha256(b"Bearer " + key.encode()).digest()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _BODY})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _has_key(self, scope: Any) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        digests = [hashlib.sha256(value).digest() for value in given]
        return len(digests) == 1 and hmac.compare_digest(digests[0], self._wanted)
