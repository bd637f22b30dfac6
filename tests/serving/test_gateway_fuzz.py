"""Whatever is sent: an answer of the gateway's own making, never a crash, never the bare base."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marft_agents.serving.fields import BEYOND, KNOWN
from tests.serving.conftest import furnished
from tests.serving.recording_kit import RecordingStage, recording_stage
from tests.serving.stage import Stage

FEW = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/tokenize",
    "/detokenize",
    "/v1/chat/completions/render",
    "/episodes/e1/agents/router/v1/chat/completions",
    "/agents/router/v1/chat/completions",
    "/episodes",
    "/episodes/e1/rewards",
    "/episodes/e1/edits",
    "/episodes/e1/humans",
    "/marft/swap",
)
_any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["router", "base", "router@v1", "\ud800", "a" * 300, "http://x", "data:,"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4)
    ),
    max_leaves=12,
)
_parts = st.dictionaries(
    st.sampled_from(["type", "text", "image_url", "url", "uuid", "input_audio", "image_embeds"]),
    _any,
    max_size=4,
)
_messages = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "tool_calls", "name", "tool_call_id", "reasoning"]),
        _any | st.lists(_parts | _any, max_size=3),
        max_size=4,
    )
    | _any,
    max_size=4,
)
_names = st.sampled_from(sorted({*KNOWN["/v1/chat/completions"], *BEYOND, "prompt", "lora", "id"}))
_models = st.sampled_from(["router", "writer@v1", "Router"]) | _any
_bodies = st.fixed_dictionaries(
    {"model": _models, "messages": _messages | _any},
    optional={"n": _any, "stream": st.booleans() | _any, "prompt": _any, "tokens": _any},
).flatmap(
    lambda body: st.dictionaries(_names | st.text(max_size=12), _any, max_size=6).map(
        lambda more: more | body
    )
)
_headers = st.dictionaries(
    st.sampled_from(
        [
            *("authorization", "x-marft-agent", "x-marft-episode", "x-marft-record", "origin"),
            *("x-marft-kind", "x-marft-parent-turn", "x-request-id", "traceparent", "host"),
            *("content-type", "accept", "idempotency-key", "x-stainless-retry-count", "expect"),
            *("x-marft-operator-key", "sec-fetch-site", "cookie", "x-forwarded-for", "te"),
        ]
    ),
    st.binary(max_size=30).filter(lambda v: not set(v) & {0, 10, 13})
    | st.sampled_from(
        [b"gateway", b"e1", b"router", b"Bearer marft:episode=e1", b"Bearer k:marft:"]
    ),
    max_size=4,
)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordingStage]:
    with recording_stage(furnished(tmp_path_factory.mktemp("fuzz"))) as desk:
        yield desk


def _check(stage: Stage, status: int, text: str, before: int) -> None:
    assert 200 <= status < 500, (status, text)
    assert "Traceback" not in text and 'File "' not in text
    asked = {str(seen.body.get("model")) for seen in stage.engine.seen[before:] if seen.body}
    assert asked <= {"router@v1", "writer@v1"}, asked


def _post(stage: Stage, path: str, content: bytes, headers: Any = None) -> None:
    before = len(stage.engine.seen)
    answer = stage.http.post(f"{stage.url}{path}", content=content, headers=headers)
    _check(stage, answer.status_code, answer.text, before)


@FEW
@given(path=st.sampled_from(ROUTES), body=_bodies)
def test_any_json_object(desk: RecordingStage, path: str, body: dict[str, Any]) -> None:
    _post(desk.stage, path, json.dumps(body).encode())


@FEW
@given(path=st.sampled_from(ROUTES), body=_any, as_text=st.booleans(), cut=st.integers(0, 40))
def test_any_json_and_what_is_none(
    desk: RecordingStage, path: str, body: Any, as_text: bool, cut: int
) -> None:
    data = json.dumps(body, ensure_ascii=not as_text).encode("utf-8", "surrogatepass")
    _post(desk.stage, path, data)
    _post(desk.stage, path, data[: len(data) - cut])


@FEW
@given(path=st.sampled_from(ROUTES), body=st.binary(max_size=300))
def test_any_bytes(desk: RecordingStage, path: str, body: bytes) -> None:
    _post(desk.stage, path, body)


@FEW
@given(path=st.sampled_from(ROUTES), headers=_headers)
def test_any_headers(desk: RecordingStage, path: str, headers: dict[str, bytes]) -> None:
    body = {"model": "router", "messages": []}
    raw = [(name.encode(), value) for name, value in headers.items()]
    _raw(desk.stage, b"POST", path.encode(), raw, json.dumps(body).encode())


@FEW
@given(
    method=st.sampled_from([b"GET", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"CONNECT", b"X"]),
    path=st.lists(
        st.sampled_from(
            [
                *(b"/%s" % part.encode() for route in ROUTES for part in route.split("/") if part),
                *(b"//", b"/..", b"/.", b"%2e%2e", b"%2f", b"%00", b"\xc3\xa9", b"?", b"#", b";"),
            ]
        )
        | st.binary(max_size=6).filter(lambda v: not set(v) & {0, 10, 13, 32}),
        max_size=7,
    ).map(b"".join),
)
def test_any_path(desk: RecordingStage, method: bytes, path: bytes) -> None:
    body = {"model": "router", "messages": []}
    _raw(desk.stage, method, path, [], json.dumps(body).encode())


def _raw(
    stage: Stage, method: bytes, path: bytes, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    """As it stands: no client between that would tidy it up."""
    before = len(stage.engine.seen)
    where = httpx.URL(stage.url)
    own = {name.lower() for name, _ in headers}
    lines = [method + b" " + path + b" HTTP/1.1", b"Connection: close"]
    lines += [b"Host: localhost"] if b"host" not in own else []
    lines += [b"Content-Length: %d" % len(body)]
    lines += [name + b": " + value for name, value in headers]
    with socket.create_connection((where.host, where.port or 80), timeout=10) as connection:
        connection.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    if answer.startswith(b"HTTP/1.1 100"):
        answer = answer.partition(b"\r\n\r\n")[2]
    status = int(answer.split(b" ", 2)[1])
    _check(stage, status, answer.decode("latin-1"), before)


def test_nothing_of_all_that_was_an_error_of_the_server(
    desk: RecordingStage, caplog: pytest.LogCaptureFixture
) -> None:
    """The last test: the server still answers, and nothing was left behind."""
    with caplog.at_level(logging.ERROR):
        assert desk.ask().status_code == 200
    admission = desk.stage.gateway.settings.admission
    desk.stage.wait(lambda: not admission.in_flight and not admission.kept_bytes)
    assert not caplog.records
