"""Asked to stop, ``serve`` finishes what it has begun and begins nothing new."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import httpx
import pytest

from marft_agents.errors import ServerError
from marft_agents.serving import GatewayClient, ServerProcess
from tests.serving.stage import House
from tests.serving.test_server import fake_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
BODY = {"model": "router", "messages": [], "stream": True}


@contextlib.contextmanager
def _server(house: House, *extra: str, pause_s: float = 0.4) -> Generator[ServerProcess]:
    """With an engine that takes ``pause_s`` for each of the four chunks of a stream."""
    arguments = ["--engine", "local", "--engine-python", fake_python(house.root), *extra]
    arguments += [f"--engine-arg=--pause={pause_s}"]
    with ServerProcess(
        house.registry.root, model=house.base_dir, extra=arguments, start_timeout_s=60
    ) as server:
        yield server


def _pid(server: ServerProcess) -> int:
    guard = server.pid
    return int(Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0])


def _until_gone(pid: int, within_s: float) -> float:
    """Seconds until the process has ended."""
    begin = time.monotonic()
    while time.monotonic() - begin < within_s:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                break
        except OSError:
            break
        time.sleep(0.02)
    else:
        raise AssertionError(f"it still runs after {within_s} s")
    return time.monotonic() - begin


def _text(lines: Iterator[str]) -> tuple[str, bool]:
    """What a stream says, and whether it came to its end."""
    said, whole = "", False
    for line in lines:
        if line == "data: [DONE]":
            whole = True
        elif line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: ")).get("choices", ()):
                said += choice["delta"].get("content", "")
    return said, whole


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_a_stream_in_flight_ends_whole_and_new_requests_are_told_to_come_back(
    house: House, how: signal.Signals
) -> None:
    with _server(house) as server, httpx.Client(timeout=20) as http:
        pid, url = _pid(server), f"{server.base_url}/chat/completions"
        with http.stream("POST", url, json=BODY) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(pid, how)
            while (new := httpx.post(url, json=BODY, timeout=10)).status_code == 200:
                pass  # the signal is under way
            assert new.status_code == 503
            assert (new.headers["Connection"], new.headers["Retry-After"]) == ("close", "2")
            assert "is being stopped" in new.json()["error"]["message"]
            with (
                GatewayClient(server.url, adapters_dir=house.registry.root) as operator,
                pytest.raises(ServerError, match="is being stopped"),
            ):
                operator.swap("router", 2)
            assert _text(lines) == ("w0 w1 w2 w3 ", True)
        _until_gone(pid, 15)
        output = server.log.read_text()
        assert "1 request in flight, waiting up to 30 s" in output and "stopped" in output
        assert "Traceback" not in output


def test_a_stream_that_takes_longer_is_broken_off_and_looks_so(house: House) -> None:
    with (
        _server(house, "--stop-timeout", "0.2", pause_s=5.0) as server,
        httpx.Client(timeout=30) as http,
    ):
        pid, url = _pid(server), f"{server.base_url}/chat/completions"
        with http.stream("POST", url, json=BODY) as answer:
            assert answer.status_code == 200
            os.kill(pid, signal.SIGTERM)
            with contextlib.suppress(httpx.RemoteProtocolError):
                assert not _text(answer.iter_lines())[1]
        _until_gone(pid, 15)
        assert "unfinished after 0.2 s" in server.log.read_text()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_stops_at_once(house: House, second: signal.Signals) -> None:
    with _server(house, pause_s=8.0) as server, httpx.Client(timeout=30) as http:
        pid, url = _pid(server), f"{server.base_url}/chat/completions"
        with http.stream("POST", url, json=BODY) as answer:
            assert answer.status_code == 200
            os.kill(pid, signal.SIGTERM)
            while "in flight, waiting" not in server.log.read_text():
                time.sleep(0.02)
            os.kill(pid, second)
            assert _until_gone(pid, 10) < 6.0
        assert "Traceback" not in server.log.read_text()
