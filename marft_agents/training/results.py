"""What a run changed.

Invariant: every adapter that was trained is here with the version it came from and the one it
became, and with the measured effect; the table is drawn from these records alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marft_agents.schema import served_name
from marft_agents.training.advantages import Credits
from marft_agents.training.effect import Effect
from marft_agents.training.plan import Untouched
from marft_agents.training.preflight import table
from marft_agents.training.publish import Trained
from marft_agents.training.work import Work


@dataclass(frozen=True)
class AdapterResult:
    """One trained and published adapter; the numbers are those of its last update."""

    adapter: str
    agents: list[str]
    episodes: int
    turns: int
    tokens: int
    method: str
    """Of the last update: awr, ppo, sft, kto or dpo."""
    used: int
    """Turns that carry weight (awr) or allow a ratio (ppo); all that there were, else."""
    mean_weight: float
    """awr: over the used turns; a turn's weight in the loss is relative to it."""
    effect: Effect
    parent: int | None
    """Version that the last update started from."""
    start: int | None
    """Version that the run started from."""
    version: int

    @property
    def skipped(self) -> int:
        return self.turns - self.used

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> AdapterResult:
        """Read what ``dataclasses.asdict`` wrote."""
        fields: dict[str, Any] = {**saved, "effect": Effect(**saved["effect"])}
        return cls(**fields)


def adapter_result(
    trained: Trained, work: Work, *, method: str, version: int, before: AdapterResult | None
) -> AdapterResult:
    """What an update made of an adapter; ``before``: what earlier updates of the run did."""
    adapter, credits = trained.adapter, work.credits
    own = method in ("awr", "ppo")
    seen = work.report.seen[adapter]
    return AdapterResult(
        adapter=adapter,
        agents=trained.agents,
        **seen,
        method=method,
        used=work.report.rows[adapter] if own else seen["turns"],
        mean_weight=1.0 if credits is None else credits.mean_weight.get(adapter, 1.0),
        effect=trained.effect,
        parent=trained.parent,
        start=trained.parent if before is None else before.start,
        version=version,
    )


@dataclass(frozen=True)
class FinetuneResult:
    """What ``finetune`` published."""

    adapters: list[AdapterResult]
    untouched: list[Untouched]
    explained_variance: float | None
    """Of the critic, out of fold; ``None`` without a critic."""
    seconds: float
    tokens_scored: int
    """Prompt and reply tokens of all passes, as if nothing had been shared."""
    credit_file: Path | None
    rounds: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    """Online: numbers of every iteration, ``online/<name>`` and ``<adapter>/<name>``."""
    swapped: dict[str, str] = field(default_factory=dict[str, str])
    """Adapters that a server serves already, with ``yes``."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Last logged training metrics, ``<adapter>/<name>``."""


def result_lines(result: FinetuneResult, swapped: Mapping[str, str]) -> Iterator[str]:
    """The final tables; ``swapped`` says per adapter whether a server serves the new version."""
    if result.rounds:
        yield from iteration_lines(result.rounds)
        yield ""
    if result.adapters:
        yield from table(_adapter_rows(result.adapters, swapped))
        yield "good, bad: change of the mean log-probability per token of the best and worst turns"
    for a in result.adapters:
        if not a.effect.as_intended:
            yield (
                f"WARNING: {served_name(a.adapter, a.version)}: good turns did not gain on bad"
                " ones; evaluate it before you use it, or train longer"
            )
    yield from (f"untouched: {u.name}: {u.why}" for u in result.untouched)


def _adapter_rows(
    adapters: Sequence[AdapterResult], swapped: Mapping[str, str]
) -> list[tuple[str, ...]]:
    """The weight is awr's alone; where all are of another method it has no column."""
    weighted = any(a.method == "awr" for a in adapters)
    head = ("adapter", "episodes", "turns", "used", "tokens")
    tail = ("good", "bad", "version", "served")
    rows: list[tuple[str, ...]] = [(*head, *(("weight",) if weighted else ()), *tail)]
    for a in adapters:
        origin = f"v{a.start}" if a.start is not None else "new"
        weight = f"{a.mean_weight:.2f}" if a.method == "awr" else "-"
        rows.append((
            a.adapter,
            str(a.episodes),
            str(a.turns),
            str(a.used),
            str(a.tokens),
            *((weight,) if weighted else ()),
            f"{a.effect.good_change:+.3f}",
            f"{a.effect.bad_change:+.3f}",
            f"{origin} -> v{a.version}",
            swapped.get(a.adapter, "no"),
        ))  # fmt: skip
    return rows


def iteration_lines(rounds: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """One line an iteration: what was collected and earned, and what became of every adapter."""
    names = [name for numbers in rounds for name in numbers]
    adapters = sorted({n.removesuffix("/version") for n in names if n.endswith("/version")})
    rows: list[tuple[str, ...]] = [("iteration", "episodes", "failed", "reward", *adapters)]
    for number, facts in enumerate(rounds, start=1):
        rows.append((
            str(number),
            _whole(facts, "online/episodes"),
            _whole(facts, "online/failed"),
            _number(facts, ("online/reward_mean", "reward"), ".3f"),
            *(_of_adapter(facts, adapter) for adapter in adapters),
        ))  # fmt: skip
    yield from table(rows)
    yield "per adapter: version, KL to the iteration's start, entropy; both per token"


def _of_adapter(facts: Mapping[str, float], adapter: str) -> str:
    if f"{adapter}/version" not in facts:
        return "-"
    kl, entropy = (_number(facts, (f"{adapter}/{n}",), ".3f") for n in ("kl", "entropy"))
    return f"v{_whole(facts, f'{adapter}/version')} {kl} {entropy}"


def _whole(facts: Mapping[str, float], name: str) -> str:
    return _number(facts, (name,), ".0f")


def _number(facts: Mapping[str, float], names: Sequence[str], form: str) -> str:
    """The first of these numbers that there is; ``-`` for none."""
    found = next((facts[name] for name in names if name in facts), None)
    return "-" if found is None else format(found, form)


def credit_lines(credits: Credits, weights: Mapping[tuple[int, int], float]) -> Iterable[str]:
    """``credit.jsonl``: one line per action; ``weight`` is null where nothing was trained.

    ``weights`` are by (index of the episode, index of the action in it).
    """
    for number, episode in enumerate(credits.actions):
        for k, action in enumerate(episode):
            yield json.dumps(
                {
                    "episode_id": action.episode_id,
                    "turn_id": action.turn_id,
                    "agent": action.agent,
                    "value": action.value,
                    "advantage": math.fsum(action.advantage_L) / len(action.advantage_L),
                    "delta": action.delta,
                    "weight": weights.get((number, k)),
                },
                ensure_ascii=False,
            )
