"""The request that goes out in place of the app's.

Invariant: method, address, extensions and every header of the app stay; the body's length follows
the body. Built with the type that came in, so that ``httpx`` and ``httpx2`` are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from marft_agents.schema import JsonDict

TOKEN_FIELDS: JsonDict = {"return_token_ids": True, "logprobs": True}
_OURS = (b"X-Marft-Episode", b"X-Marft-Agent")
_LONGEST_NAME = 1024


def token_fields(body: Mapping[str, Any]) -> JsonDict:
    """What to add to a request for its tokens; what the app set is respected."""
    put = {name: value for name, value in TOKEN_FIELDS.items() if name not in body}
    if body.get("top_logprobs"):  # without log-probabilities: an error that the app is to see
        put.pop("logprobs", None)
    return put


def rebuilt(request: Any, content: bytes, identity: tuple[str, str] | None) -> Any:
    """``request`` with another body; ``identity``: (episode, agent) to name in headers.

    Servers refuse requests with large headers, so a name that would make one is left out.
    """
    replaced = {b"content-length", *(name.lower() for name in _OURS if identity)}
    headers = [(k, v) for k, v in request.headers.raw if k.lower() not in replaced]
    names = [quote(name, errors="replace").encode() for name in identity or ()]
    ours = [(k, v) for k, v in zip(_OURS, names, strict=False) if len(v) <= _LONGEST_NAME]
    return type(request)(
        request.method,
        request.url,
        headers=[*headers, *ours],
        content=content,
        extensions=request.extensions,
    )
