"""What is looked at before any route: the names a request calls this server by, its site, its size.

Invariant: on loopback the server answers to its own names only, so that no web page can reach it
under a name of its own; no other site's page writes anything; heads of requests are small. Other
origins are never allowed to read an answer.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from marft_agents.serving.refusals import Refusal, is_loopback, require_own_origin

MAX_HEADERS = 100
MAX_HEAD = 64 * 1024
"""Bytes of all headers."""
MAX_PATH = 2048
_OF_BROWSERS = frozenset({b"origin", b"sec-fetch-site"})
_READS = frozenset({"GET", "HEAD"})
_PROBES = frozenset({"/health", "/ready"})
"""What orchestrators ask by the address of the machine."""
_HOST = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[A-Za-z0-9_.-]+)(?::[0-9]{1,5})?")


class Borders:
    """Around the gateway's routes.

    Args:
        app: what is guarded.
        loopback: whether the server listens on loopback alone; then names are checked.
        names: further host names to answer to; with any, names are checked elsewhere, too.
    """

    def __init__(self, app: ASGIApp, *, loopback: bool = True, names: Collection[str] = ()) -> None:
        self._app = app
        self._names = frozenset(name.lower().rstrip(".") for name in names)
        self._checked = loopback or bool(self._names)
        self._unchecked = frozenset[str]() if loopback else _PROBES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        try:
            if scope["type"] != "http":
                raise Refusal(404, "no such protocol is served here")
            self._check(scope)
        except Refusal as refusal:
            if scope["type"] == "http":
                await refusal.response()(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1008})
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        size, hosts, from_a_page = 0, list[bytes](), False
        raw: list[tuple[bytes, bytes]] = scope["headers"]
        for name, value in raw:
            size += len(name) + len(value)
            if name == b"host":
                hosts.append(value)
            elif name in _OF_BROWSERS:
                from_a_page = True
        if len(raw) > MAX_HEADERS or size > MAX_HEAD:
            raise Refusal(431, f"the headers are more than {MAX_HEADERS} or {MAX_HEAD} bytes")
        if len(scope.get("raw_path") or scope["path"]) > MAX_PATH:
            raise Refusal(414, f"the path is longer than {MAX_PATH} bytes")
        if self._checked and scope["path"] not in self._unchecked:
            self._check_host(hosts)
        if from_a_page and scope["method"] not in _READS:
            require_own_origin(Request(scope))

    def _check_host(self, hosts: list[bytes]) -> None:
        if not hosts:
            return  # HTTP/1.0; a browser always sends it
        name = _host_name(hosts[0]) if len(hosts) == 1 else ""
        if name is None or name in self._names:
            return
        raise Refusal(
            403,
            f"this server does not answer to the name {hosts[0][:80].decode('latin-1')!r}; use"
            " 127.0.0.1, or start it with --allowed-host NAME",
            code="host_not_allowed",
        )


@functools.lru_cache(maxsize=256)
def _host_name(host: bytes) -> str | None:
    """The name in a Host header, "" for none; ``None`` for one of loopback."""
    match = _HOST.fullmatch(host.decode("latin-1"))
    name = match[1].lower().rstrip(".") if match is not None else ""
    return None if is_loopback(name.strip("[]")) else name
