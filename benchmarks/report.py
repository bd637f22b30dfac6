"""Writes docs/evidence.md and docs/figures/ from the results at hand.

    python -m benchmarks.report

Invariant: the page holds nothing that is not in the results; a benchmark without results has no
chapter.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gateway import report as gateway_report
from benchmarks.gateway import run as gateway_run
from benchmarks.learning import report as learning_report
from benchmarks.learning import run as learning_run
from benchmarks.recorder import latency, log, log_report
from benchmarks.recorder.latency_report import adding
from benchmarks.records import Record, Results
from benchmarks.swap import report as swap_report
from benchmarks.swap import run as swap_run
from benchmarks.trainer import measure
from benchmarks.trainer import report as trainer_report

_HEAD = [
    "# Evidence",
    "",
    "Written by `python -m benchmarks.report` from the results under `benchmarks/*/results/`; do"
    " not edit. How to run everything again is at the end.",
    "",
]


def page(
    learning: Path,
    trainer: Path,
    recorder: Path,
    figures: Path,
    gateway: Path = gateway_run.RESULTS,
    swaps: Path = swap_run.RESULTS,
) -> str:
    """The whole page; figures are written on the way."""

    def read(name: str) -> list[Record]:
        return Results(learning / name, learning_run.KEY).read()

    online, first, tuning = read("online.jsonl"), read("logs_first.jsonl"), read("tuning.jsonl")
    runs = Results(trainer, measure.KEY).read()
    calls = Results(recorder / latency.RESULTS.name, latency.KEY).read()
    readings = Results(recorder / log.RESULTS.name, log.KEY).read()
    through = Results(gateway, gateway_run.KEY).read()
    swapped = Results(swaps, swap_run.KEY).read()
    out = list(_HEAD)
    if online:
        out += [*learning_report.learning(online, tuning, figures), ""]
    if first and online:
        out += [*learning_report.logs_first(first, online, figures), ""]
    if runs:
        out += [*trainer_report.trainer(runs, figures), ""]
    if calls:
        out += [*adding(calls), ""]
    if readings:
        out += [*log_report.reading(readings), ""]
    if through:
        out += [*gateway_report.chapter(through), ""]
    if swapped:
        out += [*swap_report.chapter(swapped), ""]
    how = _how([*online, *first], tuning, runs, [*calls, *readings], [*through, *swapped])
    return "\n".join([*out, *how])


def _how(
    learning: Sequence[Record],
    tuning: Sequence[Record],
    runs: Sequence[Record],
    recorder: Sequence[Record],
    serving: Sequence[Record],
) -> list[str]:
    out = ["## What was run", ""]
    if learning:
        out += [
            "- `python -m benchmarks.learning.run`, then `--logs-first`:"
            f" {_count(learning)}, {_minutes(learning)} of processor time in all. `--tune`:"
            f" {_count(tuning)}, {_minutes(tuning)}; λ and other settings were tried by hand on the"
            " tuning seeds, which is not on record. `--quick` runs in seconds.",
        ]
    if runs:
        spent = sum(r["process_seconds"] for r in runs) / 60
        out += [
            f"- `python -m benchmarks.trainer.measure`: {len(runs)} processes, {spent:.0f} minutes"
            " by the clock. `--quick` runs in a minute.",
        ]
    if recorder:
        out += [
            "- `python -m benchmarks.recorder.latency` and `python -m benchmarks.recorder.log`:"
            f" {len(recorder)} processes.",
        ]
    if serving:
        out += [
            "- `python -m benchmarks.gateway.run` and `python -m benchmarks.swap.run`, then both"
            f" with `--engine vllm`: {len(serving)} measurements.",
        ]
    measured = [*learning, *runs, *recorder, *serving]
    for machine in _machines(measured):
        out.append(f"- {machine}")
    load = [r["load"] for r in measured]
    if load:
        out.append(
            f"- The machine had other work too: {min(load):.1f} to {max(load):.1f} processes"
            " wanted to run while this was measured."
        )
    return [*out, ""]


def _count(records: Sequence[Record]) -> str:
    return f"{len(records)} runs" if len(records) != 1 else "1 run"


def _minutes(records: Sequence[Record]) -> str:
    return f"{sum(r['cpu_seconds'] for r in records) / 60:.0f} minutes"


def _machines(records: Sequence[Record]) -> list[str]:
    seen: dict[str, set[str]] = {}
    for record in records:
        m = record["machine"]
        versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
        what = (
            f"{m['processor']}, {m['cores']} cores, {m['memory_gib']:.0f} GiB; {m['system']};"
            f" {versions}"
        )
        seen.setdefault(what, set()).add(m["commit"])
    return [f"{what}; at {', '.join(sorted(commits))}" for what, commits in seen.items()]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--learning", type=Path, default=learning_run.RESULTS)
    parser.add_argument("--trainer", type=Path, default=measure.RESULTS)
    parser.add_argument("--recorder", type=Path, default=latency.RESULTS.parent)
    parser.add_argument("--gateway", type=Path, default=gateway_run.RESULTS)
    parser.add_argument("--swap", type=Path, default=swap_run.RESULTS)
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    options = parser.parse_args(arguments)
    text = page(
        options.learning,
        options.trainer,
        options.recorder,
        options.docs / "figures",
        options.gateway,
        options.swap,
    )
    (options.docs / "evidence.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
