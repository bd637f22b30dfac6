"""The chapter on speed and memory, from the records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.chart import Line, Panel, draw
from benchmarks.learning.summary import markdown_table
from benchmarks.records import Record
from benchmarks.stats import mean_of
from benchmarks.trainer.common import RANK, VARIANTS
from benchmarks.trainer.logs import ROWS

LABELS = {
    "ours-ppo": "this trainer, ppo",
    "ours-awr": "this trainer, awr",
    "grpo": "TRL's GRPO, one adapter",
    "copies": "a base per agent",
}
_OURS = "ours-ppo"
Measure = Callable[[Record], float]


def _whole(r: Record) -> float:
    return r["tokens"] / r["seconds"]


def _steps(r: Record) -> float:
    return r["tokens"] / r["step_seconds"]


def _memory(r: Record) -> float:
    return r["peak_mib"] - r["libraries_mib"]


def trainer(records: Sequence[Record], figures: Path) -> list[str]:
    """Throughput and peak memory by number of agents."""
    models = list(dict.fromkeys(r["model"] for r in records))
    records = [r for r in records if r["model"] == models[-1]]
    figures.mkdir(parents=True, exist_ok=True)
    speed = [
        Panel("whole update", _lines(records, _whole)),
        Panel("steps alone", _lines(records, _steps)),
    ]
    memory = [Panel("peak above the libraries", _lines(records, _memory))]
    for name, pictures, label in (
        ("trainer-speed", speed, "tokens per second"),
        ("trainer-memory", memory, "MiB"),
    ):
        chart = draw(pictures, x_label="agents", y_label=label)
        (figures / f"{name}.svg").write_text(chart, encoding="utf-8")
    found = [_of(records, n, variant) for n in _agents(records) for variant in VARIANTS]
    counts = sorted({len(runs) for runs in found if runs})
    times = f"{counts[0]} to {counts[-1]} times" if len(counts) > 1 else f"{counts[0]} times"
    return [
        "## What does it cost?",
        "",
        f"One update of n agents on {models[-1]} (float32, one thread, rank {RANK}): {ROWS} turns"
        " and one optimizer step per agent, two rounds of a chat in two episodes, so that an"
        " agent's second prompt holds its first. Every measurement is a process of its own, the"
        f" variants in turn, {times}; seconds are of processor time, tokens are those of"
        " prompts and replies, each counted once, peaks are resident memory above what the"
        " imported libraries take.",
        "",
        "- *This trainer*: one base, an adapter per agent, the critic, log-probabilities before"
        " and after, packed turns with shared prefixes.",
        "- *TRL's GRPO*: `GRPOTrainer` with the turns and advantages given, one adapter for all"
        " agents; no values, no agents, nothing but steps"
        " (compare it with our steps alone).",
        "- *A base per agent*: written for this comparison; a copy of the base per agent and one"
        " for the critic, a value pass per turn, padded batches.",
        "",
        "![Tokens per second](figures/trainer-speed.svg)",
        "",
        "![Peak memory](figures/trainer-memory.svg)",
        "",
        *markdown_table(
            ("agents", "variant", "tokens/s, whole update", "tokens/s, steps alone", "peak, MiB"),
            [row for n in _agents(records) for row in _rows(records, n)],
        ),
        "",
        f"How many times as fast, and how much memory, {LABELS[_OURS]} is and takes (mean of the"
        " repeats, smallest to largest):",
        "",
        *markdown_table(
            ("agents", "against", "whole update", "steps alone", "peak memory"),
            [row for n in _agents(records) for row in _ratios(records, n)],
        ),
        *_slower(records),
    ]


def _slower(records: Sequence[Record]) -> list[str]:
    """Where the whole update is slower than another variant's."""
    found = [
        f"{LABELS[variant]} with {n} agents"
        for variant in ("grpo", "copies")
        for n in _agents(records)
        if (pairs := _pairs(records, n, variant))
        and mean_of([_whole(ours) / _whole(theirs) for ours, theirs in pairs]).mean < 1
    ]
    if not found:
        return []
    return [
        "",
        f"Slower over the whole update than: {'; '.join(found)}. What it does besides steps"
        " (values, log-probabilities before and after each agent's update, measuring the effect)"
        " is paid once an update, here for a single pass of one step per agent.",
    ]


def _agents(records: Sequence[Record]) -> list[int]:
    return sorted({r["agents"] for r in records})


def _of(records: Sequence[Record], agents: int, variant: str) -> list[Record]:
    found = [r for r in records if r["agents"] == agents and r["variant"] == variant]
    return sorted(found, key=lambda r: r["repeat"])


def _lines(records: Sequence[Record], measure: Measure) -> list[Line]:
    at = _agents(records)
    return [
        Line(
            LABELS[variant],
            at,
            [mean_of([measure(r) for r in _of(records, n, variant)]).mean for n in at],
        )
        for variant in VARIANTS
        if all(_of(records, n, variant) for n in at)
    ]


def _spread(values: Sequence[float], digits: int = 0) -> str:
    mean = mean_of(values).mean
    return f"{mean:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _rows(records: Sequence[Record], agents: int) -> list[list[str]]:
    out: list[list[str]] = []
    for variant in VARIANTS:
        runs = _of(records, agents, variant)
        if runs:
            cells = [_spread([f(r) for r in runs]) for f in (_whole, _steps, _memory)]
            out.append([str(agents), LABELS[variant], *cells])
    return out


def _pairs(records: Sequence[Record], agents: int, variant: str) -> list[tuple[Record, Record]]:
    """Ours and the other's measurement of the same repeat."""
    theirs = {r["repeat"]: r for r in _of(records, agents, variant)}
    ours = _of(records, agents, _OURS)
    return [(r, theirs[r["repeat"]]) for r in ours if r["repeat"] in theirs]


def _ratios(records: Sequence[Record], agents: int) -> list[list[str]]:
    out: list[list[str]] = []
    for variant in ("grpo", "copies"):
        pairs = _pairs(records, agents, variant)
        if pairs:
            cells = [
                _spread([f(ours) / f(theirs) for ours, theirs in pairs], 2)
                for f in (_whole, _steps, _memory)
            ]
            out.append([str(agents), LABELS[variant], *cells])
    return out
