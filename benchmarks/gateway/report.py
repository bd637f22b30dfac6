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
    "whole": "whole replies",
    "streamed": "streams of 64 chunks",
    "steady": "streams of 64 chunks, one every 20 ms",
}
ENGINES = {
    "scripted": "A scripted engine that answers at once",
    "vllm": "vLLM on the CPU, a random Llama of 2 layers, 64 tokens a reply",
}
LEAST_SHARE, MOST_ADDED_MS = 0.97, 2.0
"""What the gateway is to keep to."""
_HEAD = [
    "| clients | server | requests/s | of the engine's | p50, ms | added | p99, ms | first token"
    " p50, ms | added | processor time of the server a request, ms | failed |",
    "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
]


def chapter(records: Sequence[Record]) -> list[str]:
    """The chapter; there must be measurements."""
    servers = records[-1]["servers"]
    out = [
        "## What the gateway adds to a call",
        "",
        "Clients that ask again as soon as they are answered, about 1.8 kB a request on the"
        " scripted engine and 0.5 kB on vLLM; three agents, each an adapter. The engine by itself,"
        f" `marft-agents serve` and LiteLLM's proxy ({servers['litellm']}, one worker, no database)"
        " take turns in one run, in an order that moves on with each repeat. Engine, server and"
        f" clients are processes of their own and share {records[-1]['machine']['cores']} cores:"
        " what a server takes, the engine and the clients lack. Figures are medians over the"
        " repeats; ratios and differences are taken within a repeat, with the least and the most."
        " Where clients wait for each other, added time is mostly the queue before a server that"
        " is busy. With: " + ", ".join(f"{k} {v}" for k, v in servers.items()) + ".",
        "",
    ]
    for engine, label in ENGINES.items():
        of_engine = [r for r in records if r["engine"] == engine]
        if of_engine:
            busy = max(r["client_cpu_s"] / r["elapsed_s"] for r in of_engine)
            out += [f"### {label}", "", *lines_for(of_engine)]
            load = [r["load"] for r in of_engine]
            out += [
                f"The clients took {busy:.0%} of a core at most; {min(load):.0f} to {max(load):.0f}"
                f" processes wanted to run meanwhile, these among them. {_losses(of_engine)}",
                "",
            ]
    return out[:-1]


def _losses(records: Sequence[Record]) -> str:
    """Where `marft-agents serve` misses what it is to keep to."""
    found = {(r["kind"], r["clients"], r["repeat"], r["target"]): r for r in records}
    below: list[str] = []
    late: list[str] = []
    behind: list[str] = []
    for kind in KINDS:
        for clients in sorted({r["clients"] for r in records}):
            name = f"{kind} with {clients}"
            repeats = sorted({r["repeat"] for r in records})
            rows = [[found.get((kind, clients, n, t)) for t in NAMES] for n in repeats]
            pairs = [(d, o, x) for d, o, x in rows if d and o and "p50_ms" in o and "p50_ms" in d]
            if not pairs:
                continue
            share = median([o["per_s"] / d["per_s"] for d, o, _ in pairs])
            added = median([o["p50_ms"] - d["p50_ms"] for d, o, _ in pairs])
            below += [name] if share < LEAST_SHARE else []
            late += [name] if added > MOST_ADDED_MS else []
            ratios = [o["per_s"] / x["per_s"] for _, o, x in pairs if x and x["per_s"]]
            if ratios and median(ratios) < 1:
                behind.append(name)
    return (
        f"Below {LEAST_SHARE:.0%} of the engine's requests a second: {_listed(below)}."
        f" More than {MOST_ADDED_MS:g} ms added at the median: {_listed(late)}."
        f" Fewer requests a second than LiteLLM's proxy: {_listed(behind)}."
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "nowhere"


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
