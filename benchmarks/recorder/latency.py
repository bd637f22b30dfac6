"""What recording adds to a model call, beside MLflow's autologging and OpenTelemetry's.

    python -m benchmarks.recorder.latency [--chats 60] [--repeats 5] [--delay 20]

Invariant: every measurement is a process of its own on the same scripted server; tools take turns,
in an order that moves on with each repeat. What a tool adds is its repeat's figure minus that of
the plain application in the same repeat. The tools live in an environment of their own
(``.venv-runtimes/bench-recorder``), because MLflow pins much.
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

from benchmarks.records import Record, Results, load_now, machine
from benchmarks.stats import median
from tools.runtimes import environment

RESULTS = Path("benchmarks/recorder/results/latency.jsonl")
KEY = ("tool", "stream", "repeat", "chats", "delay_ms")
TOOLS = ("plain", "marft-agents", "mlflow", "opentelemetry")


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


def measure(python: Path, tool: str, url: str, chats: int, *, stream: bool) -> Record:
    """One process's measurement: quantiles over its turns."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(python), "-m", "benchmarks.recorder.chat", tool, url, str(chats), folder]
        done = subprocess.run(
            [*command, *(["--stream"] if stream else [])], capture_output=True, text=True
        )
    if done.returncode != 0:
        raise RuntimeError(f"{tool} failed:\n{done.stderr[-3000:]}")
    record: Record = json.loads(done.stdout.strip().splitlines()[-1])
    ordered = sorted(record.pop("seconds"))
    p50, p99 = median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return record | {"p50_ms": 1e3 * p50, "p99_ms": 1e3 * p99, "load": load_now()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chats", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--delay", type=int, default=20, help="milliseconds before each answer")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    python, results = environment("bench-recorder"), Results(options.out, KEY)
    with server(options.delay) as url:
        for repeat in range(options.repeats):
            for stream in (False, True):
                turn = repeat % len(TOOLS)
                for tool in TOOLS[turn:] + TOOLS[:turn]:
                    key = {"tool": tool, "stream": stream, "repeat": repeat}
                    key |= {"chats": options.chats, "delay_ms": options.delay}
                    if results.has(key):
                        continue
                    record = measure(python, tool, url, options.chats, stream=stream)
                    results.add(key | record | {"machine": machine()})
                    print(f"{tool:14} stream={stream!s:5} repeat {repeat}:"
                          f" p50 {record['p50_ms']:.3f} ms, p99 {record['p99_ms']:.3f} ms,"
                          f" processor {1e3 * record['cpu_s_per_turn']:.3f} ms a turn",
                          flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
