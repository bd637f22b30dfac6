"""The chapter on swaps, from their results.

Invariant: a ratio is one of two figures of the same repeat; the median stands beside its extremes,
and where the gateway takes longer than the engine by itself the figure says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.records import Record
from benchmarks.stats import median

NAMES = {"direct": "the engine by itself", "marft-agents": "marft-agents serve"}
_HEAD = [
    "| others streaming | server | call to first token, ms | of the engine's"
    " | until the call returned, ms | longest wait of others, ms | without a swap, ms | repeats |",
    "|---:|---|---:|---:|---:|---:|---:|---:|",
]


def lines_for(records: Sequence[Record]) -> list[str]:
    """The table of one engine."""
    out = list(_HEAD)
    for clients in sorted({r["clients"] for r in records}):
        of_kind = [r for r in records if r["clients"] == clients]
        direct = {r["repeat"]: r for r in of_kind if r["target"] == "direct"}
        for target, label in NAMES.items():
            mine = [r for r in of_kind if r["target"] == target]
            if mine:
                pairs = [(r, direct[r["repeat"]]) for r in mine if r["repeat"] in direct]
                ratios = [a["total_s"] / b["total_s"] for a, b in pairs]
                out.append(_row(clients, label, mine, ratios if target != "direct" else []))
    return out


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def _ms(records: Sequence[Record], name: str) -> str:
    return _spread([1e3 * r[name] for r in records if name in r], ",.0f")


def _row(clients: int, label: str, mine: Sequence[Record], ratios: Sequence[float]) -> str:
    cells = [
        str(clients),
        label,
        _ms(mine, "total_s"),
        _spread(ratios, ".2f"),
        _ms(mine, "call_s"),
        _ms(mine, "stall_s"),
        _ms(mine, "quiet_stall_s"),
        str(len(mine)),
    ]
    return f"| {' | '.join(cells)} |"
