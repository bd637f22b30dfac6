"""Put the name that was asked for back into what the engine answers.

Invariant: only the top-level ``model`` of a reply or of a stream's ``data:`` line changes, and
only where it is the engine's name for the version. Every other byte of a stream passes as it came,
each line as soon as it is complete.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, cast

_DATA = b"data:"


def rewrite_json(body: bytes, engine_name: str, asked: str) -> bytes:
    """The JSON body with its model renamed; anything else as it is."""
    try:
        value: Any = json.loads(body)
    except ValueError:
        return body
    if not isinstance(value, dict):
        return body
    fields = cast("dict[str, Any]", value)
    if fields.get("model") != engine_name:
        return body
    return json.dumps(fields | {"model": asked}, ensure_ascii=False, separators=(",", ":")).encode()


def rewrite_line(line: bytes, engine_name: str, asked: str) -> bytes:
    """One line of a server-sent event, line ending included."""
    if not line.startswith(_DATA) or engine_name.encode() not in line:
        return line
    payload = line[len(_DATA) :]
    text = payload.strip()
    lead = payload[: len(payload) - len(payload.lstrip())]
    tail = payload[len(payload.rstrip()) :]
    return _DATA + lead + rewrite_json(text, engine_name, asked) + tail


async def rewrite_stream(
    chunks: AsyncIterator[bytes], engine_name: str, asked: str
) -> AsyncIterator[bytes]:
    """Chunks of an event stream, renamed line by line; only an unfinished line is held back."""
    rest = b""
    async for chunk in chunks:
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        if lines:
            yield b"".join(rewrite_line(line + b"\n", engine_name, asked) for line in lines)
    if rest:
        yield rewrite_line(rest, engine_name, asked)
