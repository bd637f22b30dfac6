"""``serve`` as users run it: a process with a scripted engine as its child."""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from marft_agents.errors import EngineError
from marft_agents.registry import locks
from marft_agents.serving import GatewayClient, ServerProcess
from marft_agents.serving.server import own_address
from tests.serving import fake_engine
from tests.serving.stage import House

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def fake_python(folder: Path) -> str:
    """An "interpreter" that runs the scripted engine whatever module it is asked for."""
    script = folder / "engine-python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {fake_engine.__file__} "$@"\n')
    script.chmod(0o755)
    return str(script)


@contextmanager
def _server(house: House, *extra: str, agents: tuple[str, ...] = ()) -> Generator[ServerProcess]:
    ours = ["--engine", "local", "--engine-python", fake_python(house.root)]
    arguments = [*([] if "--server" in extra else ours), *extra]
    with ServerProcess(
        house.registry.root,
        model=house.base_dir,
        agents=agents,
        extra=arguments,
        start_timeout_s=30,
    ) as server:
        yield server


def _engine_pid(house: House, index: int = 0) -> int:
    """The scripted engine's process: the one that has its log open."""
    log = str(house.registry.root / f".engine-{index}.log")
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
            if os.readlink(entry / "fd" / "1") == log and b"guard.py" not in b" ".join(command):
                return int(entry.name)
        except OSError:
            continue
    raise AssertionError("no engine process found")


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def _chat(server: ServerProcess, model: str, episode: str | None = None) -> httpx.Response:
    body = {"model": model, "messages": []}
    headers = {"X-Marft-Episode": episode} if episode else {}
    url = f"{server.base_url}/chat/completions"
    return httpx.post(url, json=body, headers=headers, timeout=10)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fd00::1", "http://[fd00::1]:80"),
        ("models.example", "http://models.example:80"),
    ],
)
def test_what_listens_everywhere_is_asked_on_loopback(host: str, address: str) -> None:
    assert own_address(host, 80) == address


def test_serve_answers_swaps_and_leaves_nothing_running(house: House) -> None:
    root = house.registry.root
    with _server(house, agents=("Editor", "router")) as server:
        assert _chat(server, "router").headers["X-Marft-Adapter"] == "router@v1"
        # An agent without an adapter got an untrained one.
        assert house.registry.manifest("editor", 1).untrained
        assert _chat(server, "editor").status_code == 200
        assert server.url in (locks.server_of(root) or "nobody")
        assert stat.S_IMODE((root / ".operator-key").stat().st_mode) == 0o600
        with GatewayClient(server.base_url, adapters_dir=root) as operator:
            assert operator.swap("router", 2)["to"] == 2
            assert operator.state()["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
        assert house.registry.current("router") == 2
        pid = _engine_pid(house)
    assert _gone(pid)
    assert locks.server_of(root) is None
    output = server.log.read_text()
    for part in ("published editor@v1", "loaded router@v1", "ready: base_url", "stopped"):
        assert part in output
    assert f"{server.base_url}," in output
    assert "Traceback" not in output


def test_an_engine_that_is_killed_is_told_and_started_again(house: House) -> None:
    with _server(house) as server:
        old = _engine_pid(house)
        os.kill(old, signal.SIGKILL)
        answer = _chat(server, "router")
        assert answer.status_code == 503 and answer.headers["Retry-After"]
        _until(lambda: "started again" in _message(server), "the reason was not told")
        assert "ended with code 137" in server.log.read_text()
        _until(lambda: _chat(server, "router").status_code == 200, "it was not started again")
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert _engine_pid(house) != old
        output = server.log.read_text()
        for part in ("started again in 1 s", "engine-0 takes requests"):
            assert part in output
        assert (house.registry.root / ".engine-0.log.1").read_text() == "loading weights\n"
        # A swap goes to the new process.
        with GatewayClient(server.base_url, adapters_dir=house.registry.root) as operator:
            assert operator.swap("router", 2)["to"] == 2


def _message(server: ServerProcess) -> str:
    answer = _chat(server, "router")
    return "" if answer.status_code == 200 else answer.json()["error"]["message"]


def test_replicas_share_the_work_and_stand_in_for_each_other(house: House) -> None:
    with _server(house, "--replicas", "2") as server:
        pids = [_engine_pid(house, i) for i in range(2)]
        with GatewayClient(server.base_url, adapters_dir=house.registry.root) as operator:
            assert operator.swap("router", 2)["to"] == 2
            os.kill(pids[1], signal.SIGKILL)
            for i in range(30):
                answer = _chat(server, "router", episode=f"e{i}")
                assert answer.headers["X-Marft-Adapter"] == "router@v2"
            # One that is down does not hold up a swap, and has it before it comes back.
            assert operator.swap("router", 1)["to"] == 1
            _until(lambda: "engine-1 takes requests" in server.log.read_text(), "it did not return")
            for i in range(30):
                answer = _chat(server, "router", episode=f"new{i}")
                assert answer.headers["X-Marft-Adapter"] == "router@v1"
    assert all(_gone(pid) for pid in pids)


def test_the_engine_does_not_outlive_a_killed_serve(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARFT_GUARD_GRACE_S", "0.2")
    with _server(house, "--replicas", "2") as server:
        pids = [_engine_pid(house, i) for i in range(2)]
        for entry in Path("/proc").glob("[0-9]*"):
            command = (entry / "cmdline").read_bytes().split(b"\0") if entry.exists() else []
            ours = b"serve" in command and str(server.port).encode() in command
            if ours and b"guard.py" not in b" ".join(command):
                os.kill(int(entry.name), signal.SIGKILL)
        _until(lambda: all(map(_gone, pids)), "an engine outlived serve")


def test_an_engine_that_does_not_start(house: House) -> None:
    with pytest.raises(EngineError) as caught, _server(house, "--engine-arg=--die"):
        pass
    message = str(caught.value)
    assert "marft-agents serve ended with code 2" in message
    assert "the local engine ended with code 3" in message
    assert "OutOfMemoryError: no memory left" in message
    assert "Traceback" not in message


def test_an_engine_that_runs_elsewhere(house: House) -> None:
    with fake_engine.FakeEngine() as engine:
        with _server(house, "--server", engine.url) as server:
            answer = _chat(server, "router")
            assert answer.status_code == 200
            # What that engine was started with is not known here.
            assert "X-Marft-Logprobs-Mode" not in answer.headers
            assert "X-Marft-Sampling-Defaults" not in answer.headers
        with _server(house, "--server", engine.url, "--logprobs-mode", "raw_logprobs") as server:
            assert _chat(server, "router").headers["X-Marft-Logprobs-Mode"] == "raw_logprobs"
        assert engine.events[:2] == ["load router@v1", "load writer@v1"]
