"""Bodies are read within limits, whatever is sent."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import Request

from marft_agents.serving import bodies
from marft_agents.serving.bodies import MAX_DEPTH, parse_object, read_limited
from marft_agents.serving.refusals import Refusal


def nested(levels: int, opening: str = "[", closing: str = "]") -> bytes:
    return b'{"a":' + (opening * levels + "1" + closing * levels).encode() + b"}"


def test_bodies_may_be_nested_as_far_as_schemas_are_and_no_further() -> None:
    assert parse_object(nested(MAX_DEPTH - 1))
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        with pytest.raises(Refusal, match="nested more than 100 levels"):
            parse_object(nested(MAX_DEPTH, opening, closing))


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 10_000_000,
        b"[" * 5_000_000 + b"]" * 5_000_000,
        b'{"a":' * 1_000_000,
        nested(900),
        b'{"a":[' + b"[]," * 3_300_000 + b"0]}",
        b'{"a":[' + b"1," * 9_000_000 + b"0]}",
    ],
    ids=["open", "closed", "objects", "900", "wide", "numbers"],
)
def test_hostile_bodies_are_refused_before_they_cost_much(data: bytes) -> None:
    begun = time.process_time()
    with pytest.raises(Refusal) as caught:
        parse_object(data)
    assert caught.value.status == 400
    assert time.process_time() - begun < 1.0


@pytest.mark.parametrize(
    "text", ['{"a": NaN}', '{"a": -Infinity}', '{"a": ' + "9" * 5000 + "}", '{"a": 1}x']
)
def test_what_parsers_read_differently_is_no_json(text: str) -> None:
    with pytest.raises(Refusal, match="no valid JSON"):
        parse_object(text.encode())


def test_of_two_fields_of_one_name_the_engine_sees_what_was_checked() -> None:
    assert json.dumps(parse_object(b'{"model":"router","model":"base"}')) == '{"model": "base"}'


def request(parts: AsyncIterator[bytes], **headers: str) -> Request:
    async def receive() -> dict[str, Any]:
        part = await anext(parts, None)
        return {"type": "http.request", "body": part or b"", "more_body": part is not None}

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw}, receive)


async def every(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_bodies_are_read_up_to_the_limit() -> None:
    assert await read_limited(request(every(b"ab", b"", b"c")), 3) == b"abc"
    assert await read_limited(request(every()), 3) == b""
    for given in (request(every(b"ab", b"cd")), request(every(), content_length="4")):
        with pytest.raises(Refusal) as caught:
            await read_limited(given, 3)
        assert caught.value.status == 413
    with pytest.raises(Refusal):
        await read_limited(request(every(), content_length="9" * 5000), 3)


async def test_memory_is_asked_for_before_a_part_is_kept() -> None:
    spent: list[int] = []
    await read_limited(request(every(b"ab", b"c")), 9, spent.append)
    assert spent == [2, 1]


async def test_a_body_that_stalls_or_never_ends_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def stalls() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async def drips() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0.01)
            yield b" "

    monkeypatch.setattr(bodies, "STALL_TIMEOUT_S", 0.05)
    monkeypatch.setattr(bodies, "READ_TIMEOUT_S", 0.2)
    for parts in (stalls(), drips()):
        with pytest.raises(Refusal, match="did not arrive in time") as caught:
            await read_limited(request(parts), 100)
        assert caught.value.status == 408
