"""The chapter on what a gateway adds, from its results.

Invariant: a ratio or difference is one of two figures of the same repeat; the median stands beside
its extremes, and a server that is behind, or fails, is not left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.records import Record
from benchmarks.stats import median

NAMES = {
    "direct": "the engine by itself",
    "marft-agents": "marft-agents serve",
    "litellm": "LiteLLM's proxy",
}
KINDS = {
    "whole": "whole replies, at once",
    "streamed": "streams of 64 chunks, at once",
    "steady": "streams, a chunk every 20 ms",
}
_HEAD = [
    "| clients | server | requests/s | of the engine's | p50, ms | added | p99, ms | first token"
    " p50, ms | added | processor time of the server a request, ms | failed |",
    "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
]


def lines_for(records: Sequence[Record]) -> list[str]:
    """A table for every kind of traffic, of the records of one engine."""
    out: list[str] = []
    for kind, label in KINDS.items():
        of_kind = [r for r in records if r["kind"] == kind]
        if of_kind:
            out += [f"**{label[0].upper()}{label[1:]}**", "", *_HEAD]
            for clients in sorted({r["clients"] for r in of_kind}):
                out += _rows([r for r in of_kind if r["clients"] == clients], clients)
            out.append("")
    return out


def _rows(records: Sequence[Record], clients: int) -> list[str]:
    direct = {r["repeat"]: r for r in records if r["target"] == "direct"}
    out: list[str] = []
    for target, label in NAMES.items():
        mine = [r for r in records if r["target"] == target]
        if mine:
            pairs = [(r, direct[r["repeat"]]) for r in mine if r["repeat"] in direct]
            out.append(_row(clients, label, mine, pairs if target != "direct" else []))
    return out


def _middle(records: Sequence[Record], name: str, digits: int = 2) -> str:
    values = [r[name] for r in records if name in r]
    return f"{median(values):,.{digits}f}" if values else "-"


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def _row(
    clients: int, label: str, mine: Sequence[Record], pairs: Sequence[tuple[Record, Record]]
) -> str:
    def of(figure: Callable[[Record, Record], float], form: str) -> str:
        return _spread([figure(a, b) for a, b in pairs if "p50_ms" in a and "p50_ms" in b], form)

    cpu = [1e3 * r["server_cpu_s"] / r["requests"] for r in mine if r["requests"]]
    cells = [
        str(clients),
        label,
        _middle(mine, "per_s", 1),
        of(lambda a, b: a["per_s"] / b["per_s"], ".1%"),
        _middle(mine, "p50_ms"),
        of(lambda a, b: a["p50_ms"] - b["p50_ms"], "+.2f"),
        _middle(mine, "p99_ms"),
        _middle(mine, "first_p50_ms"),
        of(lambda a, b: a["first_p50_ms"] - b["first_p50_ms"], "+.2f"),
        f"{median(cpu):.2f}" if cpu and pairs else "-",
        str(sum(r["failed"] for r in mine)),
    ]
    return f"| {' | '.join(cells)} |"
