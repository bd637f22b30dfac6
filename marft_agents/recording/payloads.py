"""Images and files in what an app says beside its messages: its tasks, and what its tools return.

Invariant: only what declares itself as data is swapped for its hash and size, which are computed
when the event is written; any other text is kept, however long and whatever it looks like.
"""

from __future__ import annotations

from typing import Any, cast

from marft_agents.recording.clean import Payload

_TYPED = frozenset({"mimeType", "mime_type", "media_type", "mediaType"})
_DATA_FIELDS = frozenset({"data", "blob", "base64"})
_HEAD = 220


def without_payloads(value: Any) -> Any:
    """A JSON value whose data URLs, and data beside its media type, are ``Payload``."""
    if isinstance(value, str):
        return Payload(value) if _is_data_url(value) else value
    if isinstance(value, list):
        return [without_payloads(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        typed = not _TYPED.isdisjoint(fields)
        return {
            k: Payload(v)
            if typed and k in _DATA_FIELDS and isinstance(v, str)
            else without_payloads(v)
            for k, v in fields.items()
        }
    return value


def _is_data_url(text: str) -> bool:
    return text[:5].lower() == "data:" and ";base64," in text[:_HEAD].lower()
