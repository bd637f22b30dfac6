"""Only the model's name changes on the way back."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marft_agents.recording.lines import Line, Lines
from marft_agents.serving.rewrite import StreamRewriter, on_the_wire, rewrite_json
from tests.serving.streams import rewritten

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

    return [chunk async for chunk in rewritten(source(), StreamRewriter("router@v3", "router"))]


def _want() -> bytes:
    renamed = STREAM.replace(b'"model":"router@v3"', b'"model":"router"')
    return renamed.replace(b'"model": "router@v3"', b'"model": "router"')


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


async def test_lines_that_are_no_json_pass() -> None:
    assert b"".join(await _through([b"data: router@v3 {\n"])) == b"data: router@v3 {\n"


def _event(value: Any) -> bytes:
    head = {"id": "chatcmpl-1", "created": 1, "model": "router@v3"}
    return b"data: " + json.dumps(head | value, separators=(",", ":")).encode() + b"\n\n"


EVENTS = [
    _event({"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}),
    _event({"choices": [{"delta": {"content": 'says "model":"router@v3"'}}]}),
    _event({"choices": [], "meta": {"model": "router@v3"}}),
    _event({"choices": [], "meta": {"id": "chatcmpl-1", "created": 1, "model": "router@v3"}}),
    _event({"choices": [], "other": "\n\ndata: {"}),
    _event({"model": "router@v30"}),
    _event({"choices": [{"delta": {}, "finish_reason": "stop"}]}),
    b'data: {"id":"chatcmpl-1",\ndata: "model":"router@v3"}\n\n',
    b": keep-alive\n\n",
    b"data: [DONE]\n\n",
]


@given(st.lists(st.lists(st.sampled_from(EVENTS), min_size=1, max_size=3), max_size=6))
async def test_events_that_come_whole_are_renamed_as_in_pieces(come: list[list[bytes]]) -> None:
    chunks = [b"".join(events) for events in come]
    whole = b"".join(chunks)
    pieces = [whole[i : i + 1] for i in range(len(whole))]
    assert b"".join(await _through(chunks)) == b"".join(await _through(pieces))


async def test_events_that_begin_alike_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []
    feed = Lines.feed

    def noted(lines: Lines, data: bytes) -> list[Line]:
        read.append(data)
        return feed(lines, data)

    monkeypatch.setattr(Lines, "feed", noted)
    out = await _through([EVENTS[0]] * 3 + [EVENTS[0] * 2, EVENTS[6], EVENTS[0]])
    assert b"".join(out).count(b'"model":"router"') == 7
    assert read == [EVENTS[0], EVENTS[6]]


def _chunk(**choice: Any) -> bytes:
    return json.dumps({"model": "a@v1", "choices": [{"index": 0} | choice]}).encode()


LOGPROBS = {"content": [{"token": "x", "logprob": -1.0}]}


@pytest.mark.parametrize("model", ["a@v1", "some other name"])
def test_hidden_fields_read_as_where_nobody_asked(model: str) -> None:
    choice = {"index": 0, "message": {"content": "x"}, "logprobs": LOGPROBS, "token_ids": [5]}
    body = {"model": model, "choices": [choice], "prompt_token_ids": [1], "usage": {"n": 1}}
    out = json.loads(rewrite_json(json.dumps(body).encode(), "a@v1", "a", {"token_ids"}))
    assert out["choices"] == [choice | {"token_ids": None}]
    assert (out["prompt_token_ids"], out["usage"]) == (None, {"n": 1})
    out = json.loads(rewrite_json(json.dumps(body).encode(), "a@v1", "a", {"logprobs"}))
    assert out["choices"] == [choice | {"logprobs": None}]
    assert out["prompt_token_ids"] == [1]


def test_absent_fields_stay_absent() -> None:
    out = json.loads(rewrite_json(_chunk(delta={}), "a@v1", "a", {"logprobs"}))
    assert out == {"model": "a", "choices": [{"index": 0, "delta": {}}]}


def test_chunks_that_only_carry_ids_vanish_with_their_blank_line() -> None:
    bare = b"data: " + _chunk(delta={}, token_ids=[1], finish_reason=None) + b"\n\n"
    last = b"data: " + _chunk(delta={}, token_ids=[1], finish_reason="stop") + b"\n\n"
    text = b"data: " + _chunk(delta={"content": "x"}, token_ids=[1]) + b"\n\n"
    stream = b": ping\n\n" + text + bare + text + last + b"data: [DONE]\n\n"
    for size in (1, 7, len(stream)):
        cuts = [stream[i : i + size] for i in range(0, len(stream), size)]
        out = _collect(cuts, {"token_ids", "logprobs"})
        assert out.count(b'"content": "x"') == 2
        assert out.count(b"data: ") == 4
        assert out.count(b"\n\n") == 5 and b"\n\n\n" not in out
        assert b"[1]" not in out
    # Whoever asked for one of them would have had the chunk, too.
    for hidden in ({"token_ids"}, {"logprobs"}, frozenset[str]()):
        assert _collect([stream], hidden).count(b"data: ") == 5


def _collect(chunks: list[bytes], hidden: Collection[str]) -> bytes:
    async def source() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async def run() -> bytes:
        return b"".join([c async for c in rewritten(source(), StreamRewriter("a@v1", "a", hidden))])

    return asyncio.run(run())


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=10**25, max_value=10**30)
    | st.floats(allow_nan=False)
    | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_a_request_says_on_the_wire_what_it_said(body: dict[str, Any]) -> None:
    assert json.loads(on_the_wire(body)) == body


def test_half_a_surrogate_pair_passes() -> None:
    assert json.loads(on_the_wire({"content": "\ud83d"})) == {"content": "\ud83d"}
