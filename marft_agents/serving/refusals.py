"""Refusals of the gateway in the wire format that OpenAI clients understand.

Invariant: a refusal never carries anything of another request, a key, or a traceback.
"""

from __future__ import annotations

import ipaddress
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse


class Refusal(Exception):
    """Answer ``status`` with a message instead of going on."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers: dict[str, str] = {"WWW-Authenticate": "Bearer"} if status == 401 else {}

    def response(self) -> JSONResponse:
        error: dict[str, Any] = {
            "message": self.message,
            "type": _kind(self.status),
            "param": self.param,
            "code": self.code,
        }
        return JSONResponse({"error": error}, self.status, headers=self.headers)


def _kind(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


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


def require_own_origin(request: Request) -> None:
    """Refuse what a web page of another site sends through somebody's browser.

    Such a page may post to a server on loopback, blindly, and would write into the log.
    """
    headers = request.headers
    site = headers.get("sec-fetch-site")
    if site is None:
        origin = headers.get("origin")
        site = "none" if origin is None or _host_of(origin) == headers.get("host") else "cross-site"
    if site not in ("none", "same-origin"):
        raise Refusal(403, "this server does not answer to web pages of another site")


def _host_of(origin: str) -> str:
    return origin.partition("://")[2]
