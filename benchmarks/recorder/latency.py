"""What recording adds to a model call, beside MLflow's autologging and OpenTelemetry's.

    python -m benchmarks.recorder.latency [--repeats 2] [--pairs 3] [--delay 20]

Invariant: every measurement is a process of its own on the same scripted server, in which blocks
with the tool and without alternate (``benchmarks.recorder.chat``); what a tool adds is a block's
figure minus that of the block beside it. Tools take turns, in an order that moves on with each
repeat, and one of them is none at all: what is measured of it is the noise. The tools live in an
environment of their own (``.venv-runtimes/bench-recorder``), because MLflow pins much.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.recorder.latency_report import paired
from benchmarks.records import Record, Results, load_now, machine
from benchmarks.stats import median
from tools.runtimes import environment

RESULTS = Path("benchmarks/recorder/results/latency.jsonl")
KEY = ("tool", "stream", "repeat", "pairs", "chats", "delay_ms")
TOOLS = ("nothing", "marft-agents", "mlflow", "opentelemetry")
BLOCK_S = 6.0
"""About how long a block lasts, by ``TURN_S`` (half of it where turns are quicker): long enough for
OpenTelemetry's exporter, which waits for 512 calls or 5 s, to write in it. What is written after a
block is in its processor time and in no turn's."""
TURN_S = {False: 0.007, True: 0.03}
"""About what a turn takes without any delay, whole and streamed."""


@contextmanager
def server(delay_ms: int = 0) -> Generator[str]:
    """The scripted server in a process of its own; yields its base URL."""
    command = [sys.executable, "-m", "benchmarks.recorder.server", str(delay_ms)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    finally:
        process.kill()
        process.wait()


def chats_of(delay_ms: int, *, stream: bool) -> int:
    """How many chats of ten turns make a block."""
    return max(2, round(BLOCK_S / (delay_ms / 1e3 + TURN_S[stream]) / 10))


def measure(python: Path, tool: str, url: str, pairs: int, chats: int, *, stream: bool) -> Record:
    """One process's measurement: figures of each of its blocks."""
    with tempfile.TemporaryDirectory() as folder:
        numbers = [str(pairs), str(chats)]
        command = [str(python), "-m", "benchmarks.recorder.chat", tool, url, *numbers, folder]
        done = subprocess.run(
            [*command, *(["--stream"] if stream else [])], capture_output=True, text=True
        )
    if done.returncode != 0:
        raise RuntimeError(f"{tool} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1]) | {"load": load_now()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3, help="blocks of either kind a process")
    parser.add_argument("--delay", type=int, default=20, help="milliseconds before each answer")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    python, results = environment("bench-recorder"), Results(options.out, KEY)
    with server(options.delay) as url:
        for repeat in range(options.repeats):
            for stream in (False, True):
                chats = chats_of(options.delay, stream=stream)
                turn = repeat % len(TOOLS)
                for tool in TOOLS[turn:] + TOOLS[:turn]:
                    key = {"tool": tool, "stream": stream, "repeat": repeat}
                    key |= {"pairs": options.pairs, "chats": chats, "delay_ms": options.delay}
                    if results.has(key):
                        continue
                    record = measure(python, tool, url, options.pairs, chats, stream=stream)
                    results.add(key | record | {"machine": machine()})
                    added = median([a - b for a, b in paired(record, "p50_ms")])
                    print(f"{tool:14} stream={stream!s:5} repeat {repeat}: {added:+.3f} ms at p50",
                          flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
