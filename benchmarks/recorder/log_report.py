"""The chapter on reading a log, from its results.

Invariant: the table holds every measurement; a speed is a median and stands beside its extremes.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.records import Record
from benchmarks.stats import median

_JOBS = {
    "events": "every line parsed",
    "episodes": "episodes put together",
    "dataset": "rows for training, kept on disk",
}
_LAYOUTS = {"apart": "one episode after the other", "mixed": "64 episodes at a time"}


def reading(records: Sequence[Record]) -> list[str]:
    """The chapter; there must be a measurement."""
    tokens = max(r["turn_tokens"] for r in records)
    out = [
        "## Reading a log",
        "",
        f"Made logs with turns of {tokens} tokens and ten turns an episode; each reading is a"
        " process of its own. Turns per second are of processor time, on one core: the median, and"
        " the slowest and fastest repeat. Memory is the highest of any repeat, and in brackets what"
        " the modules take before the log is opened.",
        "",
        "| turns | log | read as | turns/s a core | peak memory, MiB | repeats |",
        "|---:|---|---|---:|---:|---:|",
    ]
    for (turns, layout, job), seen in sorted(cells(records).items()):
        speeds = [r["turns_per_second"] for r in seen]
        peak, before = (max(r[name] for r in seen) for name in ("peak_mib", "libraries_mib"))
        out.append(
            f"| {turns:,} | {_LAYOUTS[layout]} | {_JOBS[job]} | {median(speeds):,.0f}"
            f" ({min(speeds):,} to {max(speeds):,}) | {peak:,.0f} ({before:,.0f}) | {len(seen)} |"
        )
    return out


def cells(records: Sequence[Record]) -> dict[tuple[int, str, str], list[Record]]:
    """Repeats by size, layout and job."""
    out: dict[tuple[int, str, str], list[Record]] = {}
    for record in records:
        key = (record["log_turns"], record["layout"], record["job"])
        out.setdefault(key, []).append(record)
    return out
