"""Put the name that was asked for back into what the engine answers, and hide what was not.

Invariant: in a reply or a stream's ``data:`` line, the top-level ``model`` changes where it is the
engine's name for the version, and token fields that the gateway asked for on its own account read
as where nobody asked. Every other byte of a stream passes as it came, each line as soon as it is
complete.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection
from typing import Any, cast

_DATA = b"data:"
NOTHING: frozenset[str] = frozenset()


def rewrite_json(
    body: bytes, engine_name: str, asked: str, hidden: Collection[str] = NOTHING
) -> bytes:
    """The JSON body with its model renamed; anything else as it is.

    ``hidden``: of ``token_ids`` and ``logprobs``, what the client is not to see. A chunk that only
    came for their sake becomes empty.
    """
    try:
        value: Any = json.loads(body)
    except ValueError:
        return body
    if not isinstance(value, dict):
        return body
    fields = cast("dict[str, Any]", value)
    if {"token_ids", "logprobs"} <= set(hidden) and _is_bare(fields):
        return b""
    changed = _hide(fields, hidden)
    if fields.get("model") == engine_name:
        fields["model"], changed = asked, True
    if not changed:
        return body
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


def _choices(fields: dict[str, Any]) -> list[dict[str, Any]]:
    choices: Any = fields.get("choices")
    listed = cast("list[Any]", choices) if isinstance(choices, list) else []
    return [cast("dict[str, Any]", choice) for choice in listed if isinstance(choice, dict)]


def _hide(fields: dict[str, Any], hidden: Collection[str]) -> bool:
    """Fields keep their place and lose their value: so engines write what nobody asked for."""
    holders = [(fields, "prompt_token_ids")] if "token_ids" in hidden else []
    holders += [(choice, name) for choice in _choices(fields) for name in hidden]
    found = [(holder, name) for holder, name in holders if holder.get(name) is not None]
    for holder, name in found:
        holder[name] = None
    return bool(found)


def _is_bare(fields: dict[str, Any]) -> bool:
    """A chunk without any text, which vLLM sends to somebody who asked for ids or logprobs."""
    choices = _choices(fields)
    return (
        bool(choices)
        and not fields.get("usage")
        and all(
            choice.get("delta") == {} and choice.get("finish_reason") is None for choice in choices
        )
    )


def rewrite_line(
    line: bytes, engine_name: str, asked: str, hidden: Collection[str] = NOTHING
) -> bytes:
    """One line of a server-sent event, line ending included; empty when nothing of it is left."""
    concerned = hidden or engine_name.encode() in line
    if not line.startswith(_DATA) or not concerned:
        return line
    payload = line[len(_DATA) :]
    text = payload.strip()
    lead = payload[: len(payload) - len(payload.lstrip())]
    tail = payload[len(payload.rstrip()) :]
    renamed = rewrite_json(text, engine_name, asked, hidden)
    return _DATA + lead + renamed + tail if renamed else b""


async def rewrite_stream(
    chunks: AsyncIterator[bytes], engine_name: str, asked: str, hidden: Collection[str] = NOTHING
) -> AsyncIterator[bytes]:
    """Chunks of an event stream, rewritten line by line; only an unfinished line is held back."""
    rest = b""
    dropped = False  # the event before: the blank line that ends it goes with it
    async for chunk in chunks:
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        out: list[bytes] = []
        for line in lines:
            if dropped and not line.strip():
                dropped = False
                continue
            rewritten = rewrite_line(line + b"\n", engine_name, asked, hidden)
            dropped = not rewritten
            out.append(rewritten)
        if written := b"".join(out):
            yield written
    if rest:
        yield rewrite_line(rest, engine_name, asked, hidden)
