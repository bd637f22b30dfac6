"""Request bodies, read within limits.

Invariant: a body is refused as soon as it is known to be too large, too slow or nested too deeply;
what is accepted is one JSON object that every parser reads alike. A large one is read in a thread.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, cast

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from marft_agents.serving.large import LARGE
from marft_agents.serving.refusals import Refusal
from marft_agents.serving.stepping import Done, begin
from marft_agents.serving.threads import in_thread

MAX_DEPTH = 100
MAX_VALUES = 2_000_000
READ_TIMEOUT_S = 120.0
"""For a whole body."""
STALL_TIMEOUT_S = 30.0
"""For its next part."""
_OPENERS = (b"{", b"[")


async def read_limited(
    request: Request, limit: int, spend: Callable[[int], None] | None = None
) -> bytes:
    """The body, refused as soon as it is known to be longer than ``limit`` bytes.

    ``spend`` is told of every byte before it is kept, and refuses what memory is too short for.

    Raises:
        Refusal: 413 for too much, 408 when it does not come.
    """
    refusal = Refusal(413, f"the request body is larger than {limit} bytes")
    declared = request.headers.get("content-length", "0")
    if len(declared) > 19 or (declared.isdigit() and int(declared) > limit):
        raise refusal
    parts: list[bytes] = []
    size = 0
    until = math.inf
    while True:
        waiting = begin(request.receive())
        if isinstance(waiting, Done):  # it is here, as most bodies are when they are looked for
            message = waiting.result
        else:
            now = asyncio.get_running_loop().time()
            until = min(until, now + READ_TIMEOUT_S)
            message = await _in_time(waiting, min(STALL_TIMEOUT_S, until - now))
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise refusal
        if part:
            if spend is not None:
                spend(len(part))
            parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def _in_time(waiting: Awaitable[Message], seconds: float) -> Message:
    try:
        async with asyncio.timeout(seconds):
            return await waiting
    except TimeoutError:
        raise Refusal(408, "the request body did not arrive in time") from None


async def read_object(data: bytes) -> dict[str, Any]:
    """``parse_object``, in a thread where that takes long.

    Raises:
        Refusal: as there.
    """
    return parse_object(data) if len(data) <= LARGE else await in_thread(parse_object, data)


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object of a request's body.

    Raises:
        Refusal: 400 for anything else, and for one that would take too much work.
    """
    openers = sum(map(data.count, _OPENERS))
    many = len(data) > 4 * MAX_VALUES and data.count(b",") > 4 * MAX_VALUES
    if many or openers > MAX_VALUES:
        raise Refusal(400, f"the request body holds more than {MAX_VALUES} JSON values")
    try:
        body: Any = _DECODER.decode(data.decode())
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "the request body is no valid JSON") from error
    if not isinstance(body, dict):
        raise Refusal(400, "the request body is no JSON object")
    if openers > MAX_DEPTH and _too_deep(body):
        raise Refusal(400, f"the request body is nested more than {MAX_DEPTH} levels deep")
    return cast("dict[str, Any]", body)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


def _too_deep(body: object) -> bool:
    """Whether containers are nested more than ``MAX_DEPTH`` levels; without recursion."""
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for holder in level:
            for value in cast("Any", holder.values() if type(holder) is dict else holder):
                if type(value) is dict or type(value) is list:
                    below.append(value)
        if not below:
            return False
        level = below
    return True
