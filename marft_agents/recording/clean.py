"""Anything the app hands over, made fit for one JSON line.

Invariant: nothing here raises. Text is kept verbatim; only foreign objects become text, and only
base64 payloads are swapped for their hash and size (computed when the event is written: hashing an
image takes the app's time otherwise). What the app says about an episode loses its keys; secrets in
messages are ``redact``'s.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any, cast

from pydantic import BaseModel

from marft_agents.recording.patterns import MASK, under_name

_MAX_DEPTH = 40
_MAX_FOREIGN = 10_000
_DATA_URL = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
_BASE64 = re.compile(r"[A-Za-z0-9+/_=\s-]{512,}")
_PAYLOAD_FROM = 512


def jsonable(value: Any, depth: int = 0) -> Any:
    """A copy of ``value`` made of JSON types only; foreign objects become their text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # an enum's own __str__ would give its name
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if depth >= _MAX_DEPTH:
        return _described(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {_described(k): jsonable(v, depth + 1) for k, v in items}
    if isinstance(value, Sequence | Set) and not isinstance(value, bytes | bytearray | memoryview):
        return [jsonable(v, depth + 1) for v in cast("Sequence[Any]", value)]
    if isinstance(value, BaseModel):
        try:
            return jsonable(value.model_dump(mode="json"), depth + 1)
        except Exception:
            return _described(value)
    return _described(value)


def without_secrets(value: Any) -> Any:
    """A JSON value without the texts under names like ``api_key`` and ``access_token``."""
    if isinstance(value, dict):
        return {
            k: MASK.format(label)
            if isinstance(v, str) and (label := under_name(k, v))
            else without_secrets(v)
            for k, v in cast("dict[str, Any]", value).items()
        }
    if isinstance(value, list):
        return [without_secrets(v) for v in cast("list[Any]", value)]
    return value


def _described(value: Any) -> str:
    try:
        return str(value)[:_MAX_FOREIGN]
    except Exception:
        return f"<{type(value).__name__}>"


class Payload:
    """A long text in a message that may be data; what the log keeps of it is found out later."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def described(self) -> Any:
        """Hash and size of base64 data; the text itself where it is none."""
        url = _DATA_URL.match(self.text)
        if url is None and not _BASE64.fullmatch(self.text):
            return self.text
        payload = self.text[url.end() :] if url else self.text
        try:
            data = base64.b64decode(payload, validate=True)
        except (binascii.Error, ValueError):
            data = payload.encode("utf-8", "replace")
        return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def stored_messages(messages: Any) -> list[dict[str, Any]]:
    """Wire messages as the log keeps them: verbatim, what may be data as ``Payload``."""
    if not isinstance(messages, list):
        return []
    return [_stored_message(m) for m in cast("list[Any]", messages)]


def _stored_message(message: Any) -> dict[str, Any]:
    plain = jsonable(message)
    if not isinstance(plain, dict):
        return {"role": "unknown", "content": plain}
    fields = cast("dict[str, Any]", plain)
    content = fields.get("content")
    if isinstance(content, list):
        fields["content"] = [_stored_part(p) for p in cast("list[Any]", content)]
    elif isinstance(content, dict):
        fields["content"] = _stored_part(content)
    return fields


def _stored_part(part: Any) -> Any:
    if isinstance(part, dict):
        fields = cast("dict[str, Any]", part)
        if fields.get("type") == "text":
            return fields
        return {k: _stored_part(v) for k, v in fields.items()}
    if isinstance(part, list):
        return [_stored_part(v) for v in cast("list[Any]", part)]
    if isinstance(part, str) and (len(part) >= _PAYLOAD_FROM or _DATA_URL.match(part)):
        return Payload(part)
    return part
