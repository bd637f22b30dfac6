"""The chapter on what a gateway adds, from its results.

Invariant: a ratio or difference is one of two figures of the same pair; its median stands beside
the interval that the median lies in, and a server that is behind, or fails, is not left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.gateway.load import quantile
from benchmarks.records import Record
from benchmarks.stats import mean_of, median, median_interval

NAMES = {
    "direct": "the engine by itself",
    "marft-agents": "marft-agents serve",
    "litellm": "LiteLLM's proxy",
}
KINDS = {
    "whole": "whole replies",
    "streamed": "streams",
    "steady": "streams of 64 chunks, one every 20 ms",
    "timed": "streams of 64 chunks, the first after 20 ms, then one every 5 ms",
}
ENGINES = {
    "scripted": "A scripted engine that costs next to nothing",
    "vllm": "vLLM on the CPU, a random Llama of 2 layers",
}
LEAST_SHARE, MOST_ADDED_MS = 0.97, 2.0
"""What the gateway is to keep to."""
USUAL_CLIENTS = (1, 16, 64, 256)
_BUSY = 0.8
_HEAD = [
    "| asked by | server | requests/s | of the engine's | p50, ms | added | p99, ms | first token"
    " p50, ms | added | processor time of the server a request, ms | pairs | failed |",
    "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
]
Pairs = Sequence[float]


@dataclass
class Row:
    """One server under one setting; the lists have a value for each pair with the engine."""

    kind: str
    clients: int
    rate: float
    target: str
    per_s: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    first: float = 0.0
    cpu_ms: float = 0.0
    failed: int = 0
    busy: float = 0.0
    """The most of a core that the clients took."""
    share: list[float] = field(default_factory=list[float])
    added: list[float] = field(default_factory=list[float])
    first_added: list[float] = field(default_factory=list[float])

    @property
    def asked_by(self) -> str:
        if self.rate:
            return f"{self.rate:g} requests/s"
        return f"{self.clients} client" + ("s" if self.clients > 1 else "")

    @property
    def name(self) -> str:
        return f"{self.kind} by {self.asked_by}"


def rows_of(records: Sequence[Record]) -> list[Row]:
    """A row for every setting and server of one engine's records."""
    settings = sorted(
        {(r["kind"], r["clients"], r["rate"]) for r in records},
        key=lambda s: (list(KINDS).index(s[0]), s[2], s[1]),
    )
    out: list[Row] = []
    for setting in settings:
        of_it = [r for r in records if (r["kind"], r["clients"], r["rate"]) == setting]
        for target in NAMES:
            told = [(r["targets"].get(target), r["targets"].get("direct")) for r in of_it]
            pairs = [(mine, direct) for mine, direct in told if mine and direct]
            if pairs:
                row = Row(*setting, target)
                (_from_turns if "ms" in pairs[0][0] else _from_blocks)(row, pairs)
                out.append(row)
    return out


def _from_turns(row: Row, pairs: Sequence[tuple[Record, Record]]) -> None:
    mine = pairs[0][0]
    direct = mine.get("direct", mine)
    row.failed = mine["failed"]
    ms, first = mine["ms"], mine["first_ms"]
    if not ms:
        return
    row.per_s, row.cpu_ms = 1e3 * len(ms) / sum(ms), 1e3 * mine["server_cpu_s"] / len(ms)
    row.p50, row.p99, row.first = quantile(ms, 0.5), quantile(ms, 0.99), quantile(first, 0.5)
    row.share = [b / a for a, b in zip(ms, direct["ms"], strict=True)]
    row.added = [a - b for a, b in zip(ms, direct["ms"], strict=True)]
    row.first_added = [a - b for a, b in zip(first, direct["first_ms"], strict=True)]


def _from_blocks(row: Row, pairs: Sequence[tuple[Record, Record]]) -> None:
    row.failed = sum(mine["failed"] for mine, _ in pairs)
    row.busy = max(mine["client_cpu_s"] / mine["elapsed_s"] for mine, _ in pairs)
    good = [(mine, direct) for mine, direct in pairs if mine["requests"] and direct["requests"]]
    if not good:
        return

    def middle(figure: Callable[[Record], float]) -> float:
        return median([figure(mine) for mine, _ in good])

    row.per_s, row.p50 = middle(lambda r: r["per_s"]), middle(lambda r: r["p50_ms"])
    row.p99, row.first = middle(lambda r: r["p99_ms"]), middle(lambda r: r["first_p50_ms"])
    row.cpu_ms = middle(lambda r: 1e3 * r["server_cpu_s"] / r["requests"])
    row.share = [a["per_s"] / b["per_s"] for a, b in good]
    row.added = [a["p50_ms"] - b["p50_ms"] for a, b in good]
    row.first_added = [a["first_p50_ms"] - b["first_p50_ms"] for a, b in good]


# -- in words ----------------------------------------------------------------------------------


def chapter(records: Sequence[Record]) -> list[str]:
    """The chapter; there must be measurements."""
    servers = records[-1]["servers"]
    out = [
        "## What the gateway adds to a call",
        "",
        "Three agents, each an adapter. The engine by itself, `marft-agents serve` and LiteLLM's"
        f" proxy ({servers['litellm']}, one worker, no database). One client asks a server and the"
        " engine in turn, request by request. More clients ask again as soon as they are answered,"
        " in short blocks of one server after the other, whose order moves on; where requests come"
        " at a rate, a reply's time counts from when its request was due. Ratios and differences"
        " are taken within a pair, of two requests or two blocks: the median, and the interval that"
        " it lies in, 95 % by the order of the pairs; under 6 pairs, the least and the most."
        f" Engine, server and clients share {records[-1]['machine']['cores']} cores: what a server"
        " takes, the engine and the clients lack. Clients that do not wait make a queue before a"
        " server that is busy, which is most of the time added there. With: "
        + ", ".join(f"{k} {v}" for k, v in servers.items())
        + ".",
        "",
    ]
    for engine, model in settings_of(records):
        mine = [r for r in records if (r["engine"], r.get("model")) == (engine, model)]
        label = ENGINES[engine] if model is None else f"vLLM on the CPU, {model}"
        size = f"{mine[-1]['messages']} messages before the question"
        out += [f"### {label}", "", f"{size}, {mine[-1]['max_tokens']} tokens a reply.", ""]
        out += [*lines_for(mine), _words(mine), ""]
    return out[:-1]


def settings_of(records: Sequence[Record]) -> list[tuple[str, str | None]]:
    """Engine and model (``None``: the usual small one), in the order of the chapter."""
    found = {(r["engine"], r.get("model")) for r in records}
    return sorted(found, key=lambda s: (list(ENGINES).index(s[0]), s[1] or ""))


def lines_for(records: Sequence[Record]) -> list[str]:
    """A table for every kind of traffic, of the records of one engine."""
    out: list[str] = []
    rows = rows_of(records)
    for kind, label in KINDS.items():
        of_kind = [row for row in rows if row.kind == kind]
        if of_kind:
            out += [f"**{label[0].upper()}{label[1:]}**", "", *_HEAD, *map(_line, of_kind), ""]
    return out


def _line(row: Row) -> str:
    alone = row.target == "direct"
    cells = [
        row.asked_by,
        NAMES[row.target],
        f"{row.per_s:,.1f}",
        "-" if alone else _spread(row.share, ".1%"),
        f"{row.p50:,.2f}",
        "-" if alone else _spread(row.added, "+,.2f"),
        f"{row.p99:,.2f}",
        f"{row.first:,.2f}",
        "-" if alone else _spread(row.first_added, "+,.2f"),
        "-" if alone else f"{row.cpu_ms:.2f}",
        "-" if alone else str(len(row.share)),
        str(row.failed),
    ]
    return f"| {' | '.join(cells)} |"


def _spread(values: Pairs, form: str) -> str:
    if not values:
        return "-"
    low, high = median_interval(values)
    return f"{median(values):{form}} ({low:{form}} to {high:{form}})"


def _words(records: Sequence[Record]) -> str:
    """What the clients took, and where `marft-agents serve` misses what it is to keep to."""
    rows = rows_of(records)
    ours = [row for row in rows if row.target == "marft-agents" and row.share]
    other = {row.name: row for row in rows if row.target == "litellm"}
    load = [r["load"] for r in records]
    busy = [row.name for row in rows if row.busy > _BUSY]
    below = [row.name for row in ours if median(row.share) < LEAST_SHARE]
    late = [row.name for row in ours if median(row.added) > MOST_ADDED_MS]
    behind = [r.name for r in ours if r.name in other and r.per_s < other[r.name].per_s]
    met = {(row.kind, row.clients) for row in ours}
    usual = [(kind, n) for kind in ("whole", "streamed") for n in USUAL_CLIENTS]
    left = [Row(kind, n, 0, "").name for kind, n in usual if (kind, n) not in met]
    blocks = [share for row in ours if row.clients > 1 for share in row.share]
    return (
        f"{min(load):.0f} to {max(load):.0f} processes wanted to run meanwhile, these among them."
        f" The clients took more than {_BUSY:.0%} of a core, so that they may have been the"
        f" bottleneck: {_listed(busy)}. Below {LEAST_SHARE:.0%} of the engine's requests a second:"
        f" {_listed(below)}. More than {MOST_ADDED_MS:g} ms added at the median: {_listed(late)}."
        f" Fewer requests a second than LiteLLM's proxy: {_listed(behind)}."
        f" Not measured: {_listed(left)}." + (_together(blocks) if len(blocks) > 1 else "")
    )


def _together(shares: Pairs) -> str:
    """What all blocks of many clients say, whose settings have few each."""
    mean = mean_of([math.log(share) for share in shares])
    middle, low, high = map(math.exp, (mean.mean, mean.low, mean.high))
    return (
        f" All {mean.n} pairs of blocks of many clients together: {middle:.1%} of the engine's"
        f" requests a second ({low:.1%} to {high:.1%}, geometric mean and its 95 % interval)."
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(names)) if names else "nowhere"
