"""A reply as nobody's request for tokens would have made it, whatever its text looks like."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marft_agents.recording import MarftRecorder
from marft_agents.recording.lines import Lines
from marft_agents.recording.restoring import Restorer, set_length
from marft_agents.testing import InMemoryLog, Reply, stream_events
from tests.recording.kit import ask
from tests.recording.wire_kit import (
    ASKED,
    EVENTS,
    HTTP,
    Answer,
    Wire,
    body_of,
    events_of,
    fields_of,
    in_pieces,
    stream,
    whole,
)

BOTH = {"token_ids", "logprobs"}
WRITERS: dict[str, dict[str, Any]] = {
    "compact": {"separators": (",", ":"), "ensure_ascii": False},
    "compact, escaped": {"separators": (",", ":")},
    "spaces": {},
    "indented": {"indent": 2, "ensure_ascii": False},
}
TRICKY = (
    'He said "token_ids": [1, 2], "logprobs":{"content":[1]},"finish_reason":0 \\" } ]'
    ' {"model": "planner"} \U0001f642 \x7f\u2028\x01 \\u0041'
)
TOKEN: Any = {"token": '"finish_reason":', "logprob": -1e-7, "bytes": [34], "top_logprobs": []}


def _body(asked: dict[str, Any]) -> dict[str, Any]:
    """A reply of two choices, whose texts and tokens look like what is to be replaced."""
    reply = Reply(texts=(TRICKY, "b"), reasoning=TRICKY, tool_calls=(("model", {"logprobs": [1]}),))
    body = body_of(reply, fields_of(asked) | {"n": 2})
    for choice in body["choices"]:
        if choice["logprobs"]:
            choice["logprobs"]["content"][0] |= TOKEN
            choice["logprobs"]["refusal"] = None
        choice["message"] |= {"logprobs": {"content": None}, "token_ids": [5]}
    return body | {"metrics": {"model": "x", "token_ids": [1]}}


ASKING: dict[str, tuple[dict[str, Any], set[str]]] = {
    "nothing": ({}, BOTH),
    "logprobs": ({"logprobs": True}, {"token_ids"}),
    "ids": ({"return_token_ids": True}, {"logprobs"}),
    "both": (ASKED, set()),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("asking", ASKING)
def test_a_whole_reply_is_the_text_that_was_asked_for(writer: str, asking: str) -> None:
    asked, hidden = ASKING[asking]
    text = json.dumps(_body(ASKED), **WRITERS[writer]).encode()
    want = json.dumps(_body(asked), **WRITERS[writer]).encode()
    assert Restorer(None, hidden).whole(text) == want
    renamed = want.replace(b'"planner"', b'"gr\xc3\xbcn"', 1)
    out = Restorer("grün", hidden).whole(text)
    assert json.loads(out) == json.loads(renamed)
    assert Restorer("grün", hidden, served="planner").whole(text) == out
    assert Restorer("grün", hidden, served="other").whole(text) == want


@pytest.mark.parametrize("last", ["logprobs", "token_ids", "finish_reason"])
@pytest.mark.parametrize("writer", WRITERS)
def test_members_may_come_in_any_order(last: str, writer: str) -> None:
    def written(asked: dict[str, Any]) -> bytes:
        body = _body(asked)
        for choice in body["choices"]:
            choice[last] = choice.pop(last)
        body["choices"] = body.pop("choices")
        return json.dumps(body, **WRITERS[writer]).encode()

    assert Restorer(None, BOTH).whole(written(ASKED)) == written({})


@pytest.mark.parametrize(
    "text",
    [
        b'{"choices":[{"logprobs":{"content":[]},"a":"\\ud800"}],"b":"\xc3\xa9"}',
        b'{"choices":[{"logprobs":{"content":[]},"logprobs":{"content":[1]}}], "x": NaN}',
        '{"choices":[{"token_ids":[1]}]}'.encode("utf-16"),
        b'{"choices" : [{"token_ids" : [1] } ] }',
        b'{"choices":[{"token_ids":["]",[]]},3,null],"model":"\\u0061"}',
    ],
)
def test_odd_texts_say_the_same(text: bytes) -> None:
    want = json.loads(text)
    for choice in want["choices"]:
        if isinstance(choice, dict):
            choice |= dict.fromkeys(BOTH & choice.keys())
    assert repr(json.loads(Restorer(None, BOTH).whole(text))) == repr(want)


@pytest.mark.parametrize(
    "text", [b"", b"no", b"[1]", b'{"choices":3}', b'{"choices":[3]}', b"\xff"]
)
def test_what_is_no_completion_passes(text: bytes) -> None:
    assert Restorer("x", BOTH).whole(text) is text


def test_a_bug_lets_the_text_pass_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Exception] = []
    restorer = Restorer(None, BOTH, failed=told.append)
    monkeypatch.setattr(restorer, "_wanted", None)
    data = stream(events_of("a b"))
    assert restorer.lines(Lines().feed(data)) == data and told


def _stream(asked: dict[str, Any], end: str) -> bytes:
    """Events with texts that look like fields, one that came for the ids alone, one cut in two."""
    body = body_of(Reply(TRICKY, reasoning="a b"), fields_of(asked))
    events = list(stream_events(body, usage=True))
    bare = [json.loads(json.dumps(events[2]))] if asked else []
    for event in bare:
        event["choices"][0]["delta"] = {}
    data = stream([*events[:3], *bare, *events[3:]], end=end)
    cut = stream([events[1]], end=end, done=False).replace(b", ", b"," + end.encode() + b"data: ")
    return b": hi" + end.encode() * 2 + cut + b"event: x" + end.encode() + data


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@given(cuts=st.lists(st.integers(0, 20_000), max_size=30))
def test_a_stream_in_any_cut_is_the_one_that_was_asked_for(end: str, cuts: list[int]) -> None:
    data, want = _stream(ASKED, end), _stream({}, end)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    lines, restorer = Lines(), Restorer(None, BOTH)
    seen = [restorer.lines(lines.feed(data[a:b])) for a, b in itertools.pairwise(edges)]
    assert b"".join(seen) + restorer.end(lines.rest()) == want


def _compact(asked: dict[str, Any], others: bool) -> bytes:
    """Chunks as vLLM writes them, the first with the prompt's ids, perhaps others in between."""
    ids, logprobs = bool(asked.get("return_token_ids")), bool(asked.get("logprobs"))
    out: list[bytes] = []
    for number, word in enumerate(("H\u00e9 ", "[x]", "\n\ndata: {}", "")):
        token = TOKEN | {"token": word, "logprob": -0.5 * number}
        choice: dict[str, Any] = {"index": 0, "delta": {"content": word}}
        choice["logprobs"] = {"content": [token]} if logprobs else None
        choice |= {"finish_reason": None if word else "stop", "stop_reason": None}
        choice["token_ids"] = [40 + number] if ids else None
        chunk: dict[str, Any] = {"id": "c-1", "object": "chat.completion.chunk", "created": 1}
        chunk |= {"model": "planner", "choices": [choice]}
        chunk |= {} if number else {"prompt_token_ids": [3, 4] if ids else None}
        out.append(b"data: %b\n\n" % json.dumps(chunk, **WRITERS["compact"]).encode())
        out += [b": hi\r\n\r\n", b"event: x\ndata: no\n\n"] if others else []
    return b"".join([*out, b"data: [DONE]\n\n"])


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("cut", [1, 7, 100, 333, 10_000])
def test_chunks_in_the_usual_form_are_recorded_and_restored(cut: int, others: bool) -> None:
    def made(request: Any) -> list[bytes]:
        return in_pieces(_compact(request, others), cut)

    wire = Wire(Answer(made=made, kind=EVENTS))
    with wire.recorded() as (client, log):
        create = client.chat.completions.with_streaming_response.create
        messages: Any = [{"role": "user", "content": "a"}]
        with create(model="planner", messages=messages, stream=True) as response:
            assert response.read() == _compact({}, others)
    (turn,) = log.turns
    assert turn.text == "H\u00e9 [x]\n\ndata: {}" and turn.finish_reason == "stop"
    assert turn.prompt_token_ids == [3, 4] and turn.token_ids == [40, 41, 42, 43]
    assert turn.logprobs == [0.0, -0.5, -1.0, -1.5]


def test_a_second_reading_and_one_after_the_call_see_the_same() -> None:
    def made(request: Any) -> list[bytes]:
        return [stream(events_of("a b", request=fields_of(request)))]

    want = b"".join(made({}))
    log = InMemoryLog()
    with MarftRecorder(log=log) as recorder:
        recorder.attach_client(client := Wire(Answer(made=made, kind=EVENTS)).sdk(), "planner")
        with recorder.episode():
            create = client.chat.completions.with_streaming_response.create
            manager = create(
                model="planner", messages=[{"role": "user", "content": "a"}], stream=True
            )
            response = manager.__enter__()
        # The episode is over, and with it the record of this call; the app only reads it now.
        assert response.read() == want
        assert b"".join(response.iter_bytes()) == want
        manager.__exit__(None, None, None)
    assert len(log.turns) == 1


def test_each_chunk_of_an_async_stream_is_there_at_once() -> None:
    """The server sends an event only once the app has seen the one before."""
    seen: list[str | None] = []

    async def run() -> None:
        events = [stream([event], done=False) for event in events_of("a b c")]
        wire = Wire(Answer([*events, b"data: [DONE]\n\n"], kind=EVENTS))
        with MarftRecorder(log=InMemoryLog()) as recorder, recorder.episode():
            async with wire.async_sdk() as client:
                recorder.attach_client(client, "planner")
                create: Any = client.chat.completions.create
                chunks = await create(model="planner", messages=[], stream=True)
                async for chunk in chunks:
                    seen.append(chunk.choices[0].delta.content if chunk.choices else None)
                    extra = chunk.model_extra or {}
                    assert extra.get("prompt_token_ids") is None
                    assert all(c.logprobs is None for c in chunk.choices)

    asyncio.run(run())
    assert seen == ["", "a", " b", " c", None]


def test_the_log_keeps_what_the_app_does_not_see() -> None:
    with Wire(whole("a b")).recorded() as (client, log):
        reply = ask(client)
    assert reply.choices[0].logprobs is None
    assert (reply.choices[0].model_extra or {}).get("token_ids") is None
    want = body_of("a b")["choices"][0]
    assert log.turns[0].token_ids == want["token_ids"]
    assert log.turns[0].logprobs == [t["logprob"] for t in want["logprobs"]["content"]]
    assert log.turns[0].trainable


class _Closed:
    """A response whose headers show nothing but their public side."""

    class _Headers(HTTP.Headers):
        __slots__ = ()

        @property
        def __dict__(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
            return {}

    def __init__(self, headers: list[tuple[bytes, bytes]]) -> None:
        self.headers: Any = self._Headers(headers)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([b"Content-Length", b"content-length", b"Content-Encoding", b"X"]),
            st.sampled_from([b"1", b"gzip", "\u00e9".encode()]),
        ),
        max_size=5,
    ),
    st.none() | st.binary(),
)
def test_a_length_is_corrected_alike_by_name_and_in_place(
    headers: list[tuple[bytes, bytes]], content: bytes | None
) -> None:
    quick, slow = HTTP.Response(200, headers=headers), _Closed(headers)
    set_length(quick, content)
    set_length(slow, content)
    assert quick.headers.raw == slow.headers.raw
