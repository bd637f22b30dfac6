"""The chapter on learning, from the records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.chart import Line, Panel, draw
from benchmarks.learning.base import VALUE_ACCURACY, BaseSettings
from benchmarks.learning.methods import BY_NAME, COMMON, METHODS
from benchmarks.learning.relay import TEAM_SIZES
from benchmarks.learning.summary import (
    REFERENCE,
    Row,
    chosen,
    curve,
    markdown_table,
    of,
    panels,
    percent,
    points,
    rates_of,
    rows,
    sizes_of,
    verdict,
)
from benchmarks.records import Record
from benchmarks.stats import Mean, difference_of, mean_of

_HEAD = (
    "method", "success after training", f"against {BY_NAME[REFERENCE].label}, points",
    "the same while learning", "collapses", "episodes to 90 % of the best", "optimizer steps",
)  # fmt: skip


def learning(every: Sequence[Record], tuning: Sequence[Record], figures: Path) -> list[str]:
    """Methods side by side, each with its own step size, and at every step size that was run."""
    records = chosen(every)
    plan = records[0]["plan"]
    total = plan["iterations"] * plan["episodes"]
    figures.mkdir(parents=True, exist_ok=True)
    chart = draw(panels(records), x_label="episodes", y_label="success", y_most=1.0)
    (figures / "learning.svg").write_text(chart, encoding="utf-8")
    out = [
        "## Does it learn, and against what?",
        "",
        *_task_text(),
        "",
        *_methods_text(),
        "",
        *_in_short(records, tuning),
        "",
        f"Every run: {plan['iterations']} iterations of {plan['episodes']} episodes ({total} in"
        f" all), {plan['group_size']} episodes of each task, {plan['epochs']} passes in steps of"
        f" {plan['block']} turns; success is measured on {plan['final_tasks']} held-out tasks"
        f" before and after ({plan['held_out']} of them after each iteration), sampled at"
        " temperature 1 as in training.",
        *_tuning_text(tuning),
        "",
        "![Success over episodes](figures/learning.svg)",
        "",
        "Lines are means over seeds, bands their 95 % intervals (Student), the dashed line is the"
        " untrained team.",
    ]
    for size in sizes_of(records):
        untrained = mean_of([r["untrained"] for r in of(records, size, REFERENCE)])
        seeds = len({r["seed"] for r in of(records, size)})
        out += [
            "",
            f"### {size}: {TEAM_SIZES[size]} agents",
            "",
            f"Untrained: {percent(untrained)}; {seeds} seeds.",
            "",
            *markdown_table(_HEAD, [row.cells() for row in rows(records, size)]),
        ]
    return [
        *out,
        "",
        "Means with 95 % intervals over seeds; differences are taken seed by seed,"
        " and intervals are not widened for the number of comparisons. *While learning*"
        " compares the mean of all measurements of a run: who learns sooner. *Episodes* is the"
        " median over the seeds that got there. A collapse is a seed that ends below its untrained"
        " team. Fewer steps than the others mean"
        " that turns were left out because they say nothing: groups of episodes that all earned"
        " the same, or an agent whose advantages do not differ.",
        *_by_rate(every),
    ]


def _by_rate(every: Sequence[Record]) -> list[str]:
    """All runs on the reported seeds by step size: nothing that was run is left out."""
    if len(rates_of(every)) < 2:
        return []
    body: list[list[str]] = []
    for size in sizes_of(every):
        for rate in rates_of(every):
            runs = [r for r in every if r["learning_rate"] == rate]
            body += [
                [size, f"{rate:g}", str(row.final.n), *row.cells()[:5]]
                for row in (rows(runs, size) if of(runs, size) else [])
            ]
    return [
        "",
        "### Every step size",
        "",
        "Everything that was run on the reported seeds, by step size. Differences are to the"
        " reference at the same step size and seeds; two seeds show next to nothing.",
        "",
        *markdown_table(("team", "step size", "seeds", *_HEAD[:5]), body),
    ]


def _task_text() -> list[str]:
    base = BaseSettings()
    return [
        "The relay (`benchmarks/learning/relay.py`): agents speak once each, in order; each sees"
        " its own digit and the words said just before, and says an operation and the new running"
        " value. The verdict is 1 when the last value is right and 0 otherwise, for the whole"
        " team; nothing is given on the way. No prompt says whether an agent has to add or to"
        " subtract: only the verdict does.",
        "",
        f"The base is a Llama of {base.layers} layers and width {base.hidden} with a tokenizer of"
        f" its own, pre-trained for about a minute and a half: in calls it adds or subtracts by"
        f" the toss of a coin and gets the value right {VALUE_ACCURACY:.0%} of the time. It has"
        " also read transcripts of good and poor relays, as language models read talk about work,"
        " in the form in which the central critic reads them; IPPO's critics read the calls. The"
        " central critic has that advantage here.",
    ]


def _methods_text() -> list[str]:
    single, ippo, group = (BY_NAME[name].label for name in ("single", "ippo", "group"))
    return [
        f"All methods are settings of this package on the same code. *{single}*: one adapter plays"
        f" every role. *{ippo}*: each agent alone, its own critic on its own prompt, all updated"
        f" at once. *{group}*: episodes of one task compared with each other, all updated at once."
        " *MARFT-A* and *MARFT-T*: the central critic and one recursion through all agents, per"
        " action or per token, agent after agent with the compound ratio. λ is"
        f" {COMMON['lam']:g} where it is not named, chosen among 0, 0.5 and 0.95 on the tuning"
        f" seeds with MARFT-A alone; it is without effect on {ippo} and {group}, so the MARFT rows"
        " have one tuned setting more than these. *λ 0.95*, the package's default, has not.",
    ]


def _in_short(records: Sequence[Record], tuning: Sequence[Record]) -> list[str]:
    """Per team size: who ends, and who learns, better or worse than the reference."""
    reference = BY_NAME[REFERENCE].label
    out = [f"In short, against {reference} (details in the tables):", ""]
    for size in sizes_of(records):
        table = rows(records, size)
        said = [
            *_group(table, "better", lambda row: row.difference, "ends better"),
            *_group(table, "worse", lambda row: row.difference, "ends worse"),
            *_group(table, "better", lambda row: row.sooner, "learns sooner"),
            *_group(table, "worse", lambda row: row.sooner, "learns later"),
        ]
        out.append(f"- {size}: {'; '.join(said) or 'no difference shown'}.")
    return [*out, *_default(records), *_unsettled(tuning), *_reading(records)]


def _default(records: Sequence[Record]) -> list[str]:
    """The package's default against the baseline that is nearest to it."""
    said: list[str] = []
    for size in sizes_of(records):
        ours = {r["seed"]: r["final"] for r in of(records, size, "marft-a-95")}
        pairs = [
            (ours[r["seed"]], r["final"]) for r in of(records, size, "ippo") if r["seed"] in ours
        ]
        if pairs:
            difference = difference_of([a for a, _ in pairs], [b for _, b in pairs])
            said.append(f"{size} {points(difference)}: {verdict(difference)}")
    if not said:
        return []
    return [
        "",
        f"{BY_NAME['marft-a-95'].label} minus {BY_NAME['ippo'].label}, points of final success:"
        f" {'; '.join(said)}.",
    ]


def _unsettled(tuning: Sequence[Record]) -> list[str]:
    """Methods whose place may be that of their step size."""
    ahead = [f"{label} ({best:g})" for label, best in _ahead(tuning)]
    if not ahead:
        return []
    return [
        "",
        "**Not settled:** on the tuning seeds another step size than the one used here did better"
        f" for {' and '.join(ahead)}. What the tables say against these is said of them at the one"
        " step size, not at their best.",
    ]


def _ahead(tuning: Sequence[Record]) -> list[tuple[str, float]]:
    """Label and step size where tuning found another one than the method uses."""
    best = tuned(tuning)
    return [
        (m.label, best[m.name])
        for m in METHODS
        if m.name in best and best[m.name] != m.learning_rate
    ]


def _group(
    table: Sequence[Row], wanted: str, of_row: Callable[[Row], Mean | None], words: str
) -> list[str]:
    names = [row.label for row in table if (d := of_row(row)) is not None and verdict(d) == wanted]
    return [f"{words}: {', '.join(names)}"] if names else []


def _reading(records: Sequence[Record]) -> list[str]:
    """Where the difference comes from, if the largest team shows it."""
    largest = sizes_of(records)[-1]
    names = ("ippo", "marft-a-95", "marft-a")
    found = [of(records, largest, name) for name in names]
    if not all(found):
        return []
    ippo, slow, fast = (mean_of([r["final"] for r in runs]).mean for runs in found)
    if not ippo < slow < fast:
        return []
    return [
        "",
        f"With {TEAM_SIZES[largest]} agents the order of the means is {BY_NAME['ippo'].label},"
        f" {BY_NAME['marft-a-95'].label}, {BY_NAME['marft-a'].label}. A reading of it, not tested"
        " by itself: the smaller λ is, the more of an early agent's credit is what the critic saw"
        " change behind it, and the less is the verdict, in which the errors of all later agents"
        " are noise. In short relays there is little of that noise, and little to gain.",
    ]


def _tuning_text(tuning: Sequence[Record]) -> list[str]:
    """How step sizes were chosen: what was tried, and what was not."""
    rates = sorted({m.learning_rate for m in METHODS})
    if len(rates) == 1:
        chosen = f"{rates[0]:g} for every method"
    else:
        chosen = ", ".join(f"{m.label} {m.learning_rate:g}" for m in METHODS)
    if not tuning:
        return ["", f"Step size: {chosen}."]
    seeds = ", ".join(map(str, sorted({r["seed"] for r in tuning})))
    others = [f"{label} ({best:g})" for label, best in _ahead(tuning)]
    judged = (
        f"By mean success another one was ahead for {' and '.join(others)}."
        if others
        else "By mean success none of the others tried was ahead for any method."
    )
    if others:
        judged += (
            " One step size was kept for all, so where another was ahead the method is not at its"
            " tuned best here; single runs differ a lot at this size, as the last table shows."
        )
    return [
        "",
        f"Step size: {chosen}, chosen, like all other settings, on seeds that are not reported"
        f" ({seeds}). {judged} What was tried (mean final success, runs in brackets; empty: not"
        " tried):",
        "",
        *_tuning_table(tuning),
    ]


def _tuning_table(tuning: Sequence[Record]) -> list[str]:
    rates = sorted({r["learning_rate"] for r in tuning})
    columns = [(size, rate) for size in sizes_of(tuning) for rate in rates]
    body: list[list[str]] = []
    for method in METHODS:
        if any(r["method"] == method.name for r in tuning):
            cells = [_tried(tuning, method.name, *column) for column in columns]
            body.append([method.label, *cells])
    return markdown_table(["method", *(f"{size}, {rate:g}" for size, rate in columns)], body)


def _tried(tuning: Sequence[Record], method: str, size: str, rate: float) -> str:
    runs = [r["final"] for r in of(tuning, size, method) if r["learning_rate"] == rate]
    return f"{mean_of(runs).mean:.0%} ({len(runs)})" if runs else ""


def tuned(tuning: Sequence[Record]) -> dict[str, float]:
    """The best step size of every method, over the sizes that all of its step sizes were tried on.

    Sizes weigh alike. A method without such a size is left out.
    """
    out: dict[str, float] = {}
    for name in dict.fromkeys(r["method"] for r in tuning):
        runs = [r for r in tuning if r["method"] == name]
        rates = sorted({r["learning_rate"] for r in runs})
        sizes = [
            size
            for size in sizes_of(runs)
            if {r["learning_rate"] for r in of(runs, size)} == set(rates)
        ]
        if len(rates) < 2 or not sizes:
            continue
        means = {
            rate: mean_of(
                [
                    mean_of([r["final"] for r in of(runs, size) if r["learning_rate"] == rate]).mean
                    for size in sizes
                ]
            ).mean
            for rate in rates
        }
        out[name] = max(means, key=lambda rate: means[rate])
    return out


# -- logs first --------------------------------------------------------------------------------


def logs_first(records: Sequence[Record], scratch: Sequence[Record], figures: Path) -> list[str]:
    """Offline, then online, against online alone."""
    plan = records[0]["plan"]
    logged, total = plan["logged"], plan["logged"] + plan["iterations"] * plan["episodes"]
    label = BY_NAME[REFERENCE].label
    pictures: list[Panel] = []
    body: list[list[str]] = []
    scratch = [r for r in scratch if r["learning_rate"] in rates_of(records)]
    for size in sizes_of(records):
        these, those = of(records, size, REFERENCE), of(scratch, size, REFERENCE)
        pictures.append(Panel(size, _two_lines(these, those, logged)))
        body.append([size, *_comparison(these, those, logged, total)])
    chart = draw(pictures, x_label="episodes, logged ones included", y_label="success", y_most=1.0)
    (figures / "logs-first.svg").write_text(chart, encoding="utf-8")
    return [
        "## Logs first, then online",
        "",
        f"{label} from {logged} logged episodes of the untrained team (advantage-weighted"
        f" regression, as many passes), then {plan['iterations']} iterations online; against"
        f" {label} online from the start, as above. Both take {total} episodes and as many steps"
        " in all; the logs cost nobody's time, so the last column compares at equal numbers of"
        " episodes *played for training*.",
        "",
        "![Success over episodes](figures/logs-first.svg)",
        "",
        *markdown_table(
            (
                "team", "after the logs", "logs first, final", "online alone, final",
                "points, equal episodes in all", "points, equal episodes online",
            ),
            body,
        ),
    ]  # fmt: skip


def _two_lines(these: Sequence[Record], those: Sequence[Record], logged: int) -> list[Line]:
    return [curve(those, "online alone"), curve(these, f"{logged} logged episodes first")]


def _comparison(
    these: Sequence[Record], those: Sequence[Record], logged: int, total: int
) -> list[str]:
    by_seed = {r["seed"]: r for r in those}
    pairs = [(r, by_seed[r["seed"]]) for r in these if r["seed"] in by_seed]
    in_all = difference_of([a["final"] for a, _ in pairs], [b["final"] for _, b in pairs])
    online = difference_of(
        [a["success"][-1] for a, _ in pairs],
        [b["success"][b["episodes"].index(total - logged)] for _, b in pairs],
    )
    after = mean_of([r["success"][r["episodes"].index(logged)] for r in these])
    return [
        percent(after),
        percent(mean_of([a["final"] for a, _ in pairs])),
        percent(mean_of([b["final"] for _, b in pairs])),
        f"{points(in_all)}: {verdict(in_all)}",
        f"{points(online)}: {verdict(online)}",
    ]
