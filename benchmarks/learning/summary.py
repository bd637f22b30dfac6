"""What the runs of the relay say, in tables.

Invariant: every number comes from the records, and a method that is worse is called worse. Two
methods differ when the interval of their seed-by-seed difference leaves out zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.chart import Line, Panel
from benchmarks.learning.methods import METHODS
from benchmarks.learning.relay import TEAM_SIZES
from benchmarks.records import Record
from benchmarks.stats import Mean, difference_of, first_reach, mean_of, median

REFERENCE = "marft-a"
"""The others are compared with this one."""
_SHARE = 0.9


def of(records: Sequence[Record], size: str, method: str | None = None) -> list[Record]:
    """Records of a team size (and a method), by seed."""
    found = [r for r in records if r["size"] == size and method in (None, r["method"])]
    return sorted(found, key=lambda r: r["seed"])


def chosen(records: Sequence[Record]) -> list[Record]:
    """The runs with each method's own step size."""
    rates = {m.name: m.learning_rate for m in METHODS}
    return [r for r in records if r["learning_rate"] == rates[r["method"]]]


def rates_of(records: Sequence[Record]) -> list[float]:
    return sorted({r["learning_rate"] for r in records})


def sizes_of(records: Sequence[Record]) -> list[str]:
    return [size for size in TEAM_SIZES if of(records, size)]


def percent(value: Mean) -> str:
    """Mean and interval of shares between 0 and 1."""
    low, high = max(value.low, 0.0), min(value.high, 1.0)
    return f"{value.mean:.0%} ({low:.0%} to {high:.0%})"


def points(value: Mean) -> str:
    """A difference of shares, in points, with its interval."""
    return f"{100 * value.mean:+.0f} ({100 * value.low:+.0f} to {100 * value.high:+.0f})"


def verdict(difference: Mean) -> str:
    """What a difference to the reference means."""
    if difference.low > 0:
        return "better"
    return "worse" if difference.high < 0 else "no difference shown"


@dataclass(frozen=True)
class Row:
    """One method with one team size."""

    label: str
    final: Mean
    collapses: int
    reached: list[int | None]
    difference: Mean | None
    """Of final success, to the reference."""
    sooner: Mean | None
    """Of the mean success over all measurements, to the reference."""
    steps: Mean

    def cells(self) -> list[str]:
        there = [at for at in self.reached if at is not None]
        n = len(self.reached)
        speed = f"{median(there):.0f}, {len(there)} of {n}" if there else f"never, 0 of {n}"
        against = [
            "-" if d is None else f"{points(d)}: {verdict(d)}"
            for d in (self.difference, self.sooner)
        ]
        return [
            self.label,
            percent(self.final),
            *against,
            f"{self.collapses} of {self.final.n}",
            speed,
            f"{self.steps.mean:.0f}",
        ]


def rows(records: Sequence[Record], size: str) -> list[Row]:
    """A row per method that has runs, in the order of ``METHODS``."""
    finals = {m.name: [r["final"] for r in of(records, size, m.name)] for m in METHODS}
    best = max(mean_of(values).mean for values in finals.values() if values)
    out: list[Row] = []
    for method in METHODS:
        runs = of(records, size, method.name)
        if not runs:
            continue
        out.append(
            Row(
                method.label,
                mean_of(finals[method.name]),
                sum(r["final"] < r["untrained"] for r in runs),
                [first_reach(r["episodes"], r["success"], _SHARE * best) for r in runs],
                _against(records, size, method.name, lambda r: r["final"]),
                _against(records, size, method.name, lambda r: mean_of(r["success"]).mean),
                mean_of([r["optimizer_steps"] for r in runs]),
            )
        )
    return out


def _against(
    records: Sequence[Record], size: str, method: str, measure: Callable[[Record], float]
) -> Mean | None:
    """A measure minus the reference's, over the seeds that both have."""
    those = {r["seed"]: measure(r) for r in of(records, size, REFERENCE)}
    pairs = [
        (measure(r), those[r["seed"]]) for r in of(records, size, method) if r["seed"] in those
    ]
    if method == REFERENCE or not pairs:
        return None
    return difference_of([a for a, _ in pairs], [b for _, b in pairs])


def markdown_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(cells) + " |" for cells in body),
    ]


def curve(records: Sequence[Record], name: str) -> Line:
    """Mean success over seeds with its interval, over episodes."""
    at: list[int] = records[0]["episodes"]
    means = [mean_of([r["success"][i] for r in records]) for i in range(len(at))]
    if len(records) < 2:
        return Line(name, at, [m.mean for m in means])
    return Line(
        name,
        at,
        [m.mean for m in means],
        [max(m.low, 0.0) for m in means],
        [min(m.high, 1.0) for m in means],
    )


def panels(records: Sequence[Record]) -> list[Panel]:
    """Success over episodes, a panel per team size."""
    return [
        Panel(
            f"{size}: {TEAM_SIZES[size]} agents",
            [
                curve(of(records, size, method.name), method.label)
                for method in METHODS
                if of(records, size, method.name)
            ],
            [mean_of([r["untrained"] for r in of(records, size)]).mean],
        )
        for size in sizes_of(records)
    ]
