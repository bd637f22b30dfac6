"""The promise to the app and to the server: every byte as it would have been without us."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from pydantic import BaseModel

from marft_agents.recording import MarftRecorder
from marft_agents.testing import InMemoryLog, Reply
from tests.recording.wire_kit import EVENTS, Answer, Wire, events_of, stream, streamed, whole

ADDED = b',"return_token_ids":true,"logprobs":true'
MESSAGES: Any = [
    {"role": "developer", "content": "Be brief. \U0001f642"},
    {"role": "user", "name": "ü", "content": [{"type": "text", "text": "a\u2028b\x7f"}]},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1.0}"}},
    ]},
    {"role": "tool", "tool_call_id": "c1", "content": "1e-7 \\ud800"},
]  # fmt: skip
TOOL: Any = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {}}}
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "numbers": {"temperature": 1e-05, "top_p": 1.0, "seed": 2**60, "frequency_penalty": -0.0},
    "tools": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    "legacy": {"functions": [{"name": "f"}], "function_call": {"name": "f"}},
    "format": {"response_format": {"type": "json_object"}, "metadata": {"ü": "é"}},
    "extra": {"extra_body": {"z": {"a": [1, {}]}, "chat_template_kwargs": {"think": False}}},
    "headers": {"extra_headers": {"X-Own": "1"}, "extra_query": {"a": "b c"}, "user": "me"},
    "several": {"n": 2, "stop": ["\n"], "logit_bias": {"5": -100}},
}


class Answered(BaseModel):
    x: int


def _raw(client: Any, **request: Any) -> Any:
    raw = client.chat.completions.with_raw_response.create(**request)
    return raw.content, raw.headers, raw.parse().model_dump()


def _raw_stream(client: Any, **request: Any) -> Any:
    raw = client.chat.completions.with_raw_response.create(stream=True, **request)
    return [chunk.model_dump() for chunk in raw.parse()]


def _streaming(client: Any, **request: Any) -> Any:
    with client.chat.completions.with_streaming_response.create(**request) as response:
        return b"".join(response.iter_bytes()), response.headers


def _streaming_events(client: Any, **request: Any) -> Any:
    create = client.chat.completions.with_streaming_response.create
    with create(stream=True, **request) as response:
        return list(response.iter_lines())


def _helper(client: Any, **request: Any) -> Any:
    with client.chat.completions.stream(**request) as events:
        return [event.type for event in events], events.get_final_completion().model_dump()


WHOLE: dict[str, Callable[..., Any]] = {"raw": _raw, "streaming": _streaming}
STREAMED: dict[str, Callable[..., Any]] = {
    "raw": _raw_stream,
    "streaming": _streaming_events,
    "helper": _helper,
}


def _both(style: Any, answer: Answer, request: dict[str, Any]) -> tuple[Wire, Wire]:
    """Wires of the same app without and with a recorder; the app has seen the same."""
    request = {"model": "planner", "messages": MESSAGES} | request
    plain, recorded = Wire(answer), Wire(answer)
    seen = style(plain.sdk(), **request)
    with MarftRecorder(log=InMemoryLog()) as recorder:
        recorder.attach_client(client := recorded.sdk(), "planner")
        with recorder.episode(id="e 1"):
            assert style(client, **request) == seen
    return plain, recorded


def _headers(request: Any) -> list[tuple[bytes, bytes]]:
    return [(k.lower(), v) for k, v in request.headers.raw if k.lower() != b"content-length"]


def _check(plain: Wire, recorded: Wire) -> None:
    (want,), (got,) = plain.requests, recorded.requests
    assert got.content == want.content.removesuffix(b"}") + ADDED + b"}"
    assert _headers(got) == [
        *_headers(want),
        (b"x-marft-episode", b"e%201"),
        (b"x-marft-agent", b"planner"),
    ]
    assert got.headers["content-length"] == str(len(got.content))
    assert (got.method, got.url, got.extensions) == (want.method, want.url, want.extensions)


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("style", WHOLE)
def test_whole_replies(style: str, request_: dict[str, Any]) -> None:
    _check(*_both(WHOLE[style], whole("Grüße \U0001f642"), request_))


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("style", STREAMED)
def test_streamed_replies(style: str, request_: dict[str, Any]) -> None:
    _check(*_both(STREAMED[style], streamed("Grüße \U0001f642 you"), request_))


def test_parsed_replies() -> None:
    def parse(client: Any, **request: Any) -> Any:
        made = client.chat.completions.parse(response_format=Answered, **request)
        return made.choices[0].message.parsed, made.choices[0].message.content, made.id

    _check(*_both(parse, whole('{"x": 1}'), {}))


ODD = {
    "comments and bom": b"\xef\xbb\xbf: hi\r\n\r\n" + stream(events_of("a b"), end="\r\n"),
    "not utf-8": stream(events_of("a b")).replace(b"a b", b"\xff\xfe"),
    "empty": b"",
    "html": b"<html>\n<body>bad gateway</body></html>",
    "json": json.dumps({"error": {"message": "no"}}).encode(),
}


@pytest.mark.parametrize("data", ODD.values(), ids=ODD)
@pytest.mark.parametrize("kind", [EVENTS, "text/html", None])
@pytest.mark.parametrize("gzipped", [False, True])
def test_streamed_bytes_of_any_kind_pass(data: bytes, kind: str | None, gzipped: bool) -> None:
    def read(client: Any, **request: Any) -> Any:
        create = client.chat.completions.with_streaming_response.create
        with create(stream=True, **request) as response:
            return list(response.iter_bytes())

    headers = {"content-encoding": "gzip"} if gzipped else {}
    sent = gzip.compress(data) if gzipped else data
    pieces = [sent[i : i + 5] for i in range(0, len(sent), 5)]
    _check(*_both(read, Answer(pieces, kind=kind, headers=headers), {}))


@pytest.mark.parametrize("gzipped", [False, True])
def test_a_routed_reply_differs_in_its_model_alone(gzipped: bool) -> None:
    headers = {"content-encoding": "gzip"} if gzipped else {}

    def routed(style: Any, data: bytes, kind: str) -> Any:
        sent = gzip.compress(data) if gzipped else data
        pieces = [sent[i : i + 9] for i in range(0, len(sent), 9)]
        wire = Wire(Answer(pieces, kind=kind, headers=headers))
        with MarftRecorder(log=InMemoryLog(), models={"planner": "lora"}) as recorder:
            recorder.attach_client(client := wire.sdk(), "planner")
            with recorder.episode():
                seen = style(client, model="gpt", messages=MESSAGES)
        assert b'"model":"lora"' in wire.requests[0].content.replace(b" ", b"")
        return seen

    body = whole("Grüße").pieces[0].replace(b'"planner"', b'"lora" ')
    events = stream(events_of("Grüße you"), end="\r\n").replace(b'"planner"', b'"lora"')
    for style in (_raw, _streaming):
        assert routed(style, body, "application/json")[0] == body.replace(b'"lora"', b'"gpt"')
    lines = routed(_streaming_events, events, EVENTS)
    assert lines == events.replace(b'"lora"', b'"gpt"').decode().splitlines()


def test_async_clients_send_and_see_the_same() -> None:
    async def run(wire: Wire, recorder: MarftRecorder | None) -> Any:
        async with wire.async_sdk() as client:
            if recorder is not None:
                recorder.attach_client(client, "planner")
            create = client.chat.completions.create
            request: Any = {"model": "planner", "messages": MESSAGES}
            reply = await create(**request)
            seen = [chunk.model_dump() async for chunk in await create(**request, stream=True)]
            return reply.model_dump(), seen

    answers = whole("Grüße"), streamed("Grüße \U0001f642 you")
    plain, recorded = Wire(*answers), Wire(*answers)
    want = asyncio.run(run(plain, None))
    with MarftRecorder(log=InMemoryLog()) as recorder, recorder.episode():
        assert asyncio.run(run(recorded, recorder)) == want
    for got, sent in zip(recorded.requests, plain.requests, strict=True):
        assert got.content == sent.content.removesuffix(b"}") + ADDED + b"}"


@pytest.mark.parametrize("owner", ["openai", "vllm"])
@pytest.mark.parametrize("when", ["outside", "closed", "never", "off"])
def test_what_is_not_recorded_is_not_touched(owner: str, when: str) -> None:
    listing = {"data": [{"id": "m", "owned_by": owner}]}
    answers = whole("a"), streamed("a b")
    plain, recorded = Wire(*answers), Wire(*answers, listing=listing)
    request: Any = {"model": "planner", "messages": MESSAGES, "user": "marft:mine"}
    inject: Any = "never" if when == "never" else "auto"
    client = recorded.sdk()
    with MarftRecorder(log=InMemoryLog(), inject=inject, enabled=when != "off") as recorder:
        recorder.attach_client(client, "planner")
        if when == "closed":
            recorder.close()
        inside = recorder.episode(id="e") if when in ("never", "off") else nullcontext()
        with inside:
            seen = _raw(client, **request), _raw_stream(client, **request)
    other = plain.sdk()
    assert seen == (_raw(other, **request), _raw_stream(other, **request))
    for got, want in zip(recorded.requests, plain.requests, strict=True):
        assert (got.content, got.headers.raw) == (want.content, want.headers.raw)
    assert not recorded.others


def test_replies_without_ids_pass_too() -> None:
    plain = Reply("a", with_ids=False)
    _check(*_both(_raw, whole(plain), {}))
