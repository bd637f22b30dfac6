"""``encode_line``: whatever an event holds, one line of valid UTF-8 comes out."""

from __future__ import annotations

import enum
from datetime import date, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from marft_agents.log.encode import encode_line
from marft_agents.log.records import Refusal, parse
from marft_agents.schema import ToolEvent, Turn
from tests.log.events import turn


def _pairless(text: str) -> bool:
    """Whether no two surrogates happen to make up a character."""
    utf16 = text.encode("utf-16", "surrogatepass")
    return utf16.decode("utf-16", "surrogatepass") == text


# Text with lone surrogates on purpose: broken UTF-16 does arrive from tools.
TEXT = st.text(st.characters(exclude_categories=()), max_size=20).filter(_pairless)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=8,
)
ZONES = st.integers(-14 * 60, 14 * 60).map(lambda m: timezone(timedelta(minutes=m)))
TURNS = st.builds(
    Turn,
    episode_id=st.text(min_size=1),
    turn_id=st.text(min_size=1),
    agent=st.text(min_size=1),
    kind=st.sampled_from(["act", "select", "summary"]),
    index=st.integers(0, 9),
    messages=st.lists(st.dictionaries(st.text(max_size=9), JSON, max_size=3), max_size=3),
    text=st.none() | TEXT,
    token_ids=st.none() | st.lists(st.integers(0, 2**31), max_size=4),
    logprobs=st.none() | st.lists(st.floats(allow_nan=False), max_size=4),
    response_id=st.none() | TEXT,
    time=st.datetimes(timezones=ZONES),
    error=st.none() | TEXT,
    latency_s=st.none() | st.floats(allow_nan=False, allow_infinity=False),
)


@given(TURNS)
def test_any_turn_survives_the_line(event: Turn) -> None:
    line = encode_line(event)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    line.decode("utf-8")
    assert parse(line) == event


@pytest.mark.parametrize(
    ("text", "back"),
    [
        ("half a smile \ud83d", "half a smile \ud83d"),
        ("\ude42 the other half", "\ude42 the other half"),
        ("whole: \ud83d\ude42", "whole: 🙂"),
        ("nul \0, newline \n, 🙂", "nul \0, newline \n, 🙂"),
    ],
)
def test_broken_utf16_is_escaped_and_comes_back(text: str, back: str) -> None:
    event = parse(encode_line(turn(0, text=text, messages=[{"content": text}, {text: 1}])))
    assert isinstance(event, Turn)
    assert (event.text, event.messages[0]) == (back, {"content": back})


class _Model(BaseModel):
    name: str = "inner"


class _Colour(enum.StrEnum):
    RED = "red"


class _Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def _knot() -> list[Any]:
    knot: list[Any] = []
    knot += [knot, knot]
    return knot


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (_Model, "_Model"),
        (_Model(), "inner"),
        (_Unprintable(), "not printable: RuntimeError"),
        (Path("/tmp/x"), "/tmp/x"),
        (date(2026, 1, 2), "2026-01-02"),
        (b"\xff\xfe", r"\\xff\\xfe"),
        ({1: "a", (1, 2): "b"}, '"b"'),
        ({"a"}, '"a"'),
        (_Colour.RED, '"red"'),
        (10**60, "1000000"),
        (_knot(), "in itself"),
        (lambda: None, "lambda"),
    ],
)
def test_foreign_objects_become_text(value: Any, want: str) -> None:
    line = encode_line(turn(0, messages=[{"role": "user", "content": [value]}]))
    assert want in line.decode()
    event = parse(line)
    assert isinstance(event, Turn)
    assert event.token_ids == [4, 5]


def test_deep_nesting_is_cut_not_fatal() -> None:
    deep: Any = "bottom"
    for _ in range(5000):
        deep = [deep]
    event = parse(encode_line(ToolEvent(episode_id="e", name="tool", result=deep)))
    assert not isinstance(event, Refusal)


def test_not_finite_numbers_survive() -> None:
    event = parse(encode_line(turn(0, logprobs=[float("-inf"), -0.0])))
    assert isinstance(event, Turn)
    assert event.logprobs == [float("-inf"), 0.0]
    assert event.untrainable_reason is not None
