"""The chapter on what recording adds to a call, from its results.

Invariant: what a tool adds is its figure minus the plain application's of the same repeat; the
median stands beside its extremes, and whoever is slower is not left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.records import Record
from benchmarks.stats import median

TOOLS = {
    "marft-agents": "marft-agents: ids, log-probabilities, links, log on disk",
    "mlflow": "MLflow AutoGen autologging: traces in SQLite",
    "opentelemetry": "OpenTelemetry's openai instrumentation: spans in a file",
}


def adding(records: Sequence[Record]) -> list[str]:
    """The chapter; there must be measurements of the plain application and of a tool."""
    chats = max(r["chats"] for r in records)
    out = [
        "## What recording adds to a call",
        "",
        f"An AutoGen round robin of two agents, ten turns a chat, {chats} chats, one model call a"
        " turn, on a scripted server in a process of its own that answers at once; streams come in"
        " 64 chunks. Milliseconds per turn on top of the plain application: the median over"
        " repeats, and the least and most. Only marft-agents asks the server for token ids and"
        " log-probabilities; what their transport costs is in its figures.",
        "",
        "| tool | replies | added at p50 | added at p99 | processor time added | repeats |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for stream in (False, True):
        plain = _by_repeat(records, "plain", stream)
        if plain:
            out.append(_plain_row(list(plain.values()), stream))
        for tool, label in TOOLS.items():
            seen = _by_repeat(records, tool, stream)
            pairs = [(seen[n], plain[n]) for n in seen if n in plain]
            if pairs:
                out.append(_row(label, stream, pairs))
    return out


def _by_repeat(records: Sequence[Record], tool: str, stream: bool) -> dict[int, Record]:
    return {r["repeat"]: r for r in records if r["tool"] == tool and r["stream"] == stream}


def _kind(stream: bool) -> str:
    return "streamed" if stream else "whole"


def _plain_row(records: Sequence[Record], stream: bool) -> str:
    p50, p99 = (median([r[name] for r in records]) for name in ("p50_ms", "p99_ms"))
    cpu = 1e3 * median([r["cpu_s_per_turn"] for r in records])
    return (
        f"| (the plain application, in all) | {_kind(stream)} | {p50:.2f} | {p99:.2f} |"
        f" {cpu:.2f} | {len(records)} |"
    )


def _row(label: str, stream: bool, pairs: Sequence[tuple[Record, Record]]) -> str:
    def spread(of: Callable[[Record], float]) -> str:
        values = [of(a) - of(b) for a, b in pairs]
        return f"{median(values):+.2f} ({min(values):+.2f} to {max(values):+.2f})"

    return (
        f"| {label} | {_kind(stream)} | {spread(lambda r: r['p50_ms'])} |"
        f" {spread(lambda r: r['p99_ms'])} | {spread(lambda r: 1e3 * r['cpu_s_per_turn'])} |"
        f" {len(pairs)} |"
    )
