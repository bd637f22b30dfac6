"""JSON of large bodies, read and written in a thread without keeping the others from running.

Invariant: what is read and written is what the quick ways give, to the byte. Those hold Python's
lock for a whole body, also in a thread; here it can be had between any two entries of the lists in
the body's members (messages, prompts). A single text, or a list of numbers, is still one piece.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from typing import Any, cast

from pydantic_core import to_json

from marft_agents.schema import JsonDict

LARGE = 256 * 1024
"""Bytes of a body above which it is read and written here."""
MOST_PIECES = 1_000_000
"""What has more commas takes too long in Python, and is read at once."""
MOST_ENTRIES = 100_000
"""So does a list of more when it is written."""

_decoder: Any = importlib.import_module("json.decoder")
_scanner: Any = importlib.import_module("json.scanner")
_IN_ENTRIES = '"[{'


class PiecewiseDecoder(json.JSONDecoder):
    """Goes through the outer ``levels`` of containers in Python, and through the rest in C."""

    def __init__(self, levels: int, parse_constant: Callable[[str], Any]) -> None:
        super().__init__(parse_constant=parse_constant)
        if not levels:
            return
        whole: Any = self.scan_once  # pyright: ignore[reportAttributeAccessIssue] in C, untyped
        below: Any = PiecewiseDecoder(levels - 1, parse_constant).scan_once  # pyright: ignore

        def members(place: tuple[str, int], strict: bool, _: Any, *more: Any) -> Any:
            return _decoder.JSONObject(place, strict, below, *more)

        def entries(place: tuple[str, int], _: Any) -> Any:
            text, at = place
            if text[at : at + 8].lstrip()[:1] in _IN_ENTRIES:
                return _decoder.JSONArray(place, below)
            return whole(text, at - 1)

        self.parse_object = members
        self.parse_array = entries
        self.scan_once = _scanner.py_make_scanner(self)


def to_json_piecewise(body: JsonDict) -> bytes:
    """As ``to_json``.

    Raises:
        PydanticSerializationError: as there.
    """
    pieces: list[bytes] = []  # joined once: each copy of all of it would keep the lock
    for name, value in body.items():
        pieces += (b"," if pieces else b"{", to_json(name), b":", *_member(value))
    return b"".join([*(pieces or [b"{"]), b"}"])


def _member(value: Any) -> Iterator[bytes]:
    entries = cast("list[Any]", value) if isinstance(value, list) else []
    pieces = len(entries) < MOST_ENTRIES and isinstance(next(iter(entries), 0), dict | list | str)
    if not pieces:
        yield to_json(value)
        return
    for place, entry in enumerate(entries):
        yield b"," if place else b"["
        yield to_json(entry)
    yield b"]"
