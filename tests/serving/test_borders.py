"""Names, sites and sizes are looked at before any route; slow connections are closed."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx
import pytest

from marft_agents.serving import connections
from marft_agents.serving.connections import connection_limit
from tests.serving.stage import House, Stage, running_stage

CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "router", "messages": []}).encode()


def ask(stage: Stage, head: bytes, body: bytes = b"") -> tuple[int, bytes]:
    """The status and the whole answer to a request written by hand."""
    where = httpx.URL(stage.url)
    with socket.create_connection((where.host, where.port or 80), timeout=10) as connection:
        connection.sendall(head.replace(b"\n", b"\r\n") + b"\r\n" + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    return int(answer.split(b" ", 2)[1]), answer


def get(stage: Stage, *headers: bytes, path: bytes = b"/v1/models") -> int:
    lines = [b"GET " + path + b" HTTP/1.1", b"Connection: close", *headers]
    return ask(stage, b"\n".join(lines) + b"\n")[0]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8000", 200),
        ("LOCALHOST.", 200),
        ("127.0.0.1:1", 200),
        ("127.1.2.3", 200),
        ("[::1]:8000", 200),
        ("attacker.example", 403),
        ("attacker.example:8000", 403),
        ("127.0.0.1.attacker.example", 403),
        ("localhost@attacker.example", 403),
        ("10.0.0.1", 403),
        ("0.0.0.0", 403),
        ("[::]", 403),
        ("2130706433", 403),
        ("localhost:80:80", 403),
        ("", 403),
    ],
)
def test_on_loopback_the_server_answers_to_its_own_names(
    quiet_stage: Stage, host: str, status: int
) -> None:
    assert get(quiet_stage, f"Host: {host}".encode()) == status


def test_two_names_are_none(quiet_stage: Stage) -> None:
    assert get(quiet_stage, b"Host: localhost", b"Host: attacker.example") in (400, 403)


def test_further_names_and_other_addresses(house: House) -> None:
    with running_stage(house, allowed_hosts=("Models.Example",)) as stage:
        assert get(stage, b"Host: models.example:9") == 200
        assert get(stage, b"Host: other.example") == 403
    with running_stage(house, loopback=False) as stage:
        assert get(stage, b"Host: any.example") == 200
    with running_stage(house, loopback=False, allowed_hosts=("models.example",)) as stage:
        assert get(stage, b"Host: any.example") == 403
        assert get(stage, b"Host: 10.0.0.1:8000", path=b"/ready") == 200


_SITES: list[tuple[dict[str, str], bool]] = [
    ({}, True),
    ({"Sec-Fetch-Mode": "cors"}, True),
    ({"Sec-Fetch-Site": "none"}, True),
    ({"Sec-Fetch-Site": "same-origin", "Origin": "https://proxy.example"}, True),
    ({"Origin": "http://{host}"}, True),
    ({"Sec-Fetch-Site": "cross-site"}, False),
    ({"Sec-Fetch-Site": "same-site"}, False),
    ({"Origin": "http://attacker.example"}, False),
    ({"Origin": "null"}, False),
    ({"Origin": "http://localhost:1"}, False),
    ({"Origin": ""}, False),
]


@pytest.mark.parametrize(("headers", "good"), _SITES)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/marft/swap"])
def test_no_page_of_another_site_makes_a_model_answer(
    quiet_stage: Stage, path: str, headers: dict[str, str], good: bool
) -> None:
    host = httpx.URL(quiet_stage.url).netloc.decode()
    told = {name: value.format(host=host) for name, value in headers.items()}
    before = len(quiet_stage.engine.seen)
    told |= {"Content-Type": "text/plain"}  # what a page may send without asking first
    answer = quiet_stage.http.post(f"{quiet_stage.url}{path}", content=BODY, headers=told)
    if not good:
        assert answer.status_code == 403 and "another site" in answer.text
        assert len(quiet_stage.engine.seen) == before
    else:
        assert answer.status_code == (401 if path.startswith("/marft") else 200)


def test_no_other_origin_may_read_an_answer(quiet_stage: Stage) -> None:
    headers = {"Origin": "http://x.example", "Access-Control-Request-Method": "POST"}
    for method in ("OPTIONS", "GET", "POST"):
        answer = quiet_stage.http.request(method, f"{quiet_stage.url}{CHAT}", headers=headers)
        assert answer.status_code in (403, 405)
        assert not [name for name in answer.headers if name.startswith("access-control")]


# -- sizes -------------------------------------------------------------------------------------


def test_heads_are_small(quiet_stage: Stage) -> None:
    many = [f"x{i}: 1".encode() for i in range(120)]
    assert get(quiet_stage, b"Host: localhost", *many) == 431
    assert get(quiet_stage, b"Host: localhost", b"x: " + b"a" * 60_000) == 200
    assert get(quiet_stage, b"Host: localhost", path=b"/" + b"a" * 3000) == 414
    assert get(quiet_stage, b"Host: localhost") == 200


def test_a_head_that_does_not_end_is_cut_off(quiet_stage: Stage) -> None:
    where = httpx.URL(quiet_stage.url)
    sent = 0
    with socket.create_connection((where.host, where.port or 80), timeout=10) as connection:
        with pytest.raises(OSError):
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n")
            while sent < 50_000_000:
                connection.sendall(b"x: " + b"a" * 8000 + b"\r\n")
                sent += 8000
        assert sent < 20_000_000  # what the sockets hold, and no more


def _closed_after(stage: Stage, *parts: bytes) -> float:
    """Seconds until the server closes a connection that sends this and then nothing."""
    where = httpx.URL(stage.url)
    with socket.create_connection((where.host, where.port or 80), timeout=10) as connection:
        for part in parts:
            connection.sendall(part)
        begun = time.monotonic()
        while connection.recv(65536):
            pass
        return time.monotonic() - begun


def test_a_connection_that_sends_no_whole_head_is_closed(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.3)
    whole = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with running_stage(house) as stage:
        for parts in ((), (b"GET /v1/mod",), (whole, b"GET /"), (whole + b"GET /",)):
            assert _closed_after(stage, *parts) < 3
        # A reply that takes longer than a head may is not a slow head, nor is what comes after it.
        stage.engine.delay_s = 0.6
        with httpx.Client() as http:
            for _ in range(2):
                answer = http.post(f"{stage.url}{CHAT}", content=BODY)
                assert answer.status_code == 200


def test_a_connection_between_two_requests_is_kept(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.2)
    whole = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with running_stage(house) as stage:
        where = httpx.URL(stage.url)
        with socket.create_connection((where.host, where.port or 80), timeout=10) as connection:
            for _ in range(2):
                connection.sendall(whole)
                assert connection.recv(65536).startswith(b"HTTP/1.1 200")
                time.sleep(0.5)  # the time that is not to matter


def test_a_client_that_does_not_read_its_answer_is_left(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "READER_TIMEOUT_S", 0.3)
    size = 30_000_000
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(BODY)
    with running_stage(house) as stage:
        where = httpx.URL(stage.url)
        for waits, whole in ((0.0, True), (1.5, False)):
            stage.engine.replies.append({"content": "x" * size})
            with socket.create_connection((where.host, where.port or 80), timeout=10) as client:
                client.sendall(head + BODY)
                received = len(client.recv(65536))
                time.sleep(waits)  # while the server must lose its patience
                try:
                    while part := client.recv(1 << 20):
                        received += len(part)
                except ConnectionResetError:
                    assert not whole
            assert (received > size) is whole


def test_requests_to_upgrade_stay_plain_requests(quiet_stage: Stage) -> None:
    upgrade = (b"Connection: upgrade, close", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13")
    assert get(quiet_stage, b"Host: localhost", *upgrade) in (200, 400)
    assert get(quiet_stage, b"Host: localhost", *upgrade, path=b"/v1/realtime") in (400, 404)


def test_there_is_room_for_connections() -> None:
    assert 32 <= connection_limit() <= 8192


@pytest.mark.parametrize("value", [b"\xff\xfe", b"\xc3\xa9", b"a" * 5000, b"x y", b""])
def test_odd_ids_of_requests_break_nothing(quiet_stage: Stage, value: bytes) -> None:
    headers: Any = [(b"X-Request-Id", value), (b"traceparent", value), (b"accept", value)]
    answer = quiet_stage.http.post(f"{quiet_stage.url}{CHAT}", content=BODY, headers=headers)
    assert answer.status_code == 200
