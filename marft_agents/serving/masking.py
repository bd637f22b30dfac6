"""What an engine says of its failures, without the secrets that it quotes.

Invariant: an error reaches the client in the form in which it came, and with every secret masked
that this server's log would mask; so does the key that the engine itself was asked with. A reply
that is none of an error is never touched.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

from marft_agents.recording.lines import NO_JSON, parsed
from marft_agents.recording.patterns import MASK, mask, under_name

_SHORTEST_KEY = 6
_ERROR = b'"error"'
Mask = Callable[[str], str]


def masking(key: str | None) -> Mask:
    """Masks secrets in a text, and ``key``, which need not look like one."""

    def masked(text: str) -> str:
        if key is not None and len(key) >= _SHORTEST_KEY:  # a shorter one is a part of words
            text = text.replace(key, MASK.format("key"))
        return mask(text)[0]

    return masked


def masked_body(content: bytes, masked: Mask) -> bytes:
    """The body of an error; as it is where nothing in it has to be masked."""
    value = parsed(content)
    if value is NO_JSON:
        text = content.decode(errors="replace")
        seen = masked(text)
        return content if seen == text else seen.encode()
    seen = _masked(value, masked)
    return content if seen == value else json.dumps(seen).encode()  # also half a surrogate pair


def masked_events(data: bytes, masked: Mask) -> bytes:
    """Whole lines of an event stream; those that tell of an error as ``masked_body``."""
    if _ERROR not in data:
        return data
    return b"\n".join([_masked_line(line, masked) for line in data.split(b"\n")])


def _masked_line(line: bytes, masked: Mask) -> bytes:
    if not line.startswith(b"data:") or _ERROR not in line:
        return line
    told = line.removeprefix(b"data:")
    value = parsed(told.strip())
    if not isinstance(value, dict) or not cast("dict[str, Any]", value).get("error"):
        return line
    return b"data: " + masked_body(told.strip(), masked)


def _masked(value: Any, masked: Mask) -> Any:
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, list):
        return [_masked(entry, masked) for entry in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {
            name: MASK.format(label)
            if isinstance(entry, str) and (label := under_name(name, entry))
            else _masked(entry, masked)
            for name, entry in cast("dict[str, Any]", value).items()
        }
    return value
