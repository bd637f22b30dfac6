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
_MAX_ITEMS = 500_000
_MAX_BITS = 2048
"""Python refuses to write longer integers in decimals."""
_ITSELF = "<itself>"
_NO_LISTS = (bytes, bytearray, memoryview, range)
_DATA_URL = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
_BASE64 = re.compile(r"[A-Za-z0-9+/_=\s-]{512,}")
_PAYLOAD_FROM = 512


def jsonable(value: Any) -> Any:
    """A copy of ``value`` made of JSON types only; foreign objects become their text.

    So does what holds itself, and what lies beyond ``_MAX_ITEMS`` values: things that refer to each
    other in many ways are few, and have no end when they are written out.
    """
    return _Copy().of(value, 0)


class _Copy:
    """One copy under way: what is being copied, and how many values it may still have."""

    def __init__(self) -> None:
        self._above: set[int] = set()
        self._left = _MAX_ITEMS

    def of(self, value: Any, depth: int) -> Any:
        try:
            return self._plain(value, depth)
        except Exception:  # an object of the app's that cannot be read
            return described(value)

    def _plain(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)  # an enum's own __str__ would give its name
        if isinstance(value, int):
            number = int(value)
            return number if number.bit_length() <= _MAX_BITS else hex(number)[:_MAX_FOREIGN]
        if isinstance(value, float):
            return float(value)
        if id(value) in self._above:
            return _ITSELF
        if depth >= _MAX_DEPTH or self._left < 0:
            return _too_much(value)
        self._above.add(id(value))
        try:
            return self._structure(value, depth + 1)
        finally:
            self._above.discard(id(value))

    def _structure(self, value: Any, depth: int) -> Any:
        if isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value).items()
            return {described(k): self.of(v, depth) for k, v in items}
        if isinstance(value, Sequence | Set) and not isinstance(value, _NO_LISTS):
            values = cast("Sequence[Any]", value)
            if len(values) > _MAX_ITEMS:
                return _too_much(values)
            return [self.of(v, depth) for v in values]
        if isinstance(value, BaseModel):
            return self.of(value.model_dump(mode="json"), depth)
        return described(value)


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


def as_text(value: Any) -> str:
    """A text verbatim, anything else described."""
    return str.__str__(value) if isinstance(value, str) else described(value)


def described(value: Any) -> str:
    """The text of a foreign object, of bounded length; its type where it has none."""
    try:
        return str(value)[:_MAX_FOREIGN]
    except Exception:
        return f"<{type(value).__name__}>"


def _too_much(value: Any) -> str:
    """In place of what is too large or too deep; the text of a structure would be as large."""
    if isinstance(value, Mapping | Sequence | Set):
        return f"<{type(value).__name__} of {len(cast('Sequence[Any]', value))}>"
    return described(value)


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
