"""The request that goes out in place of the app's.

Invariant: method, address, extensions and every header of the app stay; the body's length follows
the body. Built with the type that came in, so that ``httpx`` and ``httpx2`` are the same. What the
SDKs send is copied, which takes a quarter of the time; anything else is built by its own class.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import quote

from marft_agents.schema import JsonDict

TOKEN_FIELDS: JsonDict = {"return_token_ids": True, "logprobs": True}
_OURS = ("X-Marft-Episode", "X-Marft-Agent")
_LONGEST_NAME = 1024
_LENGTH = b"content-length"
_UNUSUAL = frozenset({b"transfer-encoding", *(name.lower().encode() for name in _OURS)})

Header = tuple[bytes, bytes, bytes]
"""Name, name in lower case, value."""


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
    return copied(request, content, identity) or built_anew(request, content, identity)


def copied(request: Any, content: bytes, identity: tuple[str, str] | None) -> Any | None:
    """The same as ``built_anew``; ``None`` for a request that is not as the SDKs make it."""
    given: Any = vars(request.headers).get("_list")
    added = _headers(*identity) if identity else ()
    if type(given) is not list or type(request.stream).__name__ != "ByteStream" or added is None:
        return None
    # Headers as their class keeps them; to set some by their names reads all others each time.
    listed = cast("list[Header]", given)
    names = {lower for _, lower, _ in listed}
    if not listed or listed[-1][1] != _LENGTH or len(names) != len(listed):
        return None
    if not names.isdisjoint(_UNUSUAL):
        return None
    made: Any = object.__new__(type(request))
    fields = vars(made)
    fields.update(vars(request))
    fields["headers"] = headers = type(request.headers)(request.headers)
    length = (b"Content-Length", _LENGTH, b"%d" % len(content))
    vars(headers)["_list"] = [*listed[:-1], length, *added]
    fields["extensions"] = dict(request.extensions)
    fields["stream"] = type(request.stream)(content)
    fields["_content"] = content
    return made


@functools.lru_cache(maxsize=1024)
def _headers(*identity: str) -> tuple[Header, ...] | None:
    """Our headers, ``None`` where one is too long to be sent."""
    named = zip(_OURS, map(_quoted, identity), strict=True)
    made = [(name.encode(), name.lower().encode(), value.encode()) for name, value in named]
    return None if any(len(value) > _LONGEST_NAME for _, _, value in made) else tuple(made)


def built_anew(request: Any, content: bytes, identity: tuple[str, str] | None) -> Any:
    """``request`` with another body, through the public doors of its class alone."""
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
