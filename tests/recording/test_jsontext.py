"""Edits of JSON on the wire change what they name and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marft_agents.recording.jsontext import JsonObject, parse_json

VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS: Any = st.dictionaries(st.sampled_from('abcduser model{}",: ü\n') | st.text(), VALUES)


@settings(max_examples=150, deadline=None)
@given(before=OBJECTS, put=st.dictionaries(st.sampled_from("abxyz"), VALUES), indent=st.booleans())
def test_an_edit_is_the_edit_of_the_value(before: Any, put: Any, indent: bool) -> None:
    data = json.dumps(before, indent=1 if indent else None, ensure_ascii=indent).encode(
        "utf-8", "surrogatepass"
    )
    fields, edited = JsonObject(data).edited(put, drop=("user", "c"))
    want = {k: v for k, v in before.items() if k not in ("user", "c")} | put
    assert fields == want and json.loads(edited) == want
    assert list(fields) == list(json.loads(edited))


TEXT = b' { "b" : 1.50 ,\n"user":"\\u00fc {\\"user\\":1}", "messages":[ {"a":1e5} ]\t} \n'


def test_bytes_beside_the_edit_stay() -> None:
    assert JsonObject(TEXT).edited()[1] == TEXT
    assert JsonObject(TEXT).edited({"x": [True]})[1] == TEXT.replace(b" ]\t}", b' ],"x":[true]\t}')
    assert JsonObject(TEXT).edited({"b": "ü"})[1] == TEXT.replace(b"1.50", '"ü"'.encode())
    gone = TEXT.replace(b' ,\n"user":"\\u00fc {\\"user\\":1}"', b"")
    assert JsonObject(TEXT).edited(drop=["user"])[1] == gone


@pytest.mark.parametrize(
    ("data", "put", "want"),
    [
        (b"{}", {"a": 1}, b'{"a":1}'),
        (b'{"user":1}', {}, b"{}"),
        (b'{"user":1,"a":2}', {}, b'{"a":2}'),
        (b'{"a":2, "user":1, "user":2}', {}, b'{"a":2}'),
        (b'{"user":1}', {"a": None}, b'{"a":null}'),
    ],
)
def test_members_at_the_edges(data: bytes, put: Any, want: bytes) -> None:
    assert JsonObject(data).edited(put, drop=["user"])[1] == want


NO_OBJECTS = [b"", b"[]", b"1", b"{", b'{"a"}', b'{"a":1,}', b'{"a" 1}', b'{"a":1 "b":2}']
ODD_OBJECTS = [b"{1:2}", b"{} x", b"\xff{}", b'{"a":' + b"[" * 100_000]
OTHER_ENCODINGS = [b"\xef\xbb\xbf{}", '{"a":1}'.encode("utf-16"), '{"a":1}'.encode("utf-16-le")]


@pytest.mark.parametrize("data", [*NO_OBJECTS, *ODD_OBJECTS, *OTHER_ENCODINGS])
def test_what_is_no_object_is_said(data: bytes) -> None:
    with pytest.raises(ValueError):
        JsonObject(data)


@settings(max_examples=100, deadline=None)
@given(value=VALUES)
def test_reading_fast_is_reading(value: Any) -> None:
    assert parse_json(json.dumps(value).encode()) == value


def test_odd_json_is_read_as_json_loads_does() -> None:
    assert parse_json(b'"\\ud800"') == "\ud800"
    assert parse_json('{"a":1}'.encode("utf-16")) == {"a": 1}
    assert str(parse_json(b"[NaN, -Infinity]")) == "[nan, -inf]"
    with pytest.raises(ValueError):
        parse_json(b"[" * 100_000)
