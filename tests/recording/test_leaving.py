"""However a process ends or copies itself: what was recorded is on disk, and nothing hangs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from marft_agents.log import LogReader
from marft_agents.recording import MarftRecorder, capture
from marft_agents.recording.safety import Safety
from marft_agents.recording.sink import Sink
from marft_agents.schema import HumanEvent
from marft_agents.testing import InMemoryLog

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
METHODS = ("fork", "forkserver", "spawn")


def _run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", code, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


ENDINGS = {
    "atexit handler that runs after the recorder's": (
        """
import atexit, sys
atexit.register(lambda: recorder.reward("e", 1.0))
from marft_agents import MarftRecorder
recorder = MarftRecorder(sys.argv[1])
with recorder.episode(id="e"):
    pass
""",
        0,
    ),
    "first event of all in an atexit handler": (
        """
import atexit, sys
def late():
    with recorder.episode(id="e") as episode:
        episode.reward(1.0)
atexit.register(late)
from marft_agents import MarftRecorder
recorder = MarftRecorder(sys.argv[1])
""",
        0,
    ),
    "SystemExit inside the episode": (
        """
import sys
from marft_agents import MarftRecorder
with MarftRecorder(sys.argv[1]).episode(id="e") as episode:
    episode.reward(1.0)
    raise SystemExit(7)
""",
        7,
    ),
    "daemon threads that record to the end": (
        """
import sys, threading
from marft_agents import MarftRecorder
recorder = MarftRecorder(sys.argv[1])
with recorder.episode(id="e") as episode:
    episode.reward(1.0)
begun = threading.Event()
def forever():
    while True:
        with recorder.episode():
            begun.set()
for _ in range(3):
    threading.Thread(target=forever, daemon=True).start()
begun.wait()
""",
        0,
    ),
    "os._exit after flush": (
        """
import os, sys
from marft_agents import MarftRecorder
recorder = MarftRecorder(sys.argv[1])
with recorder.episode(id="e") as episode:
    episode.reward(1.0)
assert recorder.flush()
os._exit(5)
""",
        5,
    ),
}


@pytest.mark.parametrize(("code", "status"), ENDINGS.values(), ids=ENDINGS)
def test_endings(tmp_path: Path, code: str, status: int) -> None:
    done = _run(code, tmp_path)
    unexpected = [x for x in done.stderr.splitlines() if "recorded no model call" not in x]
    assert (done.returncode, unexpected) == (status, [])
    episode = LogReader(tmp_path).episode("e")
    assert episode.started and episode.ended and episode.team_reward == 1.0


def test_a_disk_that_hangs_delays_the_end_of_a_process_once(tmp_path: Path) -> None:
    done = _run(
        """
import atexit, threading, time
atexit.register(lambda: print(time.monotonic() - began))
from marft_agents import MarftRecorder
from marft_agents.recording import leaving
leaving.TIMEOUT_S = 0.2
class Hanging:
    def write(self, event): threading.Event().wait()
    def close(self): pass
recorders = [MarftRecorder(log=Hanging()) for _ in range(20)]
for recorder in recorders:
    with recorder.episode():
        pass
began = time.monotonic()
""",
        tmp_path,
    )
    assert done.returncode == 0 and float(done.stdout) < 3
    assert "leaves 2 events unwritten" in done.stderr


def _work(folder: str) -> None:
    recorder = MarftRecorder(folder)
    with recorder.episode(id=f"worker {os.getpid()}") as episode:
        episode.reward(1.0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
@pytest.mark.parametrize("method", METHODS)
def test_workers_of_every_start_method_lose_nothing(tmp_path: Path, method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    with MarftRecorder(tmp_path) as recorder, recorder.episode(id="parent"):
        workers = [context.Process(target=_work, args=(str(tmp_path),)) for _ in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    episodes = list(LogReader(tmp_path).episodes())
    assert len(episodes) == 3 and all(e.started and e.ended for e in episodes)
    assert sorted(e.team_reward or 0 for e in episodes) == [0, 1, 1]


def test_a_pool_of_processes_loses_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        list(pool.map(_work, [str(tmp_path)] * 6))
    events = [event for event, _ in LogReader(tmp_path).events()]
    assert len(events) == 18


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_fork_while_another_thread_is_inside_the_recorder() -> None:
    """Locks that a thread holds at the fork are never let go of in the child."""
    safety = Safety(False)
    sink = Sink(log := InMemoryLog(), safety)
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with sink._changed, safety._lock, capture._lock:  # pyright: ignore[reportPrivateUsage]
            held.set()
            go_on.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        failed = True
        signal.alarm(20)  # a deadlock fails
        try:
            sink.put(HumanEvent(episode_id="child"))
            safety.warn_once("key", "said")
            with capture._lock:  # pyright: ignore[reportPrivateUsage] the case at hand
                pass
            failed = not sink.close(5) or [e.episode_id for e in log.events] != ["child"]
        finally:
            os._exit(int(failed))
    go_on.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
