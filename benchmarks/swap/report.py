"""The chapter on swaps, from their results.

Invariant: a ratio is one of two figures of the same repeat; the median stands beside its extremes,
and where the gateway takes longer than the engine by itself the figure says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.records import Record
from benchmarks.stats import median

OURS, PREPARED = "marft-agents", "marft-agents, prepared"
NAMES = {
    "direct": "the engine by itself",
    OURS: "marft-agents serve",
    PREPARED: "marft-agents serve, prepared",
}
ENGINES = {
    "scripted": "A scripted engine, where loading costs nothing and a token comes every 20 ms",
    "vllm": "vLLM on the CPU, a random Llama of 2 layers",
}
_STEPS = {
    "the folder is looked over": "check",
    "the engine loads": "load",
    "the engine answers the probe": "probe",
    "`CURRENT` is on disk": "record",
}
_STEPS_PREPARED = {
    "folder, list and line of the trail, beside each other": ("check", "list", "prepare"),
    "`CURRENT` is on disk": ("record",),
}
"""The longest of several counts."""
_BESIDE = {
    "prepare": "the line of the trail put on disk beforehand",
    "compare": "the rest of the checksums",
    "list": "whether the engine lists it",
}
_ABOUT_PREPARED = [
    "Where it was prepared, all but the record on disk came before the call: the version was"
    " loaded and probed beside the one in use, and got no request. How long that took is told under"
    " the tables and is in no other figure; the swap's call then asks the engine whether it still"
    " has the adapter, and looks whether the folder is as it was."
]
MOST_RATIO = 1.3
"""What the gateway is to keep to."""
_HEAD = [
    "| others streaming | server | call to first token, ms | of the engine's"
    " | until the call returned, ms | longest wait of others, ms | without a swap, ms | repeats |",
    "|---:|---|---:|---:|---:|---:|---:|---:|",
]


def chapter(records: Sequence[Record]) -> list[str]:
    """The chapter; there must be measurements."""
    out = [
        "## How long a swap takes",
        "",
        "From the call to the first token of the new version, on an engine that has not seen the"
        " adapter: `marft-agents serve` (the swap, then a request of the agent) and the engine by"
        " itself (load, then a request) take turns. The gateway compares the folder with its"
        " checksums, compares what the engine computes with the loaded adapter with what it"
        " should (the probe) before any request gets it, and returns when the new version is the"
        " one that answers and who swapped it is on disk. Others stream from another agent"
        " meanwhile; their longest wait for a chunk is compared with the longest in a time of the"
        " same length before. Medians, least and most of the repeats.",
        "",
    ]
    if any(r["target"] == PREPARED for r in records):
        out += [*_ABOUT_PREPARED, ""]
    for engine, model, rank in dict.fromkeys(map(_setting, records)):
        mine = [r for r in records if _setting(r) == (engine, model, rank)]
        label = ENGINES[engine] if model is None else f"{engine}, {model}"
        label += "" if rank is None else f", adapters of rank {rank}"
        out += [f"### {label}", "", *lines_for(mine), "", _verdict(mine), ""]
    return out[:-1]


def _setting(record: Record) -> tuple[str, str | None, int | None]:
    return record["engine"], record.get("model"), record.get("rank")


def _where(records: Sequence[Record]) -> list[str]:
    """Where the time of a swap goes; of results that tell."""
    mine = [r for r in records if r.get("steps") and r["target"] == OURS]
    if not mine:
        return []
    beside = [
        f"{what} {_spread([1e3 * r['steps'].get(name, 0.0) for r in mine], ',.0f')}"
        for name, what in _BESIDE.items()
    ]
    told = f"Milliseconds, one after the other. Beside them: {'; '.join(beside)}."
    return ["", *_table(mine, {label: (name,) for label, name in _STEPS.items()}), "", told]


def _where_prepared(records: Sequence[Record]) -> list[str]:
    """The same of swaps that were prepared, and what preparing took."""
    mine = [r for r in records if r["target"] == PREPARED]
    if not mine:
        return []
    before = _spread([1e3 * r["prepared_s"] for r in mine], ",.0f")
    told = f"Milliseconds, one after the other. Preparing took {before} before that."
    return ["", "Of a swap that was prepared:", "", *_table(mine, _STEPS_PREPARED), "", told]


def _table(records: Sequence[Record], steps: Mapping[str, Sequence[str]]) -> list[str]:
    out = [f"| others streaming | {' | '.join(steps)} | the call's rest | first token |"]
    out.append("|---:|" + "---:|" * (len(steps) + 2))
    for clients in sorted({r["clients"] for r in records}):
        found = [r for r in records if r["clients"] == clients]
        columns = [
            [max(r["steps"].get(name, 0.0) for name in names) for r in found]
            for names in steps.values()
        ]
        rest = [r["call_s"] - sum(row) for r, *row in zip(found, *columns, strict=True)]
        first = [r["total_s"] - r["call_s"] for r in found]
        cells = [_spread([1e3 * s for s in column], ",.0f") for column in (*columns, rest, first)]
        out.append(f"| {clients} | {' | '.join(cells)} |")
    return out


def _verdict(records: Sequence[Record]) -> str:
    told = ""
    for target in (OURS, PREPARED):
        mine = [r for r in records if r["target"] == target]
        if not mine:
            continue
        kinds: list[str] = []
        for clients in sorted({r["clients"] for r in mine}):
            ratios = _ratios([r for r in records if r["clients"] == clients], target)
            if ratios and median(ratios) > MOST_RATIO:
                kinds.append(f"beside {clients} streams ({median(ratios):.2f})")
        slow = ", ".join(kinds) or "nowhere"
        told += f"; prepared: {slow}" if told else f"More than {MOST_RATIO} times the engine's own"
        told += f" time: {slow}" if target == OURS else ""
    load = [r["load"] for r in records]
    return (
        f"{told}."
        f" {min(load):.0f} to {max(load):.0f} processes wanted to run meanwhile, these among them."
    )


def _ratios(records: Sequence[Record], target: str) -> list[float]:
    direct = {r["repeat"]: r for r in records if r["target"] == "direct"}
    mine = [r for r in records if r["target"] == target and r["repeat"] in direct]
    return [r["total_s"] / direct[r["repeat"]]["total_s"] for r in mine]


def lines_for(records: Sequence[Record]) -> list[str]:
    """The table of one engine."""
    out = list(_HEAD)
    for clients in sorted({r["clients"] for r in records}):
        of_kind = [r for r in records if r["clients"] == clients]
        for target, label in NAMES.items():
            mine = [r for r in of_kind if r["target"] == target]
            if mine:
                ratios = _ratios(of_kind, target) if target != "direct" else []
                out.append(_row(clients, label, mine, ratios))
    return [*out, *_where(records), *_where_prepared(records)]


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
