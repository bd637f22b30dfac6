"""Learning, method against method: every size, method and seed that has no result yet.

    python -m benchmarks.learning.run               the reported runs
    python -m benchmarks.learning.run --tune        step sizes, on seeds of their own
    python -m benchmarks.learning.run --logs-first  offline, then online
    python -m benchmarks.learning.run --quick       a few seconds, to see that it runs

Invariant: settings were chosen on the seeds of ``--tune``, which are never reported. A run that has
a result is not run again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.learning.base import BaseSettings, base_folder
from benchmarks.learning.learn import learn, run_key
from benchmarks.learning.methods import BY_NAME, METHODS, QUICK, Plan
from benchmarks.learning.relay import TEAM_SIZES
from benchmarks.records import Results, machine
from marft_agents.training._quiet import quiet, set_environment

RESULTS = Path("benchmarks/learning/results")
KEY = ("size", "method", "seed", "plan", "learning_rate", "settings")
SEEDS = (1, 2, 3, 4, 5)
TUNING_SEEDS = (100, 101)
TUNING_RATES = (5e-4, 1e-3, 2e-3)
LOGS_FIRST = Plan(iterations=10, logged=512)
"""As many episodes in all as ``Plan()``."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    set_environment()
    torch.set_num_threads(1)
    plan, seeds, rates, name = Plan(), SEEDS, (None,), "online.jsonl"
    methods, sizes = [m.name for m in METHODS], list(TEAM_SIZES)
    if options.tune:
        seeds, rates, name, sizes = TUNING_SEEDS, TUNING_RATES, "tuning.jsonl", ["trio", "quad"]
    elif options.logs_first:
        plan, name, methods = LOGS_FIRST, "logs_first.jsonl", ["marft-a"]
    settings = BaseSettings()
    if options.quick:
        settings = BaseSettings(hidden=16, layers=1, steps=30, batch=16)
        plan, seeds, sizes, name = QUICK, (1,), ["duo"], "quick.jsonl"
    results = Results((options.out or RESULTS) / name, KEY)
    with quiet():
        base = base_folder(settings)
        for seed in options.seeds or seeds:
            for size in options.sizes or sizes:
                for method in options.methods or methods:
                    for rate in options.rates or rates:
                        _run(results, base, size, method, seed, plan, rate)


def _run(
    results: Results,
    base: Path,
    size: str,
    name: str,
    seed: int,
    plan: Plan,
    rate: float | None,
) -> None:
    method = BY_NAME[name]
    rate = method.learning_rate if rate is None else rate
    if results.has(run_key(size, method, seed, plan, rate)):
        return
    record = learn(base, size, method, seed, plan, rate) | {"machine": machine()}
    results.add(record)
    print(
        f"{size} {name:10} seed {seed} rate {rate:g}: {record['untrained']:.2f} ->"
        f" {record['final']:.2f}, {record['optimizer_steps']} steps, {record['cpu_seconds']:.0f} s"
        " of processor time",
        flush=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--tune", action="store_true")
    kind.add_argument("--logs-first", action="store_true")
    kind.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--sizes", nargs="+", choices=list(TEAM_SIZES))
    parser.add_argument("--methods", nargs="+", choices=list(BY_NAME))
    parser.add_argument("--rates", type=float, nargs="+")
    parser.add_argument("--out", type=Path, help=f"folder of the results (default: {RESULTS})")
    return parser


if __name__ == "__main__":
    main()
