"""One event as one line of bytes.

Invariant: ``encode_line`` never fails on what an event holds, and the line is valid UTF-8 with
exactly one newline, at its end. Foreign objects inside free-form fields (a request holding a class,
a path, a date) become text; a lone surrogate in a text is escaped and comes back as it was.
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Mapping
from datetime import date, datetime
from typing import Any, cast

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

from marft_agents.schema import Event

_MAX_DEPTH = 100
_MAX_REPR = 1000


def encode_line(event: Event) -> bytes:
    """The event as JSON, ended by a newline."""
    try:
        text = event.model_dump_json(warnings=False)
    except (PydanticSerializationError, ValueError, TypeError, RecursionError):
        # Escaping everything outside ASCII lets even broken UTF-16 through.
        text = json.dumps(to_plain(event), separators=(",", ":"))
    return text.encode() + b"\n"


def to_plain(value: Any, _above: frozenset[int] = frozenset()) -> Any:
    """``value`` in terms of ``dict``, ``list``, ``str``, numbers, booleans and ``None``."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str | bytes | date):
        return _text(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if id(value) in _above or len(_above) >= _MAX_DEPTH:
        return "<nested too deeply, or in itself>"
    above = _above | {id(value)}
    if isinstance(value, BaseModel):
        return {name: to_plain(item, above) for name, item in value}
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {str(to_plain(key, above)): to_plain(item, above) for key, item in items}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item, above) for item in cast("list[Any]", value)]
    return _foreign(value)


def _text(value: str | bytes | date) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, datetime | date):
        return value.isoformat()
    return str.__str__(value)  # an enum's own __str__ would give its name


def _foreign(value: object) -> str:
    try:
        return repr(value)[:_MAX_REPR]
    except Exception as error:  # a foreign __repr__ may raise anything
        return f"<{type(value).__name__}, not printable: {type(error).__name__}>"
