"""Speed and memory of reading a log.

    python -m benchmarks.recorder.log [--turns 100000 1000000] [--repeats 5] [--quick]

Invariant: every reading is a process of its own; jobs and layouts take turns, in an order that
moves on with each repeat. ``events`` parses every line, ``episodes`` puts episodes together,
``dataset`` makes the rows that training takes, which are on disk and there at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from benchmarks.recorder.log_child import JOBS
from benchmarks.recorder.log_made import LAYOUTS, PROMPT, REPLY, write_log
from benchmarks.recorder.log_report import cells
from benchmarks.records import Record, Results, load_now, machine
from benchmarks.stats import median

RESULTS = Path("benchmarks/recorder/results/log.jsonl")
KEY = ("job", "layout", "log_turns", "repeat")


def measure(job: str, log: Path) -> Record:
    """One process's measurement."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.recorder.log_child", job, str(log)],
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{job} failed:\n{done.stderr[-3000:]}")
    measured: Record = json.loads(done.stdout.strip().splitlines()[-1])
    return measured | {"load": load_now()}


def schedule(repeats: int) -> list[tuple[int, str, str]]:
    """(repeat, layout, job) in the order of measuring."""
    cells = list(product(LAYOUTS, JOBS))
    out: list[tuple[int, str, str]] = []
    for repeat in range(repeats):
        first = repeat % len(cells)
        out += [(repeat, layout, job) for layout, job in cells[first:] + cells[:first]]
    return out


def run(turns: int, repeats: int, results: Results, scratch: Path) -> None:
    """Measure what is not measured yet of a log of ``turns`` turns."""
    logs: dict[str, Path] = {}
    for repeat, layout, job in schedule(repeats):
        key = {"job": job, "layout": layout, "log_turns": turns, "repeat": repeat}
        if results.has(key):
            continue
        if layout not in logs:
            logs[layout] = scratch / f"{layout}-{turns}.jsonl"
            write_log(logs[layout], turns, layout)
        record = measure(job, logs[layout]) | key
        record |= {"bytes": logs[layout].stat().st_size, "turn_tokens": PROMPT + REPLY}
        results.add(record | {"machine": machine()})
    for log in logs.values():
        log.unlink()


def summary(records: Sequence[Record]) -> list[str]:
    """A line a job, layout and size: median of turns per second, its spread, peak memory."""
    lines: list[str] = []
    for (turns, layout, job), seen in sorted(cells(records).items()):
        speeds = sorted(r["turns_per_second"] for r in seen)
        lines.append(
            f"{turns:>9,} turns, {layout:5} {job:8} {median(speeds):>7,.0f} turns/s a core"
            f" ({speeds[0]:,} to {speeds[-1]:,}, {len(seen)} repeats),"
            f" peak {max(r['peak_mib'] for r in seen):,.0f} MiB"
            f" of which {max(r['libraries_mib'] for r in seen):,.0f} before the log is opened"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="2,000 turns, once")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--scratch", type=Path, help="folder for the logs that are read")
    options = parser.parse_args(arguments)
    sizes, repeats = ([2000], 1) if options.quick else (options.turns, options.repeats)
    results = Results(options.out, KEY)
    with tempfile.TemporaryDirectory(prefix="marft-bench-", dir=options.scratch) as scratch:
        for turns in sizes:
            run(turns, repeats, results, Path(scratch))
    sys.stdout.write("\n".join(summary(results.read())) + "\n")


if __name__ == "__main__":
    main()
