"""About how much memory an event holds, cheaply.

Invariant: an upper estimate is not needed, an order of magnitude is: texts count their length,
lists of numbers their length, and everything else a little.
"""

from __future__ import annotations

from typing import Any, cast

from marft_agents.recording.clean import Payload
from marft_agents.schema import Event

_SMALL = 64
_NUMBER = 32
_MAX_DEPTH = 50


def held_bytes(event: Event) -> int:
    """Bytes held by the texts, lists and mappings of an event."""
    total = _SMALL
    for _, value in event:
        total += len(value) if type(value) is str else _size(value, 0)
    return total


def _size(value: Any, depth: int) -> int:
    kind = type(value)
    total = _SMALL
    if depth > _MAX_DEPTH:
        return total
    if kind is dict:  # each message is one: this is what an app's thread waits for
        for item in cast("dict[Any, Any]", value).values():
            total += _SMALL + (len(item) if type(item) is str else _size(item, depth + 1))
    elif kind is list:
        values = cast("list[Any]", value)
        if values and type(values[0]) in (int, float):
            return total + _NUMBER * len(values)
        for item in values:
            total += _size(item, depth + 1)
    elif isinstance(value, str):
        total += len(value)
    elif kind is Payload:
        total += len(cast("Payload", value).text)
    return total
