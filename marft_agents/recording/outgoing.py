"""The request that goes out in place of the app's.

Invariant: method, address, extensions and every header of the app stay; the body's length follows
the body. Built with the type that came in, so that ``httpx`` and ``httpx2`` are the same.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from marft_agents.schema import JsonDict

TOKEN_FIELDS: JsonDict = {"return_token_ids": True, "logprobs": True}
_OURS = (b"X-Marft-Episode", b"X-Marft-Agent")


def rebuilt(request: Any, content: bytes, identity: tuple[str, str] | None) -> Any:
    """``request`` with another body; ``identity``: (episode, agent) to name in headers."""
    replaced = {b"content-length", *(name.lower() for name in _OURS if identity)}
    headers = [(k, v) for k, v in request.headers.raw if k.lower() not in replaced]
    names = [quote(name).encode() for name in identity or ()]
    return type(request)(
        request.method,
        request.url,
        headers=[*headers, *zip(_OURS, names, strict=False)],
        content=content,
        extensions=request.extensions,
    )
