"""Refusals of the gateway in the wire format that OpenAI clients understand.

Invariant: a refusal never carries anything of another request, a key, or a traceback.
"""

from __future__ import annotations

import hmac
import ipaddress
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse


class Refusal(Exception):
    """Answer ``status`` with a message instead of going on."""

    def __init__(self, status: int, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers: dict[str, str] = {"WWW-Authenticate": "Bearer"} if status == 401 else {}

    def response(self) -> JSONResponse:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error: dict[str, Any] = {
            "message": self.message,
            "type": kind,
            "param": None,
            "code": self.code,
        }
        return JSONResponse({"error": error}, self.status, headers=self.headers)


def same_secret(given: str | None, wanted: str) -> bool:
    """Compare a header's value with a secret, in constant time."""
    return hmac.compare_digest((given or "").encode("latin-1", "replace"), wanted.encode())


def is_loopback(host: str) -> bool:
    """Whether an address or bind host is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


_IDENTITY = "marft:"


def bearer_token(request: Request) -> str | None:
    """What follows ``Bearer`` in the Authorization header."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def split_key(token: str) -> tuple[str, str | None]:
    """``("KEY", "agent=a")`` for ``KEY:marft:agent=a``; the second is ``None`` without that part.

    A token may be the part alone, where no key is asked for.
    """
    if token.startswith(_IDENTITY):
        return "", token.removeprefix(_IDENTITY)
    key, mark, identity = token.rpartition(f":{_IDENTITY}")
    return (key, identity) if mark else (token, None)


def require_api_key(request: Request, api_key: str | None) -> None:
    """Refuse a request without the bearer key, when there is one."""
    if api_key is None:
        return
    token = bearer_token(request)
    if token is not None and same_secret(token, api_key):
        return
    key, identity = split_key(token or "")
    if identity is None or not same_secret(key, api_key):
        raise Refusal(401, "wrong or missing API key; send it as Authorization: Bearer <key>")


def require_own_origin(request: Request) -> None:
    """Refuse what a web page of another site sends through somebody's browser.

    Such a page may post to a server on loopback, blindly, and would write into the log.
    """
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise Refusal(403, "web pages of another site cannot write into the log")


def require_operator(request: Request, operator_key: str) -> None:
    """Refuse a control request from another machine, or without the operator key."""
    peer = request.client.host if request.client is not None else ""
    if not is_loopback(peer):
        raise Refusal(403, "control routes answer to this machine only")
    if not same_secret(request.headers.get("x-marft-operator-key"), operator_key):
        raise Refusal(
            401, "wrong or missing operator key; it is in .operator-key in the adapters folder"
        )


async def read_limited(request: Request, limit: int) -> bytes:
    """The body, refused as soon as it is known to be longer than ``limit`` bytes."""
    refusal = Refusal(413, f"the request body is larger than {limit} bytes")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit:
        raise refusal
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise refusal
        parts.append(part)
    return b"".join(parts)
