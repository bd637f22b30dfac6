"""Only the model's name changes on the way back."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marft_agents.serving.rewrite import rewrite_json, rewrite_line, rewrite_stream

STREAM = (
    b'data: {"model":"router@v3","choices":[{"delta":{"content":"\xf0\x9f\x99\x82"}}]}\r\n\r\n'
    b": a comment about router@v3\n"
    b'data:{"choices":[],"model": "router@v3"}\n\n'
    b'data: {"model":"router@v30"}\n\n'
    b'data: {"text":"router@v3","model":"other"}\n\n'
    b"data: [DONE]\n\n"
    b'data: {"model":"router@v3"}'
)


async def _through(chunks: list[bytes]) -> list[bytes]:
    async def source() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    return [chunk async for chunk in rewrite_stream(source(), "router@v3", "router")]


def _want() -> bytes:
    return STREAM.replace(b'"model":"router@v3"', b'"model":"router"').replace(
        b'data:{"choices":[],"model": "router@v3"}', b'data:{"choices":[],"model":"router"}'
    )


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
async def test_a_stream_cut_anywhere_gives_the_same_bytes(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    chunks = [STREAM[a:b] for a, b in itertools.pairwise(edges)]
    assert b"".join(await _through(chunks)) == _want()


async def test_a_whole_line_is_not_held_back() -> None:
    chunks = [b'data: {"model":"router@v3"}\n', b"\n", b"data: [DONE]\n\n"]
    assert await _through(chunks) == [b'data: {"model":"router"}\n', b"\n", b"data: [DONE]\n\n"]


@pytest.mark.parametrize(
    "body", [b"", b"text", b"[1]", b'"router@v3"', b'{"model":"base"}', b"\xff"]
)
def test_other_bodies_pass_as_they_are(body: bytes) -> None:
    assert rewrite_json(body, "router@v3", "router") == body


def test_a_body_keeps_everything_else() -> None:
    body = json.dumps({"model": "router@v3", "a": [1.5e-7, None, "é"], "b": {"model": "router@v3"}})
    assert json.loads(rewrite_json(body.encode(), "router@v3", "Rou ter")) == json.loads(body) | {
        "model": "Rou ter"
    }


def test_lines_that_are_no_json_pass() -> None:
    assert rewrite_line(b"data: router@v3 {\n", "router@v3", "x") == b"data: router@v3 {\n"
