"""What a run changed.

Invariant: every adapter that was trained is here with the version it came from and the one it
became, and with the measured effect; the table is drawn from these records alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from marft_agents.schema import served_name
from marft_agents.training.advantages import Credits
from marft_agents.training.effect import Effect
from marft_agents.training.plan import Untouched
from marft_agents.training.preflight import table


@dataclass(frozen=True)
class AdapterResult:
    """One trained and published adapter."""

    adapter: str
    agents: list[str]
    episodes: int
    turns: int
    tokens: int
    mean_weight: float
    """Over the turns that were not skipped; a turn's weight in the loss is relative to it."""
    skipped: int
    """Turns of little weight."""
    effect: Effect
    parent: int | None
    version: int


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
    """Online: numbers of every round, ``online/<name>`` and ``<adapter>/<name>``."""
    swapped: dict[str, str] = field(default_factory=dict[str, str])
    """Adapters that a server serves already, with ``yes``."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Last logged training metrics, ``<adapter>/<name>``."""


def result_lines(result: FinetuneResult, swapped: Mapping[str, str]) -> Iterator[str]:
    """The final table; ``swapped`` says per adapter whether a server serves the new version."""
    rows: list[tuple[str, ...]] = [
        (
            "adapter",
            "episodes",
            "turns",
            "used",
            "tokens",
            "weight",
            "good",
            "bad",
            "version",
            "served",
        )
    ]
    for a in result.adapters:
        origin = f"v{a.parent}" if a.parent is not None else "new"
        rows.append(
            (
                a.adapter,
                str(a.episodes),
                str(a.turns),
                str(a.turns - a.skipped),
                str(a.tokens),
                f"{a.mean_weight:.2f}",
                f"{a.effect.good_change:+.3f}",
                f"{a.effect.bad_change:+.3f}",
                f"{origin} -> v{a.version}",
                swapped.get(a.adapter, "no"),
            )
        )
    yield from table(rows)
    yield "good, bad: change of the mean log-probability per token of the best and worst turns"
    for a in result.adapters:
        if not a.effect.as_intended:
            yield (
                f"WARNING: {served_name(a.adapter, a.version)}: good turns did not gain on bad"
                " ones; evaluate it before you use it, or train longer"
            )
    yield from (f"untouched: {u.name}: {u.why}" for u in result.untouched)


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
