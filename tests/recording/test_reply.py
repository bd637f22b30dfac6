"""Replies in one piece and in any number of pieces."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marft_agents.recording.events import StreamReader
from marft_agents.recording.lines import Lines
from marft_agents.recording.reply import Reply, completion, error_text
from marft_agents.testing import Reply as Scripted
from marft_agents.testing import completion_body, stream_events

BODY = {"messages": [], "logprobs": True, "return_token_ids": True, "model": "m", "n": 2}
CALLS = (("add", {"a": 1, "b": "é"}), ("noop", {}))


def _whole(reply: Scripted) -> dict[str, Any]:
    return completion_body(reply, BODY, 1)


def _bytes(reply: Scripted) -> bytes:
    events = stream_events(_whole(reply), usage=True)
    lines = [f"data: {json.dumps(e, ensure_ascii=False)}\r\n\r\n" for e in events]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


def _read(data: bytes, cuts: list[int]) -> Reply:
    reader, lines = StreamReader(expected=2), Lines()
    edges = [0, *sorted(cuts), len(data)]
    for start, stop in itertools.pairwise(edges):
        reader.take(lines.feed(data[start:stop]))
    reader.end(lines.rest())
    return reader.reply


SCRIPTED = [Scripted("Grüße 🙂 there"), Scripted(None, tool_calls=CALLS), Scripted("x", CALLS)]


@pytest.mark.parametrize("scripted", SCRIPTED)
@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, 2000), max_size=30))
def test_a_stream_read_in_any_cut_is_the_reply_in_one_piece(
    scripted: Scripted, cuts: list[int]
) -> None:
    whole, data = completion(_whole(scripted), 2), _bytes(scripted)
    read = _read(data, [c for c in cuts if c < len(data)])
    assert read.choices == whole.choices
    assert read.prompt_token_ids == whole.prompt_token_ids
    assert (read.response_id, read.completion_tokens) == ("chatcmpl-1", whole.completion_tokens)
    assert read.finished and all(read.complete(c) for c in read.choices.values())


def test_an_event_without_its_blank_line_counts_and_a_torn_one_does_not() -> None:
    event = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}'
    assert _read(event, []).choices[0].text == "a"
    assert _read(event + b'\n\ndata: {"choices": [{"in', []).choices[0].text == "a"


def test_comments_and_foreign_events_are_ignored() -> None:
    data = b": ping\n\nevent: x\nid: 5\n\ndata: [1]\n\ndata: 7\n\n"
    assert _read(data, []).choices == {}


def test_an_event_may_have_several_data_lines() -> None:
    data = b'data: {"choices": [{"index": 0,\ndata: "delta": {"content": "a"}}]}\n\n'
    assert _read(data, []).choices[0].text == "a"


def test_missing_logprobs_stay_visible_as_not_a_number() -> None:
    body = {"choices": [{"logprobs": {"content": [{"logprob": None}, {"logprob": -1}, 3]}}]}
    logprobs = completion(body).choices[0].logprobs
    assert logprobs is not None and math.isnan(logprobs[0]) and logprobs[1] == -1.0
    assert math.isnan(logprobs[2])


@pytest.mark.parametrize("value", [10**400, "x", None, [], True, -math.inf])
def test_odd_logprobs_cost_nothing_but_themselves(value: Any) -> None:
    body = _whole(Scripted(text="a"))
    body["choices"][0]["logprobs"]["content"][0]["logprob"] = value
    choice = completion(body).choices[0]
    assert choice.text == "a" and choice.logprobs is not None and len(choice.logprobs) == 2


def test_reading_never_invents_what_is_not_there() -> None:
    for body in ({}, {"choices": None}, {"choices": [{}]}, {"choices": ["x"], "usage": 3}):
        reply = completion(body)
        assert reply.prompt_token_ids is None and reply.response_id is None
        assert all(c.token_ids is None and c.text is None for c in reply.choices.values())


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ({"error": {"message": "too long"}}, "too long"),
        ({"error": "plain"}, "plain"),
        ({"message": "old vLLM"}, "old vLLM"),
        ({"detail": "FastAPI"}, "FastAPI"),
    ],
)
def test_error_bodies_of_the_usual_shapes(body: Any, want: str) -> None:
    assert error_text(body) == want
