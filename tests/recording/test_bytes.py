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
from tests.recording.wire_kit import (
    ASKED,
    EVENTS,
    Answer,
    Wire,
    body_of,
    events_of,
    fields_of,
    in_pieces,
    stream,
    streamed,
    whole,
)

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


ODD: dict[str, Callable[[Any], bytes]] = {
    "comments and bom": lambda asked: b"\xef\xbb\xbf: hi\r\n\r\n" + _events(asked, end="\r\n"),
    "returns alone": lambda asked: _events(asked, end="\r"),
    "no last end": lambda asked: _events(asked, done=False).rstrip(),
    "after the end": lambda asked: _events(asked) + _events(asked),
    "not utf-8": lambda asked: b"data: {\xff\xfe}\n\n" + _events(asked),
    "several lines": lambda asked: _events(asked).replace(b", ", b",\ndata: "),
    "several lines, crlf": lambda asked: _events(asked, end="\r\n").replace(b", ", b",\r\ndata: "),
    "empty": lambda _: b"",
    "html": lambda _: b"<html>\n<body>bad gateway</body></html>",
    "json": lambda _: json.dumps({"error": {"message": "no"}}).encode(),
}


def _events(asked: Any, **form: Any) -> bytes:
    return stream(events_of("Grüße: a b", request=asked), **form)


@pytest.mark.parametrize("form", ODD)
@pytest.mark.parametrize("kind", [EVENTS, "text/html", None])
@pytest.mark.parametrize("gzipped", [False, True])
@pytest.mark.parametrize("own", [{}, {"logprobs": True}])
def test_streamed_bytes_of_any_kind_pass(
    form: str, kind: str | None, gzipped: bool, own: dict[str, Any]
) -> None:
    def read(client: Any, **request: Any) -> Any:
        create = client.chat.completions.with_streaming_response.create
        with create(stream=True, **request) as response:
            return b"".join(response.iter_bytes())

    def made(request: Any) -> list[bytes]:
        data = ODD[form](fields_of(request))
        return in_pieces(gzip.compress(data) if gzipped else data, 5)

    headers = {"content-encoding": "gzip"} if gzipped else {}
    wires = _both(read, Answer(made=made, kind=kind, headers=headers), own)
    if not own:
        _check(*wires)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_each_event_is_there_with_its_last_byte(end: str) -> None:
    def made(request: Any) -> list[bytes]:
        events = _events(fields_of(request), end=end, done=False).split(end.encode() * 2)
        return [piece + end.encode() * 2 for piece in events]

    def read(client: Any, **request: Any) -> Any:
        create = client.chat.completions.with_streaming_response.create
        with create(stream=True, **request) as response:
            return list(response.iter_bytes())

    _check(*_both(read, Answer(made=made, kind=EVENTS), {}))


@pytest.mark.parametrize(
    "own",
    [
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 2},
        {"logprobs": False},
        {"extra_body": {"return_token_ids": True}},
        {"logprobs": True, "extra_body": {"return_token_ids": True}},
        {"top_logprobs": 2},
        {"logprobs": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("style", [*WHOLE, *STREAMED])
def test_the_app_sees_the_token_fields_that_it_asked_for(style: str, own: dict[str, Any]) -> None:
    text = "Grüße \U0001f642 you"
    if style in WHOLE:
        _both(WHOLE[style], whole(Reply(text, reasoning="Hm. So.")), own)
    if style in STREAMED:
        _both(STREAMED[style], streamed(Reply(text, reasoning="Hm. So.")), own)


def test_chunks_that_come_for_the_sake_of_ids_alone_are_not_seen() -> None:
    def made(request: Any) -> list[bytes]:
        events = events_of("a b c", request=fields_of(request))
        bare = [dict(event) for event in events[2:3]]
        bare[0]["choices"] = [bare[0]["choices"][0] | {"delta": {}}]
        asked = request.get("return_token_ids") or request.get("logprobs")
        return in_pieces(stream([*events[:2], *(bare if asked else ()), *events[2:]]), 11)

    for own in ({}, {"logprobs": True}, {"extra_body": {"return_token_ids": True}}):
        _both(_raw_stream, Answer(made=made, kind=EVENTS), own)


@pytest.mark.parametrize("gzipped", [False, True])
@pytest.mark.parametrize("style", WHOLE)
def test_headers_are_those_of_the_body_that_is_seen(style: str, gzipped: bool) -> None:
    for asked in ({}, ASKED):
        data = json.dumps(body_of("Grüße", fields_of(asked))).encode()
        sent = gzip.compress(data) if gzipped else data
        headers = {"content-encoding": "gzip"} if gzipped else {}
        answer = Answer((sent,), headers=headers | {"content-length": str(len(sent)), "X-A": "b"})
        with MarftRecorder(log=InMemoryLog()) as recorder:
            recorder.attach_client(client := Wire(answer).sdk(), "planner")
            with recorder.episode():
                seen = WHOLE[style](client, model="planner", messages=MESSAGES)
        assert seen[0] == json.dumps(body_of("Grüße", fields_of({}))).encode()
        length = seen[1].get("content-length")
        assert length in (None, str(len(seen[0]))) or (gzipped and seen[0] == data)
        assert (length is None) == (style == "streaming" or (bool(asked) and gzipped))
        assert seen[1].get("content-encoding") == headers.get("content-encoding")
        assert seen[1]["x-a"] == "b"


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

    def body(asked: Any, model: bytes) -> bytes:
        made = json.dumps(body_of("Grüße", fields_of(asked)), indent=1).encode()
        return made.replace(b'"planner"', model)

    def events(asked: Any, model: bytes) -> bytes:
        made = stream(events_of("Grüße you", request=fields_of(asked)), end="\r\n")
        return made.replace(b'"planner"', model)

    for style in (_raw, _streaming):
        seen = routed(style, body(ASKED, b'"lora" '), "application/json")[0]
        assert seen == body({}, b'"gpt" ')
    lines = routed(_streaming_events, events(ASKED, b'"lora"'), EVENTS)
    assert lines == events({}, b'"gpt"').decode().splitlines()


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
