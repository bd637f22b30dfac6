"""Programs that tests run in processes of their own: ``python -m tests.log.writing JOB FOLDER``."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from marft_agents import MarftRecorder
from marft_agents.log import LogWriter
from tests.log.events import turn


def killed(folder: Path, rounds: int = 10) -> None:
    """Fork writers and kill each at another moment; print the names of what they acknowledged."""
    for number in range(rounds):
        read_end, write_end = os.pipe()
        child = os.fork()
        if not child:
            writer = LogWriter(folder)
            for event in range(100_000):
                name = f"{number}-{event}"
                writer.write(turn(event, turn_id=name, response_id=name, text="y" * 5000))
                os.write(write_end, name.encode() + b"\n")
            os._exit(0)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as acknowledged:
            lines = [acknowledged.readline() for _ in range(1 + 3 * number)]
            time.sleep(0.0007 * number)  # another moment within a write each time
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            lines += acknowledged.read().splitlines(keepends=True)
        sys.stdout.buffer.write(b"".join(line for line in lines if line.endswith(b"\n")))


def _in_threads(work: Callable[[int], None]) -> None:
    workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def threads(folder: Path) -> None:
    """Eight threads write 25 events each through one writer; print the names."""
    writer = LogWriter(folder)
    written: list[str] = []

    def write(thread: int) -> None:
        for event in range(25):
            name = f"{os.getpid()}-{thread}-{event}"
            writer.write(turn(event, turn_id=name, response_id=name, text="z" * 7000))
            written.append(name)

    _in_threads(write)
    print(*written, sep="\n")


def recorded(folder: Path) -> None:
    """Eight threads record five episodes of five turns each; print the names of the turns."""
    recorder = MarftRecorder(folder)
    emitted: list[str] = []

    def record(thread: int) -> None:
        for number in range(5):
            with recorder.episode(id=f"{os.getpid()}-{thread}-{number}") as episode:
                for step in range(5):
                    name = f"{episode.id}-{step}"
                    recorder.core.emit(
                        turn(step, episode=episode.id, turn_id=name, text="z" * 7000)
                    )
                    emitted.append(name)

    _in_threads(record)
    recorder.close()
    print(*emitted, sep="\n")


def forked(folder: Path) -> None:
    """Fork while another thread is inside ``write``; both sides go on writing."""
    writer = LogWriter(folder)
    writer.write(turn(0, turn_id="before"))
    inside, go_on = threading.Event(), threading.Event()
    whole = os.write

    def slow(fd: int, data: bytes) -> int:
        inside.set()
        go_on.wait()
        return whole(fd, data)

    os.write = slow
    other = threading.Thread(target=writer.write, args=(turn(1, turn_id="thread"),))
    other.start()
    inside.wait()
    child = os.fork()
    os.write = whole
    if not child:
        writer.write(turn(2, turn_id="child"))
        os._exit(0)
    os.waitpid(child, 0)
    go_on.set()
    other.join()
    writer.write(turn(3, turn_id="after"))
    print("before", "thread", "child", "after", sep="\n")


if __name__ == "__main__":
    jobs: dict[str, Callable[[Path], None]] = {
        "killed": killed,
        "threads": threads,
        "recorded": recorded,
        "forked": forked,
    }
    jobs[sys.argv[1]](Path(sys.argv[2]))
