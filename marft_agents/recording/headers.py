"""Headers as bytes, read no further than somebody asks.

Invariant: what is returned is a copy, since the app may change its headers at any time.
"""

from __future__ import annotations

from typing import Any

_KEYS = frozenset({b"authorization", b"api-key", b"x-api-key"})


def keys_of(headers: Any) -> list[str]:
    """What the headers of a request hold of keys."""
    return [decoded(v) for k, v in headers.raw if k.lower() in _KEYS]


def by_name(headers: Any) -> dict[bytes, bytes]:
    """A response's headers by their names in lower case."""
    raw = getattr(headers, "raw", None)
    if raw is None:
        raw = [(k.encode(), v.encode()) for k, v in headers.items()]
    return {k.lower(): v for k, v in raw}


def decoded(text: bytes) -> str:
    """The text of a name or value, in whichever of the two encodings it is."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text.decode("latin-1")
