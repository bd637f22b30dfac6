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
    return _SMALL + sum(_size(value, 0) for _, value in event)


def _size(value: Any, depth: int) -> int:
    if isinstance(value, str):
        return _SMALL + len(value)
    if isinstance(value, Payload):
        return _SMALL + len(value.text)
    if depth > _MAX_DEPTH:
        return _SMALL
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return _SMALL + sum(_SMALL + _size(item, depth + 1) for _, item in items)
    if isinstance(value, list):
        values = cast("list[Any]", value)
        if values and isinstance(values[0], int | float):
            return _SMALL + _NUMBER * len(values)
        return _SMALL + sum(_size(item, depth + 1) for item in values)
    return _SMALL
