"""One reading of a log, in a process of its own; prints one JSON object.

Invariant: peak memory is this process's. What the modules take before the log is opened is told
apart. Processor time is this process's alone: what else runs on the machine hardly changes it.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from marft_agents.log import LogReader


def _peak_mib() -> float:
    # What the system says of resource use begins with the memory of the process that forked.
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def _events(log: Path) -> int:
    return sum(event.type == "turn" for event, _ in LogReader(log).events())


def _episodes(log: Path) -> int:
    return sum(len(episode.turns) for episode in LogReader(log).episodes())


def _dataset(log: Path) -> int:
    from marft_agents.training.dataset import read_training_set

    return len(read_training_set(LogReader(log).episodes()).rows)


JOBS: dict[str, Callable[[Path], int]] = {
    "events": _events,
    "episodes": _episodes,
    "dataset": _dataset,
}


def main(job: str, log: Path) -> None:
    if job == "dataset":
        importlib.import_module("marft_agents.training.dataset")  # not what is measured
    before, started, clock = _peak_mib(), time.process_time(), time.perf_counter()
    turns = JOBS[job](log)
    seconds, wall = time.process_time() - started, time.perf_counter() - clock
    measured = {
        "turns": turns,
        "seconds": round(seconds, 3),
        "wall_seconds": round(wall, 3),
        "turns_per_second": round(turns / seconds),
        "peak_mib": round(_peak_mib(), 1),
        "libraries_mib": round(before, 1),
    }
    sys.stdout.write(json.dumps(measured) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
