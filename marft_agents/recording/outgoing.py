"""The request that goes out in place of the app's.

Invariant: method, address, extensions and every header of the app stay; the body's length follows
the body. Built with the type that came in, so that ``httpx`` and ``httpx2`` are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from marft_agents.schema import JsonDict

TOKEN_FIELDS: JsonDict = {"return_token_ids": True, "logprobs": True}
_OURS = ("X-Marft-Episode", "X-Marft-Agent")
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
    kind = type(request.stream)
    # Given as its stream, the body does not have all headers written anew.
    body = {"stream": kind(content)} if kind.__name__ == "ByteStream" else {"content": content}
    built = type(request)(
        request.method,
        request.url,
        headers=request.headers,
        extensions=request.extensions,
        **body,
    )
    built.read()
    if "Transfer-Encoding" not in built.headers:
        built.headers["Content-Length"] = str(len(content))
    for header, name in zip(_OURS, identity or (), strict=False):
        quoted = _quoted(name)
        if len(quoted) <= _LONGEST_NAME:
            built.headers[header] = quoted
        else:
            built.headers.pop(header, None)
    return built


@functools.lru_cache(maxsize=1024)
def _quoted(name: str) -> str:
    return quote(name, errors="replace")
