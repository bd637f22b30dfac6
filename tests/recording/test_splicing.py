"""Replies restored without being read are the ones that reading and writing gives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marft_agents.recording.splicing import (
    chunk_without_tokens,
    events_without_tokens,
    is_whole,
    with_model,
    without_tokens,
)

TRICKY = st.lists(
    st.sampled_from(
        ['"', "\\", "{", "}", "[", "]", ",", ":", "null", "a", " ", "é", "\n", "]},", '":',
         '"token_ids":[1]', '"logprobs":{"content":[', '"finish_reason":', "\u2028", "\x01"]
    ),
    max_size=5,
).map("".join)  # fmt: skip
IDS = st.one_of(st.none(), st.lists(st.integers(0, 200_000), max_size=4))


def _token(text: str) -> dict[str, Any]:
    return {"token": text, "logprob": -0.25, "bytes": [1, 2], "top_logprobs": []}


@st.composite
def _replies(draw: st.DrawFn, *, streamed: bool) -> dict[str, Any]:
    """vLLM's form, now and then with a member more, less, or elsewhere."""
    said: dict[str, Any] = {"content": draw(TRICKY)}
    odd = draw(st.sampled_from(["", "", "", "said", "choice", "top", "order", "two", "token"]))
    if odd == "said":
        said |= {"logprobs": {"content": []}, "token_ids": [5], "tool_calls": [{"index": 1}]}
    tokens = [_token(text) for text in draw(st.lists(TRICKY, max_size=3))]
    if odd == "token" and tokens:
        tokens[0]["more"] = tokens[0].pop("bytes")
    choice: dict[str, Any] = {"index": 0, "delta" if streamed else "message": said}
    choice["logprobs"] = draw(st.sampled_from([None, {"content": tokens}]))
    if odd == "choice":
        choice["other"] = {"content": [{"x": 1}]}
    choice |= {"finish_reason": draw(st.sampled_from([None, "stop"])), "stop_reason": None}
    choice["token_ids"] = draw(IDS)
    if odd == "order":
        choice = dict(reversed(choice.items()))
    kind = "chat.completion.chunk" if streamed else "chat.completion"
    reply: dict[str, Any] = {"id": draw(TRICKY), "object": kind, "created": 1, "model": "m"}
    reply["choices"] = [choice, choice] if odd == "two" else [choice]
    if odd == "top":
        reply["metrics"] = {"prompt_token_ids": [1], "token_ids": [2]}
    return reply | {"usage": draw(st.sampled_from([None, {"a": 1}])), "prompt_token_ids": draw(IDS)}


def _restored(reply: dict[str, Any], ids: bool = True, logprobs: bool = True) -> dict[str, Any]:
    names = (["logprobs"] if logprobs else []) + (["token_ids"] if ids else [])
    choices = [c | dict.fromkeys(names) for c in reply["choices"]]
    return reply | {"choices": choices} | ({"prompt_token_ids": None} if ids else {})


def _written(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


@given(_replies(streamed=False), st.sampled_from([(True, True), (True, False), (False, True)]))
def test_a_reply_without_tokens_is_the_one_read_and_written(
    reply: dict[str, Any], hidden: tuple[bool, bool]
) -> None:
    ids, logprobs = hidden
    got = without_tokens(_written(reply), ids=ids, logprobs=logprobs)
    assert got in (None, _written(_restored(reply, ids, logprobs)))


@given(_replies(streamed=True))
def test_a_chunk_without_tokens_is_the_one_read_and_written(reply: dict[str, Any]) -> None:
    text = _written(reply)
    assert chunk_without_tokens(text) in (None, _written(_restored(reply)))
    assert without_tokens(text) in (None, _written(_restored(reply)))


@given(
    st.lists(_replies(streamed=True), max_size=4),
    st.sampled_from([b"", b"data: {", b"data: [DONE]\n\n", b": hi\n\n", b"\n"]),
)
def test_events_without_tokens_are_those_read_and_written(
    replies: list[dict[str, Any]], behind: bytes
) -> None:
    seen, length = events_without_tokens(_events(replies) + behind)
    some = replies[: seen.count(b"\n\n")]
    assert seen == _events([_restored(reply) for reply in some])
    assert length == len(_events(some))


def _events(replies: list[dict[str, Any]]) -> bytes:
    return b"".join(b"data: %b\n\n" % _written(reply) for reply in replies)


def _usual(kind: str, said: str) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, said: {"content": "Hé [x]"}}
    choice |= {"logprobs": {"content": [_token('"'), _token("é")][: 1 if said == "delta" else 2]}}
    choice |= {"finish_reason": "stop", "stop_reason": None, "token_ids": [1, 2]}
    head: dict[str, Any] = {"id": "c-1", "object": kind, "created": 1, "model": "m"}
    return head | {"choices": [choice], "prompt_token_ids": [3, 4]}


def test_the_usual_forms_are_not_read() -> None:
    """Otherwise the tests above would hold of code that does nothing."""
    reply = _usual("chat.completion", "message")
    reply["usage"] = {"prompt_tokens": 2}
    reply = {k: reply[k] for k in (*list(reply)[:5], "usage", "prompt_token_ids")}
    assert without_tokens(_written(reply)) == _written(_restored(reply))
    chunk = _usual("chat.completion.chunk", "delta")
    chunk["choices"][0]["delta"] = {"content": "Hé"}
    assert chunk_without_tokens(_written(chunk)) == _written(_restored(chunk))
    del chunk["prompt_token_ids"]
    del (want := _restored(chunk))["prompt_token_ids"]
    assert chunk_without_tokens(_written(chunk)) == _written(want)
    events = _events([chunk, chunk])
    assert events_without_tokens(events + events[:9]) == (_events([want, want]), len(events))
    renamed = _events([want | {"model": "x"}] * 2)
    assert events_without_tokens(events, b"x", b"m") == (renamed, len(events))
    assert events_without_tokens(b": hi\n\n" + events) == (b"", 0)


def test_half_an_object_is_no_whole_one() -> None:
    text = _written(_usual("chat.completion.chunk", "delta"))
    assert is_whole(text) and not is_whole(text[: text.index(b"}") + 1])
    assert without_tokens(text[:-1]) is None


@pytest.mark.parametrize(
    ("text", "served", "want"),
    [
        (b'{"id":"1","model":"m@v1","choices":[]}', None, b'{"id":"1","model":"x","choices":[]}'),
        (b'{"model":"m@v1","choices":[]}', b"m@v1", b'{"model":"x","choices":[]}'),
        (b'{"model":"m@v1","choices":[]}', b"other", b'{"model":"m@v1","choices":[]}'),
        (b'{"a":{"model":"m"},"choices":[]}', None, None),
        (b'{"a":"\\"","model":"m","choices":[]}', None, None),
        (b'{"model":"a\\"b","choices":[]}', None, None),
        (b'{"model":"m","choices":[{"model":"m"}]}', None, None),
        (b'{"choices":[],"model":"m"}', None, None),
    ],
)
def test_only_a_model_that_is_certainly_the_replys_own_is_renamed(
    text: bytes, served: bytes | None, want: bytes | None
) -> None:
    assert with_model(text, b"x", served) == want
