"""Children start with a log, die loudly, and never outlive their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from marft_agents.errors import EngineError
from marft_agents.serving import EngineCommand, EngineProcess, GuardedProcess, free_port
from tests.serving import fake_engine

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
FAKE = str(Path(fake_engine.__file__))
# A child that ignores SIGTERM and has a child of its own; it writes both process ids.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
inner = subprocess.Popen(
    [sys.executable, "-S", "-c", "import signal, time; signal.signal(15, 1); time.sleep(60)"])
open(sys.argv[1] + ".part", "w").write(f"{os.getpid()} {inner.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(60)
"""


def _engine(tmp_path: Path, *extra: str) -> EngineProcess:
    port = free_port()
    command = EngineCommand((sys.executable, FAKE, "--port", str(port), *extra))
    return EngineProcess(command, port=port, log=tmp_path / "logs" / "e.log", name="the engine")


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait(what: str, pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def _read_pids(path: Path) -> list[int]:
    deadline = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(pid) for pid in path.read_text().split()]


def test_an_engine_becomes_ready_and_stops(tmp_path: Path) -> None:
    engine = _engine(tmp_path)
    with engine:
        told: list[str] = []
        engine.wait_ready(20, lambda _, line: told.append(line))
        assert told[-1] == "the engine is up; a first request warms it"
        assert engine.running and engine.exit_code is None
        assert engine.tail() == "loading weights"
        with pytest.raises(EngineError, match="started already"):
            engine.start()
    assert not engine.running
    engine.stop()


def test_an_engine_that_dies_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with _engine(tmp_path, "--die") as engine:
        with pytest.raises(EngineError) as caught:
            engine.wait_ready(20)
        for part in ("ended with code 3", str(engine.log), "OutOfMemoryError: no memory left"):
            assert part in str(caught.value)


def test_an_engine_that_is_too_slow(tmp_path: Path) -> None:
    told: list[tuple[float, str]] = []
    with (
        _engine(tmp_path, "--delay", "30") as engine,
        pytest.raises(EngineError, match=r"not ready.*e\.log: loading weights"),
    ):
        engine.wait_ready(0.4, lambda s, line: told.append((s, line)))


def test_a_command_that_is_none(tmp_path: Path) -> None:
    with GuardedProcess(["/no/such/program"], log=tmp_path / "log", name="it") as process:
        process.wait(10)
        with pytest.raises(EngineError, match=r"(?s)it ended with code 127.*/no/such/program"):
            process.check_alive()


def test_environment_is_added_and_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARFT_TEST_SECRET", "x")
    code = "import os; print(os.environ.get('MARFT_TEST_SECRET'), os.environ['MARFT_TEST_NEW'])"
    env = {"MARFT_TEST_SECRET": None, "MARFT_TEST_NEW": "1"}
    argv = [sys.executable, "-c", code]
    with GuardedProcess(argv, log=tmp_path / "log", name="it", env=env) as process:
        process.wait(10)
        assert process.tail() == "None 1"


@LINUX
def test_stop_ends_the_whole_group_even_when_it_resists(tmp_path: Path) -> None:
    pids_file = tmp_path / "pids"
    argv = [sys.executable, "-c", STUBBORN, str(pids_file)]
    process = GuardedProcess(argv, log=tmp_path / "log", name="stubborn")
    process.start()
    pids = _read_pids(pids_file)
    assert all(_alive(pid) for pid in pids)
    process.stop(grace_s=0.2)
    _wait("the group survived stop()", pids)


@LINUX
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_parent_that_dies(tmp_path: Path, how: signal.Signals) -> None:
    code = f"""
        import sys, time
        from pathlib import Path
        from marft_agents.serving import guard, GuardedProcess
        p = GuardedProcess([sys.executable, "-c", {STUBBORN!r}, sys.argv[1]],
                           log=Path(sys.argv[1] + ".log"), name="x")
        p.start()
        time.sleep(60)
    """
    pids_file = tmp_path / "pids"
    # The guard gives its group ten seconds; the test does not wait that long.
    env = os.environ | {"MARFT_GUARD_GRACE_S": "0.2"}
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(pids_file)], env=env
    )
    pids = _read_pids(pids_file)
    os.kill(parent.pid, how)
    parent.wait(10)
    _wait("the group outlived its parent", pids)


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("all well\n", None),
        ("x ERROR [a.py:1] ValueError: bad model\nTraceback ...\n", "ValueError: bad model"),
        (
            "(EngineCore) RuntimeError: unsupported head_dim=8\n"
            "(API) vllm.EngineDeadError: EngineCore encountered an issue.\n"
            "RuntimeError: Engine core initialization failed. See root cause above.\n"
            "nanobind: leaked 64 types!\n",
            "RuntimeError: unsupported head_dim=8",
        ),
        ("starting\nmarft-agents: no such model\n", "marft-agents: no such model"),
        (
            "WARNING fd limit errors like `OSError: [Errno 24] Too many open files`\n"
            "ERROR vllm.v1.EngineDeadError: EngineCore encountered an issue.\n",
            "vllm.v1.EngineDeadError: EngineCore encountered an issue.",
        ),
    ],
)
def test_the_cause_is_found_in_a_long_log(tmp_path: Path, log: str, error: str | None) -> None:
    (tmp_path / "log").write_text(log)
    process = GuardedProcess(["x"], log=tmp_path / "log", name="it")
    assert process.last_error() == error
