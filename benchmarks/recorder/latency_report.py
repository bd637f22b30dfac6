"""The chapter on what recording adds to a call, from its results.

Invariant: what a tool adds is a block's figure minus that of the block beside it, in one process;
the median stands beside the interval in which it lies, and whoever is slower is not left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.records import Record
from benchmarks.stats import median, median_interval

TOOLS = {
    "nothing": "(nothing: the noise)",
    "marft-agents": "marft-agents: ids, log-probabilities, links, log on disk",
    "mlflow": "MLflow AutoGen autologging: traces in SQLite",
    "opentelemetry": "OpenTelemetry's openai instrumentation: spans in a file",
}


FIGURES = ("p50_ms", "mean_ms", "cpu_ms")


def adding(records: Sequence[Record]) -> list[str]:
    """The chapter; there must be measurements of the plain application and of a tool."""
    pairs = max(r["pairs"] for r in records)
    out = [
        "## What recording adds to a call",
        "",
        "An AutoGen round robin of two agents, ten turns a chat, one model call a turn, on a"
        " scripted server in a process of its own; streams come in 64 chunks at once. Blocks of"
        f" chats with the tool and without alternate in one process, {pairs} of either kind, each"
        " of 3 to 9 seconds: long enough for OpenTelemetry's exporter, which waits for 512 calls"
        " or 5 seconds, to write in it. With a delay, tools that write in the background do it"
        " while the application waits for its model; without one they compete with it."
        " Milliseconds per turn on top of the block beside it: the median over all pairs, and the"
        " 95 % interval in which it lies; at p99, over all turns of a process: the median, and the"
        " least and most. Only marft-agents asks the server for token ids and"
        " log-probabilities; what their transport costs is in its figures. OpenTelemetry's"
        " instrumentation has a provider of its own: with the process's one, AutoGen would write"
        " spans of itself, too. A tool that wrote down no call adds nothing and is no rival there.",
        "",
        "| tool | replies | added at p50 | added to the mean | added at p99 | processor time added"
        " | calls written down | kB written a call | pairs |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    kinds = sorted({(-r["delay_ms"], r["stream"]) for r in records})
    for delay, stream in kinds:
        of_kind = [r for r in records if (-r["delay_ms"], r["stream"]) == (delay, stream)]
        kind = (
            f"{'streamed' if stream else 'whole'}, {f'after {-delay} ms' if delay else 'at once'}"
        )
        out.append(_plain_row(of_kind, kind))
        for tool, label in TOOLS.items():
            seen = [r for r in of_kind if r["tool"] == tool]
            if seen:
                out.append(_row(label, kind, seen))
    return out


def paired(record: Record, figure: str) -> list[tuple[float, float]]:
    """A figure of each block with the tool, and of the block beside it."""
    blocks = zip(record["with"], record["without"], strict=True)
    return [(one[figure], other[figure]) for one, other in blocks]


def _plain_row(records: Sequence[Record], kind: str) -> str:
    blocks = [block for record in records for block in record["without"]]
    p50, mean, cpu = (median([block[name] for block in blocks]) for name in FIGURES)
    p99 = median([record["p99_ms"][1] for record in records])
    return (
        f"| (the plain application, in all) | {kind} | {p50:.2f} | {mean:.2f} | {p99:.2f} |"
        f" {cpu:.2f} | - | 0 | {len(blocks)} |"
    )


def _row(label: str, kind: str, records: Sequence[Record]) -> str:
    def spread(figure: str) -> str:
        added = [a - b for record in records for a, b in paired(record, figure)]
        low, high = median_interval(added)
        return f"{median(added):+.2f} ({low:+.2f} to {high:+.2f})"

    p50, mean, cpu = map(spread, FIGURES)
    late = [a - b for a, b in (record["p99_ms"] for record in records)]
    p99 = f"{median(late):+.2f} ({min(late):+.2f} to {max(late):+.2f})"
    calls, pairs = sum(r["calls"] for r in records), sum(len(r["with"]) for r in records)
    noted, written = (sum(r[name] for r in records) / calls for name in ("noted", "written_bytes"))
    return (
        f"| {label} | {kind} | {p50} | {mean} | {p99} | {cpu} | {noted:.0%} |"
        f" {written / 1e3:,.1f} | {pairs} |"
    )
