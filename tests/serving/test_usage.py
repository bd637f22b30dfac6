"""Streams are counted on our own account, and no client can tell."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marft_agents.serving.passage import Outcome
from marft_agents.serving.rewrite import StreamRewriter, rewrite_json
from marft_agents.serving.usage import StreamUsage, own_usage
from tests.serving.recording_kit import CHAT, recording_stage
from tests.serving.stage import House, Stage, running_stage
from tests.serving.streams import rewritten

ASK = {"stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("body", "own"),
    [
        ({"stream": True}, ASK),
        ({"stream": True, "n": 1, "stream_options": None}, ASK),
        ({"stream": True, "prompt": "a"}, ASK),
        ({"stream": True, "prompt": [1, 2]}, ASK),
        ({"stream": True, "stream_options": {"include_usage": False, "x": 1}}, None),
        ({"stream": True, "stream_options": {"include_usage": True}}, {}),
        ({"stream": True, "stream_options": {}}, {}),  # what that means is the engine's to say
        ({"stream": True, "stream_options": "text"}, {}),  # an error that the client is to see
        (
            {
                "stream": True,
                "stream_options": {"include_usage": False, "continuous_usage_stats": True},
            },
            {},
        ),
        ({"stream": True, "n": 2}, {}),
        ({"stream": True, "prompt": ["a", "b"]}, {}),
        ({"stream": "yes"}, {}),
        ({"stream": False}, {}),
        ({}, {}),
    ],
)
def test_what_is_asked_for(body: dict[str, Any], own: dict[str, Any] | None) -> None:
    said = {"stream_options": {"include_usage": True, "x": 1}}
    assert own_usage(body) == (said if own is None else own)


TERMINAL = (
    b'data: {"model":"r@v1","choices":[{"delta":{"content":"b"},"finish_reason":"stop"%s}]%s}'
)
USAGE = (
    b'data: {"model":"r@v1","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}'
    b',"system_fingerprint":"fp-\xc3\xa9"}'
)
FIRST = (
    b'data: {"model":"r@v1","choices":[{"delta":{"content":"\\"usage\\":{}"}'
    b',"finish_reason":null}]}'
)


def _stream(terminal: bytes, usage: bytes | None, end: bytes) -> bytes:
    events = [FIRST, terminal, *([usage] if usage else []), b"data: [DONE]"]
    return b"".join(event + end + end for event in events)


def _through(data: bytes, cuts: list[int], *, ours: bool = True) -> tuple[bytes, list[Any]]:
    counted: list[Any] = []

    async def go() -> bytes:
        async def source() -> AsyncIterator[bytes]:
            edges = [0, *sorted(cuts), len(data)]
            for a, b in itertools.pairwise(edges):
                yield data[a:b]

        usage = StreamUsage(lambda a, b: counted.append((a, b)), ours=ours)
        return b"".join(
            [c async for c in rewritten(source(), StreamRewriter("r@v1", "r", usage=usage))]
        )

    return asyncio.run(go()), counted


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@given(st.lists(st.integers(0, 300), max_size=8))
def test_the_client_sees_what_it_would_have_seen(end: bytes, cuts: list[int]) -> None:
    unasked = _stream(TERMINAL % (b"", b',"system_fingerprint":"fp-\xc3\xa9"'), None, end)
    seen, counted = _through(_stream(TERMINAL % (b"", b""), USAGE, end), cuts)
    assert seen == unasked.replace(b"r@v1", b"r")
    assert counted == [(7, 2)]


def test_what_the_client_asked_for_it_gets() -> None:
    data = _stream(TERMINAL % (b"", b""), USAGE, b"\n")
    seen, counted = _through(data, [], ours=False)
    assert (seen, counted) == (data.replace(b"r@v1", b"r"), [(7, 2)])


def test_an_engine_that_sends_no_usage_changes_nothing() -> None:
    data = _stream(TERMINAL % (b"", b""), None, b"\n")
    assert _through(data, []) == (data.replace(b"r@v1", b"r"), [])


def test_an_engine_that_always_counts_is_left_alone() -> None:
    running = b',"usage":{"prompt_tokens":7,"completion_tokens":1}'
    data = _stream(TERMINAL % (b"", running), USAGE, b"\n")
    seen, counted = _through(data, [])
    assert (seen, counted) == (data.replace(b"r@v1", b"r"), [(7, 1), (7, 2)])


def test_a_stream_that_breaks_after_its_last_chunk_still_gives_that_chunk() -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield TERMINAL % (b"", b"") + b"\n\n"
        raise RuntimeError("gone")

    async def go() -> list[bytes]:
        seen: list[bytes] = []
        usage = StreamUsage(lambda _a, _b: None, ours=True)
        with pytest.raises(RuntimeError):
            async for chunk in rewritten(broken(), StreamRewriter("r@v1", "r", usage=usage)):
                seen.append(chunk)
        return seen

    assert asyncio.run(go()) == [(TERMINAL % (b"", b"") + b"\n\n").replace(b"r@v1", b"r")]


@pytest.mark.parametrize(
    ("usage", "told"),
    [
        ('{"prompt_tokens":3,"completion_tokens":4}', [(3, 4)]),
        ('{"prompt_tokens":-1,"completion_tokens":true}', [(None, None)]),
        ('"much"', []),
        ("null", []),
    ],
)
def test_whole_replies(usage: str, told: list[Any]) -> None:
    counted: list[Any] = []
    body = f'{{"model":"r@v1","usage":{usage}}}'.encode()
    got = rewrite_json(body, "r@v1", "r", told=lambda a, b: counted.append((a, b)))
    assert (got, counted) == (body.replace(b"r@v1", b"r"), told)


# -- the whole way -----------------------------------------------------------------------------


def _watched(stage: Stage) -> list[Outcome]:
    seen: list[Outcome] = []
    stage.gateway.observers.append(seen.append)
    return seen


def _direct(stage: Stage, **more: Any) -> bytes:
    """What the engine itself answers to the client's request."""
    body = {"model": "router@v1", "messages": [], "stream": True} | more
    answer = httpx.post(f"{stage.engine.url}{CHAT}", json=body, headers={"X-Request-Id": "same"})
    return answer.content.replace(b'"model":"router@v1"', b'"model":"router"')


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stream_options": {"include_usage": False}},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream_options": {"include_usage": False, "continuous_usage_stats": True}},
    ],
)
def test_a_stream_is_counted_and_the_client_sees_the_engines_bytes(
    stage: Stage, options: dict[str, Any]
) -> None:
    stage.engine.fingerprint = "vllm-0.32.0-tp1-0badcafe"
    outcomes = _watched(stage)
    body = {"model": "router", "messages": [], "stream": True} | options
    answer = stage.http.post(f"{stage.url}{CHAT}", json=body, headers={"X-Request-Id": "same"})
    assert answer.content == _direct(stage, **options)
    stage.wait(lambda: len(outcomes) == 1)
    [outcome] = outcomes
    unknown = options.get("stream_options", {}).get("continuous_usage_stats") and not options[
        "stream_options"
    ].get("include_usage")
    want = (None, None) if unknown else (2, 5)
    assert (outcome.prompt_tokens, outcome.completion_tokens) == want
    assert outcome.streamed and not outcome.left and outcome.problem is None


def test_a_whole_reply_is_counted(stage: Stage) -> None:
    outcomes = _watched(stage)
    assert stage.chat(n=2).status_code == 200
    stage.wait(lambda: len(outcomes) == 1)
    assert (outcomes[0].prompt_tokens, outcomes[0].completion_tokens) == (2, 6)
    assert outcomes[0].token_s is None
    assert "stream_options" not in stage.engine.bodies(CHAT)[-1]


def test_recorded_streams_hide_and_count_the_same(house: House) -> None:
    with recording_stage(house) as recorder:
        stage = recorder.stage
        stage.engine.fingerprint = "fp"
        outcomes = _watched(stage)
        seen = recorder.ask(stream=True, headers={"X-Request-Id": "same"}).content
        plain = [
            json.loads(x[6:]) for x in _direct(stage).split(b"\n\n") if x.startswith(b"data: {")
        ]
        got = [json.loads(x[6:]) for x in seen.split(b"\n\n") if x.startswith(b"data: {")]
        assert [c["choices"] for c in got] == [c["choices"] for c in plain]
        assert got[-1]["system_fingerprint"] == "fp"
        [turn] = recorder.wait_for_turns(1)
        assert turn.complete and turn.token_ids == [0, 100, 1, 2, 3]
        assert (outcomes[0].prompt_tokens, outcomes[0].completion_tokens) == (2, 5)


def test_a_client_that_leaves_is_told_apart_from_an_engine_that_breaks(house: House) -> None:
    with running_stage(house) as stage:
        outcomes = _watched(stage)
        stage.engine.faults.break_stream_after = 2
        stage.chat(stream=True)
        stage.wait(lambda: len(outcomes) == 1)
        assert outcomes[0].problem is not None and not outcomes[0].left
        stage.engine.faults.break_stream_after = None
        stage.engine.gate = threading.Semaphore(1)
        with stage.http.stream(
            "POST", f"{stage.url}{CHAT}", json={"model": "router", "messages": [], "stream": True}
        ) as answer:
            next(answer.iter_lines())
        stage.wait(lambda: len(outcomes) == 2)
        assert outcomes[1].left and outcomes[1].problem is None
