"""Speed and memory of a trainer for 1, 2, 4 and 8 agents, beside two others.

    python -m benchmarks.trainer.measure [--quick]

Invariant: every measurement is a process of its own; variants take turns, in an order that moves on
with each repeat, so that whatever else the machine does hits all of them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.records import Record, Results, load_now, machine
from benchmarks.trainer.common import VARIANTS

SMOLLM2 = Path(".cache/smollm2-135m-instruct")
RESULTS = Path("benchmarks/trainer/results/runs.jsonl")
AGENTS = (1, 2, 4, 8)
KEY = ("model", "variant", "agents", "repeat")


def measure(variant: str, model_dir: Path, agents: int, threads: int = 1) -> Record:
    """One process's measurement."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.trainer.child", variant, str(model_dir), str(agents),
         str(threads)],
        capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{variant} with {agents} agents failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1]) | {
        "variant": variant,
        "agents": agents,
        "process_seconds": round(time.monotonic() - started, 1),
        "load": load_now(),
    }


def schedule(repeats: int, agents: Sequence[int]) -> list[tuple[int, int, str]]:
    """(repeat, agents, variant) in the order of measuring."""
    out: list[tuple[int, int, str]] = []
    for repeat in range(repeats):
        turn = repeat % len(VARIANTS)
        order = VARIANTS[turn:] + VARIANTS[:turn]
        out += [(repeat, n, variant) for n in agents for variant in order]
    return out


def tiny_model(folder: Path) -> Path:
    """A random Llama, where SmolLM2 is not at hand."""
    from tests.tiny_model import make_tiny_model

    return folder if (folder / "config.json").exists() else make_tiny_model(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, two sizes, once")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.quick or not SMOLLM2.exists():
        model_dir, name = tiny_model(Path(".cache/tiny-llama")), "a random Llama of 2 layers"
    else:
        model_dir, name = SMOLLM2, "SmolLM2-135M-Instruct"
    repeats, agents = (1, AGENTS[:2]) if options.quick else (options.repeats, AGENTS)
    results = Results(options.out, KEY)
    for repeat, n, variant in schedule(repeats, agents):
        key = {"model": name, "variant": variant, "agents": n, "repeat": repeat}
        if results.has(key):
            continue
        record: Record = measure(variant, model_dir, n) | key | {"machine": machine()}
        results.add(record)
        print(
            f"{variant:9} {n} agents, repeat {repeat}:"
            f" {record['tokens'] / record['seconds']:.0f} tokens/s,"
            f" peak {record['peak_mib']} MiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
