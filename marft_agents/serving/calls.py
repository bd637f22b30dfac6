"""HTTP calls whose every failure is a :class:`ServerError` that names the address and the answer.

Invariant: no call waits without a limit, and none goes through a proxy of the environment.
"""

from __future__ import annotations

import functools
import json
import ssl
import time
from typing import Any, cast

import httpx

from marft_agents.errors import ServerError

_EXCERPT = 1000
_MOST_BYTES = 64 * 1024 * 1024


class AnswerError(ServerError):
    """The server answered, but not with success."""

    def __init__(self, message: str, *, status: int, detail: str) -> None:
        super().__init__(message)
        self.status = status
        self.detail = detail


class NoAnswerError(ServerError):
    """The server was not reached or did not answer in time; it may have acted all the same."""

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


# Shorter than the 5 s after which servers close an idle connection: one that is closed while a
# request is under way would look like an engine that failed.
KEEPALIVE_S = 2.0


@functools.cache
def tls() -> ssl.SSLContext:
    """One context for every client: making one takes longer than a call on loopback."""
    return httpx.create_ssl_context(trust_env=False)


def new_client(headers: dict[str, str]) -> httpx.Client:
    """A client that knows no proxy and keeps idle connections for a short time only."""
    limits = httpx.Limits(keepalive_expiry=KEEPALIVE_S)
    return httpx.Client(headers=headers, trust_env=False, verify=tls(), limits=limits)


def error_detail(body: bytes) -> str:
    """The message inside an OpenAI-style error body, or an excerpt of the body."""
    text = body.decode(errors="replace").strip()
    try:
        value: Any = json.loads(text)
    except ValueError:
        return text[:_EXCERPT]
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and key in value:
            value = cast("dict[str, Any]", value)[key]
    return (value if isinstance(value, str) else json.dumps(value))[:_EXCERPT]


def _whole(client: httpx.Client, request: httpx.Request, deadline: float) -> httpx.Response:
    """The answer with its body; one that comes byte by byte must end in time, too."""
    response = client.send(request, stream=True)
    try:
        parts: list[bytes] = []
        size = 0
        for part in response.iter_bytes():
            parts.append(part)
            size += len(part)
            if size > _MOST_BYTES:
                raise httpx.DecodingError(f"the answer is longer than {_MOST_BYTES} bytes")
            if time.monotonic() > deadline:
                raise httpx.ReadTimeout("the answer does not end", request=request)
    finally:
        response.close()
    return httpx.Response(response.status_code, content=b"".join(parts), request=request)


def call(
    client: httpx.Client,
    method: str,
    url: str,
    *,
    body: Any = None,
    headers: dict[str, str] | None = None,
    timeout_s: float,
) -> httpx.Response:
    """One request and its successful answer.

    Raises:
        AnswerError: when the status is not 2xx.
        NoAnswerError: when there was no whole answer within ``timeout_s``.
    """
    timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, 5.0))
    try:
        request = client.build_request(method, url, json=body, headers=headers, timeout=timeout)
        response = _whole(client, request, time.monotonic() + timeout_s)
    except httpx.TimeoutException as error:
        raise NoAnswerError(
            f"{method} {url} gave no answer within {timeout_s:g} s", timed_out=True
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise NoAnswerError(f"cannot reach {url} ({reason})") from error
    if not response.is_success:
        detail = error_detail(response.content)
        raise AnswerError(
            f"{method} {url} answered {response.status_code}: {detail}",
            status=response.status_code,
            detail=detail,
        )
    return response


def json_object(response: httpx.Response) -> dict[str, Any]:
    """The answer's JSON object.

    Raises:
        ServerError: when it is none.
    """
    try:
        value: Any = response.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        excerpt = response.text[:_EXCERPT]
        raise ServerError(f"{response.url} answered no JSON object: {excerpt!r}")
    return cast("dict[str, Any]", value)
