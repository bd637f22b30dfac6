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
        " turn, on a scripted server in a process of its own; streams come in 64 chunks at once."
        " With a delay, tools that write in the background do it while the application waits for"
        " its model; without one they compete with the application. Milliseconds per turn on top"
        " of the plain application: the median over repeats, and the least and most. Only"
        " marft-agents asks the server for token ids and log-probabilities; what their transport"
        " costs is in its figures. OpenTelemetry's instrumentation has a provider of its own: with"
        " the process's one, AutoGen would write spans of itself, too. A tool that wrote down no"
        " call adds nothing and is no rival there.",
        "",
        "| tool | replies | added at p50 | added at p99 | processor time added | calls written down"
        " | kB written in all | repeats |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    kinds = sorted({(-r["delay_ms"], r["stream"]) for r in records})
    for delay, stream in kinds:
        of_kind = [r for r in records if (-r["delay_ms"], r["stream"]) == (delay, stream)]
        kind = (
            f"{'streamed' if stream else 'whole'}, {f'after {-delay} ms' if delay else 'at once'}"
        )
        plain = _by_repeat(of_kind, "plain")
        if plain:
            out.append(_plain_row(list(plain.values()), kind))
        for tool, label in TOOLS.items():
            seen = _by_repeat(of_kind, tool)
            pairs = [(seen[n], plain[n]) for n in seen if n in plain]
            if pairs:
                out.append(_row(label, kind, pairs))
    return out


def _by_repeat(records: Sequence[Record], tool: str) -> dict[int, Record]:
    return {r["repeat"]: r for r in records if r["tool"] == tool}


def _plain_row(records: Sequence[Record], kind: str) -> str:
    p50, p99 = (median([r[name] for r in records]) for name in ("p50_ms", "p99_ms"))
    cpu = 1e3 * median([r["cpu_s_per_turn"] for r in records])
    return (
        f"| (the plain application, in all) | {kind} | {p50:.2f} | {p99:.2f} |"
        f" {cpu:.2f} | - | 0 | {len(records)} |"
    )


def _row(label: str, kind: str, pairs: Sequence[tuple[Record, Record]]) -> str:
    def spread(of: Callable[[Record], float]) -> str:
        values = [of(a) - of(b) for a, b in pairs]
        return f"{median(values):+.2f} ({min(values):+.2f} to {max(values):+.2f})"

    written = median([a["written_bytes"] / 1e3 for a, _ in pairs])
    noted = sum(a["noted"] for a, _ in pairs) / sum(a["calls"] for a, _ in pairs)
    return (
        f"| {label} | {kind} | {spread(lambda r: r['p50_ms'])} |"
        f" {spread(lambda r: r['p99_ms'])} | {spread(lambda r: 1e3 * r['cpu_s_per_turn'])} |"
        f" {noted:.0%} | {written:,.0f} | {len(pairs)} |"
    )
