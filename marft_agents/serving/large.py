"""JSON of large bodies, written in a thread without keeping the others from running.

Invariant: what is written is what the quick way gives, to the byte. That one holds Python's lock
for a whole body, also in a thread; here it can be had between any two entries of the lists in the
body's members (messages, prompts). A single text, or a list of numbers, is still one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from pydantic_core import to_json

from marft_agents.schema import JsonDict

LARGE = 256 * 1024
"""Bytes of a body above which it is read and written here."""
MOST_ENTRIES = 100_000
"""A longer list takes too long in Python, and is written at once."""


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
