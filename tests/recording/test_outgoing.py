"""The request that goes out: copied or built anew, it is the same."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from marft_agents.recording.outgoing import built_anew, copied, rebuilt
from tests.recording.wire_kit import HTTP

URL = "http://127.0.0.1:8000/v1/chat/completions"
_NAMES = st.sampled_from(
    ["Authorization", "x-api-key", "X-Marft-Agent", "x-marft-episode", "Cookie", "Host",
     "Content-Length", "Transfer-Encoding", "X-Own"]
)  # fmt: skip
_VALUES = st.sampled_from(["1", "chunked", "Bearer sk-1", "é", ""])
_IDENTITIES = st.none() | st.tuples(st.text(max_size=1100), st.text(max_size=8))


def request(headers: list[tuple[str, str]]) -> Any:
    """A request as the SDKs send it, with these headers in front of those of a body."""
    raw = [(name.encode(), value.encode()) for name, value in headers]
    return HTTP.Request(
        "POST", URL, headers=raw, content=b'{"a":1}', extensions={"timeout": {"read": 1}}
    )


def facts(made: Any) -> tuple[Any, ...]:
    return (
        made.method,
        made.url,
        made.headers.raw,
        made.content,
        b"".join(made.stream),
        made.extensions,
        sorted(vars(made)),
    )


@given(st.lists(st.tuples(_NAMES, _VALUES), max_size=5), st.binary(), _IDENTITIES)
def test_a_copy_is_what_its_class_would_have_made(
    headers: list[tuple[str, str]], content: bytes, identity: tuple[str, str] | None
) -> None:
    app = request(headers)
    before = facts(app)
    quick, slow = copied(app, content, identity), built_anew(app, content, identity)
    assert quick is None or facts(quick) == facts(slow)
    assert facts(rebuilt(app, content, identity)) == facts(slow)
    assert facts(app) == before


def test_a_request_as_the_sdks_make_it_is_copied() -> None:
    app = request([("Authorization", "Bearer sk-1")])
    made = copied(app, b'{"a":1,"b":2}', ("episode", "planner"))
    assert made is not None
    assert made.headers["content-length"] == "13"
    assert made.headers.raw[-2:] == [
        (b"X-Marft-Episode", b"episode"),
        (b"X-Marft-Agent", b"planner"),
    ]
    made.extensions["timeout"] = made.headers["authorization"] = "other"
    assert app.headers["authorization"] == "Bearer sk-1"
    assert app.extensions == {"timeout": {"read": 1}}
