"""Media in the messages of a chat.

Invariant: the engine opens no address that a request names, unless the operator said so; then only
``http`` and ``https``, never a file. Tensors are never unpacked, and no request can reach or
replace what the engine keeps of another's media.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

from marft_agents.schema import JsonDict
from marft_agents.serving.refusals import Refusal

_TEXT = frozenset({"type", "text", "refusal", "thinking", "closed", "name", "cache_control"})
_ADDRESSES = ("image_url", "audio_url", "video_url", "input_image", "file_url", "url")
_TENSORS = frozenset(
    {"image_embeds", "audio_embeds", "video_embeds", "prompt_embeds", "image_pil", "uuid"}
)
_WHY_TENSOR = "the engine would unpack it as a tensor"
_WHY_UUID = "it names media in a cache that all requests share"


def check_media(messages: list[Any], allowed: Collection[str], urls: bool) -> None:
    """Refuse addresses, tensors and shared names in the parts of ``messages``.

    Raises:
        Refusal: 400, naming the field.
    """
    for message in messages:
        if not isinstance(message, dict):
            continue
        content: Any = cast("JsonDict", message).get("content")
        if content is None or isinstance(content, str):
            continue
        for part in cast("list[Any]", content if isinstance(content, list) else [content]):
            if isinstance(part, dict) and not part.keys() <= _TEXT:
                _check_part(cast("JsonDict", part), allowed, urls)


def _check_part(part: JsonDict, allowed: Collection[str], urls: bool) -> None:
    kind: Any = part.get("type")
    names = part.keys() | ({kind} if isinstance(kind, str) else set[str]())
    for name in sorted((names & _TENSORS) - set(allowed)):
        if part.get(name, "") is not None:
            raise _refused(name, _WHY_UUID if name == "uuid" else _WHY_TENSOR)
    for name in _ADDRESSES:
        value: Any = part.get(name)
        if isinstance(value, dict):
            value = cast("JsonDict", value).get("url")
        if isinstance(value, str) and value:
            _check_address(name, value, urls)


def _check_address(name: str, address: str, urls: bool) -> None:
    start = address[:8].lower()
    if start.startswith("data:") or (urls and start.startswith(("http://", "https://"))):
        return
    cure = (
        "send http, https or data: addresses"
        if urls
        else "send the content as a data: URL, or start the server with --allow-media-urls"
    )
    raise Refusal(
        400,
        f"{name}: the engine does not fetch addresses that requests name; {cure}",
        code="media_url_not_allowed",
        param=name,
    )


def _refused(name: str, reason: str) -> Refusal:
    return Refusal(
        400,
        f"the field {name} of a message is not passed on to the engine: {reason}. The operator of"
        f" this server can open it with --allow-field {name}",
        code="field_not_allowed",
        param=name,
    )
