"""JSON as it is on the wire: read fast, edited without touching anything else.

Invariant: an edit changes the members it names; every other byte stays where and as it was.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Set
from json.decoder import JSONDecoder
from typing import Any, cast

from pydantic_core import from_json

from marft_agents.schema import JsonDict

_DECODER = JSONDecoder()
_SPACE = b" \t\n\r"


def parse_json(data: bytes) -> Any:
    """The value of a JSON text, as ``json.loads`` reads it, in half the time.

    Raises:
        ValueError: no JSON, or nested beyond what can be read.
    """
    try:
        return from_json(data)
    except ValueError:
        try:
            return json.loads(data)  # knows lone surrogates and other encodings, too
        except RecursionError as error:
            raise ValueError("nested too deeply") from error


class JsonObject:
    """A JSON object on the wire: its members as values, and its text to be edited in place.

    Raises:
        ValueError: no JSON object in UTF-8.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        fields = parse_json(data)
        in_utf8 = data.lstrip(_SPACE).startswith(b"{") and data.rstrip(_SPACE).endswith(b"}")
        if not isinstance(fields, dict) or not in_utf8:
            raise ValueError("no JSON object")
        self.fields = cast("JsonDict", fields)

    def edited(
        self, put: Mapping[str, Any] | None = None, drop: Iterable[str] = ()
    ) -> tuple[JsonDict, bytes]:
        """Fields and text with the members ``put`` replaced or added at the end, and others gone.

        A member of ``put`` that is there keeps its place.
        """
        put, gone = dict(put or {}), self.fields.keys() & set(drop)
        kept = {k: v for k, v in self.fields.items() if k not in gone} if gone else self.fields
        fields = kept | put
        added = [_member(k, v) for k, v in put.items() if k not in self.fields]
        data = self._data
        if gone or not put.keys().isdisjoint(self.fields):
            data = _replaced(data.decode(), put, gone).encode()
        if not added:
            return fields, data
        head = data.rstrip(_SPACE).removesuffix(b"}").rstrip(_SPACE)
        comma = b"," if len(fields) > len(added) else b""
        return fields, head + comma + ",".join(added).encode() + data[len(head) :]


def _replaced(text: str, put: JsonDict, gone: Set[str]) -> str:
    """The text of an object with members replaced or gone; separators around the rest stay."""
    pieces: list[str] = []
    before = opened = _skip(text, _skip(text, 0) + 1)
    for name, at, start, end in _members(text, opened):
        separator, before = text[before:at], end
        if name not in gone:
            pieces += [separator] if pieces else []
            pieces.append(text[at:start] + (_dumped(put[name]) if name in put else text[start:end]))
    return text[:opened] + "".join(pieces) + text[before:]


def _members(text: str, at: int) -> Iterator[tuple[str, int, int, int]]:
    """Name, start of the name, start and end of the value of each member."""
    while text[at] == '"':
        name, after = _DECODER.raw_decode(text, at)
        start = _skip(text, _skip(text, after) + 1)
        _, end = _DECODER.raw_decode(text, start)
        yield name, at, start, end
        at = _skip(text, end)
        at = _skip(text, at + 1) if text[at] == "," else at


def revised(data: bytes, have: Any, want: Any) -> bytes:
    """The text of ``have`` with what is another object in ``want`` put in its place.

    Raises:
        ValueError: no text in UTF-8 that can be edited.
    """
    text = data.decode()
    out: list[str] = []
    before = 0
    for start, end, new in _differences(text, _skip(text, 0), len(text.rstrip()), have, want):
        out += [text[before:start], new]
        before = end
    if not out:
        raise ValueError("no such places")
    return "".join([*out, text[before:]]).encode()


def _differences(
    text: str, start: int, end: int, have: Any, want: Any
) -> Iterator[tuple[int, int, str]]:
    """Start, end and new text of each value that is another."""
    if have is want:
        return
    if isinstance(have, dict) and isinstance(want, dict):
        old, new = cast("JsonDict", have), cast("JsonDict", want)
        for name, _, at, to in _members(text, _skip(text, start + 1)):
            yield from _differences(text, at, to, old[name], new[name])
    elif isinstance(have, list) and isinstance(want, list):
        pairs = zip(cast("list[Any]", have), cast("list[Any]", want), strict=True)
        for (at, to), (a, b) in zip(_items(text, _skip(text, start + 1)), pairs, strict=True):
            yield from _differences(text, at, to, a, b)
    else:
        yield start, end, _dumped(want)


def _items(text: str, at: int) -> Iterator[tuple[int, int]]:
    """Start and end of each item of an array."""
    while text[at] != "]":
        _, end = _DECODER.raw_decode(text, at)
        yield at, end
        at = _skip(text, end)
        at = _skip(text, at + 1) if text[at] == "," else at


def _skip(text: str, at: int) -> int:
    while text[at] in " \t\n\r":
        at += 1
    return at


def _member(name: str, value: Any) -> str:
    """The text of one member; those of a request are the same few at every call."""
    if isinstance(value, str | bool):
        return _known_member(name, value)
    return f"{_dumped(name)}:{_dumped(value)}"


@functools.lru_cache(maxsize=256, typed=True)
def _known_member(name: str, value: str | bool) -> str:
    return f"{_dumped(name)}:{_dumped(value)}"


def _dumped(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def mapping(value: Any) -> Mapping[str, Any]:
    """``value`` where it is a JSON object, else an empty one."""
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def mappings(value: Any) -> list[Mapping[str, Any]]:
    """The JSON objects in ``value`` where it is a list."""
    if not isinstance(value, list):
        return []
    return [cast("Mapping[str, Any]", v) for v in cast("list[Any]", value) if isinstance(v, dict)]
