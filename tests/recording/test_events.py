"""Server-sent events in every form that the standard allows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marft_agents.recording.events import StreamReader, read_plain
from marft_agents.recording.lines import Lines
from marft_agents.recording.reply import Reply, completion
from marft_agents.testing import Reply as Scripted
from tests.recording.wire_kit import body_of, events_of, stream

PLAIN = Scripted("Grüße 🙂 you", reasoning="Let me think.")


def _read(data: bytes, size: int) -> Reply:
    reader, lines = StreamReader(), Lines()
    for start in range(0, len(data), size):
        reader.take(lines.feed(data[start : start + size]))
    reader.end(lines.rest())
    return reader.reply


def _forms() -> dict[str, bytes]:
    events = events_of(PLAIN)
    plain = stream(events)
    halves = [json.dumps(e, ensure_ascii=False).split(",", 1) for e in events]
    several = "".join(f"data: {a},\ndata: {b}\n\n" for a, b in halves)
    return {
        "lf": plain,
        "crlf": stream(events, end="\r\n"),
        "cr": stream(events, end="\r"),
        "bom": b"\xef\xbb\xbf" + plain,
        "comments": b": ping\n\n" + plain.replace(b"\n\n", b"\n\n: keep-alive\n\n"),
        "no space": plain.replace(b"data: ", b"data:"),
        "other fields": plain.replace(b"data: {", b"event: x\nid: 7\nretry: 10\ndata: {"),
        "several lines": several.encode(),
        "several lines, crlf": several.replace("\n", "\r\n").encode(),
        "no last blank line": stream(events, done=False).removesuffix(b"\n\n"),
        "no last line end": stream(events, done=False).removesuffix(b"\n"),
        "after the end": plain + stream([events[1]], done=False),
    }


@pytest.mark.parametrize("form", _forms())
@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 1 << 20])
def test_a_stream_in_any_form_and_cut_is_the_reply(form: str, size: int) -> None:
    read, want = _read(_forms()[form], size), completion(body_of(PLAIN))
    assert read.choices == want.choices and read.error is None
    assert read.prompt_token_ids == want.prompt_token_ids
    assert read.choices[0].reasoning == "Let me think."
    assert (read.completion_tokens, read.prompt_tokens) == (
        want.completion_tokens,
        want.prompt_tokens,
    )
    assert read.complete(read.choices[0])


def _delta(delta: Any, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": None, "token_ids": [1]}
    return {"id": "c", "model": "m", "choices": [choice | fields]}


END = _delta({}, finish_reason="tool_calls", token_ids=[2])


def _calls(*deltas: Any) -> Any:
    events = [_delta({"tool_calls": [d]}) for d in deltas]
    return _read(stream([*events, END]), 50).choices[0].tool_calls


def test_tool_calls_in_pieces() -> None:
    named = {"id": "a", "type": "function", "function": {"name": "add", "arguments": ""}}
    calls = _calls(
        {"index": 0, **named},
        {"index": 0, "function": {"arguments": '{"x"'}},
        {"index": 1, **named, "id": "b"},
        {"index": 0, "function": {"arguments": ": 1}"}},
        {"index": 1, "id": None, "function": {"name": None, "arguments": "{}"}},
    )
    function = {"name": "add", "arguments": '{"x": 1}'}
    assert calls == [
        {"id": "a", "type": "function", "function": function},
        {"id": "b", "type": "function", "function": {"name": "add", "arguments": "{}"}},
    ]


def test_gaps_in_the_indices_are_no_calls() -> None:
    def one(index: Any, call_id: str) -> Any:
        return {"index": index, "id": call_id, "function": {"name": call_id, "arguments": "{}"}}

    assert [c["id"] for c in _calls(one(7, "late"), one(2, "early"), one(7, "late"))] == [
        "early",
        "late",
    ]


def test_pieces_without_an_index_follow_their_ids() -> None:
    calls = _calls(
        {"id": "a", "function": {"name": "f", "arguments": "{"}},
        {"function": {"arguments": "}"}},
        {"id": "b", "function": {"name": "g", "arguments": "{}"}},
        {"id": "b", "function": {"arguments": " "}},
    )
    assert [(c["id"], c["function"]["arguments"]) for c in calls] == [("a", "{}"), ("b", "{} ")]


def test_custom_tools_and_legacy_functions_are_calls_too() -> None:
    custom = {"index": 0, "id": "a", "type": "custom", "custom": {"name": "sh", "input": "l"}}
    assert _calls(custom, {"index": 0, "custom": {"input": "s"}}) == [
        {"id": "a", "type": "custom", "custom": {"name": "sh", "input": "ls"}}
    ]
    pieces = [{"name": "f", "arguments": "{"}, {"arguments": "}"}]
    events = [_delta({"content": None, "function_call": p}) for p in pieces]
    call = {"id": "", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    choice = _read(stream([*events, END]), 50).choices[0]
    assert (choice.tool_calls, choice.text) == ([call], None)


@pytest.mark.parametrize(
    ("deltas", "text"),
    [
        ([{"content": "a"}, {"content": "b"}], "ab"),
        ([{"content": ""}, {"refusal": "I "}, {"refusal": "can't"}], "I can't"),
        ([{"audio": {"id": "x", "transcript": "spo"}}, {"audio": {"transcript": "ken"}}], "spoken"),
        ([{"content": [{"type": "text", "text": "a"}, {"type": "thinking"}]}], "a"),
    ],
)
def test_words_of_every_kind(deltas: Any, text: str) -> None:
    events = [_delta(d) for d in deltas]
    assert _read(stream([*events, END]), 50).choices[0].text == text


def test_reasoning_under_both_names() -> None:
    events = [
        _delta({"reasoning": "a", "reasoning_content": "a"}),
        _delta({"reasoning_content": "b"}),
    ]
    assert _read(stream([*events, END]), 50).choices[0].reasoning == "ab"


def _whole(*events: Any) -> tuple[bool, str | None]:
    reply = _read(stream(events), 50)
    return reply.complete(reply.choices[0]), reply.error


def test_text_without_ids_is_a_gap() -> None:
    said = _delta({"content": "a"})
    silent = _delta({"content": "b"}, token_ids=None)
    assert _whole(said, END) == (True, None)
    assert _whole(said, silent, END) == (False, None)


def test_an_echo_of_the_prompt_has_no_ids() -> None:
    echoed = _delta({"content": "as I said, "}, token_ids=None)
    said, silent = _delta({"content": "b"}), _delta({"content": "b"}, token_ids=None)
    for events, want in (([echoed, said, END], True), ([echoed, said, silent, END], False)):
        reader = StreamReader(echo=True)
        reader.take(Lines().feed(stream(events)))
        assert reader.reply.complete(reader.reply.choices[0]) == want


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_reply_that_the_engine_gave_up_is_not_complete(reason: str) -> None:
    assert _whole(_delta({"content": "a"}), _delta({}, finish_reason=reason)) == (False, None)


def test_running_usage_counts_its_choice_and_the_last_one_all() -> None:
    def chunk(index: int, used: int, **fields: Any) -> Any:
        return _delta({"content": "a"}, index=index, **fields) | {
            "usage": {"completion_tokens": used, "prompt_tokens": 3}
        }

    ends: Any = {"finish_reason": "stop"}
    events = [chunk(0, 1), chunk(1, 1), chunk(0, 2, **ends), chunk(1, 2, **ends)]
    total = {"choices": [], "usage": {"completion_tokens": 4, "prompt_tokens": 3}}
    for tail, want in (([], True), ([total], True)):
        reader = StreamReader(expected=2)
        reader.take(Lines().feed(stream([*events, *tail])))
        assert [reader.reply.complete(c) for c in reader.reply.choices.values()] == [want, want]
    reader = StreamReader(expected=2)
    reader.take(Lines().feed(stream([*events[:2], chunk(0, 3, **ends), events[3]])))
    assert [reader.reply.complete(c) for c in reader.reply.choices.values()] == [False, True]


def test_prompt_ids_that_do_not_add_up_are_not_what_the_model_read() -> None:
    first = _delta({"content": ""}) | {"prompt_token_ids": [1, 2, 3]}
    used = {"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens": 3}}
    assert _whole(first, END, used)[0]
    used["usage"] = {"completion_tokens": 2, "prompt_tokens": 9}
    assert not _whole(first, END, used)[0]


def test_an_event_that_is_no_json_is_an_error_and_a_cut_one_is_none() -> None:
    good = stream([_delta({"content": "a"})], done=False)
    broken, cut = StreamReader(), StreamReader()
    broken.take(Lines().feed(good + b"data: {oops\n\n" + stream([END])))
    broken.end()
    (lines := Lines()).feed(b'data: {"choices": [')
    cut.take(Lines().feed(good))
    cut.end(lines.rest())
    assert broken.reply.error == "an event of the stream is not JSON"
    assert cut.reply.error is None and not cut.reply.finished
    assert [r.reply.choices[0].token_ids for r in (broken, cut)] == [[1, 2], [1]]


def test_ids_that_are_no_numbers_are_none() -> None:
    reader = StreamReader()
    reader.take(Lines().feed(stream([_delta({"content": "a"}, token_ids=["1", None]), END])))
    assert reader.reply.choices[0].token_ids == [2] and reader.reply.choices[0].gap


# -- many at a time ----------------------------------------------------------------------------

_ODD = st.sampled_from(
    [
        *(None, "", "x", 0, 1, 0.0, True, [], {}, [None], ["a"], [1, True], {"a": 1}, [{}], [[]]),
        *([{"logprob": value}] for value in ("0.5", 10**400, None)),
    ]
)
_PLACES: list[list[Any]] = [
    ["id"], ["model"], ["usage"], ["error"], ["prompt_token_ids"], ["choices"], ["choices", 0],
    *(["choices", 0, name] for name in ("index", "delta", "token_ids", "logprobs")),
    ["choices", 0, "finish_reason"],
    *(["choices", 0, "delta", name] for name in ("content", "role", "reasoning", "tool_calls")),
    *(["choices", 0, "delta", name] for name in ("function_call", "refusal", "audio", "other")),
    ["choices", 0, "logprobs", "content"],
]  # fmt: skip


def _chunk(number: int) -> dict[str, Any]:
    logprobs = {"content": [{"token": "t", "logprob": -0.5 * number}]}
    choice = {"index": 0, "delta": {"content": f"w{number} "}, "finish_reason": None}
    choice |= {"token_ids": [number], "logprobs": logprobs}
    return {"id": "r", "model": "m", "choices": [choice]}


def _changed(chunk: dict[str, Any], place: list[Any], value: Any) -> dict[str, Any]:
    at: Any = chunk
    for name in place[:-1]:
        at = at[name]
    at[place[-1]] = value
    return chunk


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(st.integers(0, 7), st.tuples(st.sampled_from(_PLACES), _ODD)))
def test_events_read_many_at_a_time_are_those_read_one_by_one(odd: dict[int, Any]) -> None:
    chunks = [_changed(_chunk(i), *odd[i]) if i in odd else _chunk(i) for i in range(8)]
    together, data = StreamReader(), stream(chunks, done=False)
    together.take_next(data)
    alone = _read(data, len(data))
    assert repr(together.reply) == repr(alone)  # nan is not equal to itself


def test_most_events_are_read_many_at_a_time() -> None:
    chunks: list[Any] = [_chunk(i) for i in range(5)]
    assert read_plain(Reply(streamed=True), chunks, 0) == 0  # who answers is not known yet
    reader = StreamReader()
    reader.take_next(stream(chunks[:1], done=False))
    assert read_plain(reader.reply, chunks, 1) == 4
    assert reader.reply.choices[0].text == "w0 w1 w2 w3 w4 "
