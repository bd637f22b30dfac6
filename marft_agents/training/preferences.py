"""What sft, kto and dpo learn from: which turns are imitated, labelled or paired.

    sft   imitate the turns of episodes that earned sft_threshold or more; without a threshold,
          more than the mean of the episodes at hand
    kto   desirable: Â > 0; undesirable: Â < 0; Â = 0 says nothing and is left out
    dpo   two different replies of one adapter to one prompt (the same ids): the one of higher Â is
          chosen, the other rejected

Invariant: a pure choice among the turns given, the same every time. A reply that was given to one
prompt several times counts in dpo once, with its mean Â; a prompt gives each pair of its replies
once, and of them at most ``PAIRS_PER_PROMPT``, those furthest apart first. Whatever gives an
adapter nothing to learn is said with its counts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from marft_agents.errors import NothingToLearn
from marft_agents.training.config import MarftConfig
from marft_agents.training.dataset import TrainingSet
from marft_agents.training.stored import Picked

METHODS = ("sft", "kto", "dpo")
PAIRS_PER_PROMPT = 8
_ZERO = 1e-6
"""What rounding leaves of an advantage of zero."""


@dataclass(frozen=True)
class MethodRow:
    """One turn: prompt ids (P,), sampled ids (L,), its advantage and its episode's reward."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    episode: int
    episode_reward: float
    advantage: float = 0.0
    """Mean over the tokens, where each has its own; sft needs none."""


@dataclass(frozen=True)
class Labelled:
    """A turn to make likelier (desirable) or less likely."""

    row: MethodRow
    desirable: bool


@dataclass(frozen=True)
class Preference:
    """Two replies to one prompt."""

    chosen: MethodRow
    rejected: MethodRow


@dataclass
class Selection:
    """What each adapter learns from; ``idle`` are the adapters that have nothing, and why."""

    method: str
    imitated: dict[str, list[MethodRow]] = field(default_factory=dict[str, list[MethodRow]])
    labelled: dict[str, list[Labelled]] = field(default_factory=dict[str, list[Labelled]])
    pairs: dict[str, list[Preference]] = field(default_factory=dict[str, list[Preference]])
    idle: dict[str, str] = field(default_factory=dict[str, str])
    lines: list[str] = field(default_factory=list[str])

    @property
    def adapters(self) -> list[str]:
        """The adapters that have something to learn."""
        return [*self.imitated, *self.labelled, *self.pairs]


def method_rows(
    data: TrainingSet,
    rows: Sequence[int],
    advantage: Mapping[int, Sequence[float]] | None = None,
) -> list[MethodRow]:
    """Rows of a data set by their indices; ``advantage`` has one number or one a token per row."""

    def mean(i: int) -> float:
        return 0.0 if advantage is None else math.fsum(advantage[i]) / len(advantage[i])

    earned = [episode.total_reward for episode in data.episodes]
    return [
        MethodRow(
            prompt_ids=row.prompt_ids,
            token_ids=row.token_ids,
            episode=row.episode,
            episode_reward=earned[row.episode],
            advantage=mean(i),
        )
        for i, row in zip(rows, Picked(data.rows, rows), strict=True)
    ]


def episode_rewards(rows: Sequence[MethodRow]) -> list[float]:
    """The reward of every episode that has a row, each once."""
    return list({row.episode: row.episode_reward for row in rows}.values())


def imitated(
    rows: Sequence[MethodRow], threshold: float | None, rewards: Sequence[float]
) -> list[MethodRow]:
    """Rows of episodes that earned the threshold, or more than the mean of ``rewards``."""
    if threshold is not None:
        return [row for row in rows if row.episode_reward >= threshold]
    mean = math.fsum(rewards) / len(rewards)
    return [row for row in rows if row.episode_reward > mean + _ZERO * max(1.0, abs(mean))]


def labelled(rows: Sequence[MethodRow]) -> list[Labelled]:
    """Rows with an advantage, good or bad, in the order given."""
    return [Labelled(row, row.advantage > 0) for row in rows if abs(row.advantage) > _ZERO]


def paired(rows: Sequence[MethodRow], per_prompt: int = PAIRS_PER_PROMPT) -> list[Preference]:
    """Pairs of different replies to one prompt, by the rule of the module."""
    pairs: list[Preference] = []
    for replies in _replies(rows).values():
        known = [_mean_row(same) for same in replies.values()]
        ranked = [
            (a, b) if a.advantage > b.advantage else (b, a)
            for a, b in combinations(known, 2)
            if abs(a.advantage - b.advantage) > _ZERO
        ]
        widest = heapq.nlargest(per_prompt, ranked, key=lambda p: p[0].advantage - p[1].advantage)
        pairs += [Preference(good, bad) for good, bad in widest]
    return pairs


_Ids = tuple[int, ...]


def _replies(rows: Sequence[MethodRow]) -> dict[_Ids, dict[_Ids, list[MethodRow]]]:
    """Prompt to reply to the rows that hold both."""
    out: dict[_Ids, dict[_Ids, list[MethodRow]]] = {}
    for row in rows:
        replies = out.setdefault(tuple(row.prompt_ids), {})
        replies.setdefault(tuple(row.token_ids), []).append(row)
    return out


def _mean_row(same: Sequence[MethodRow]) -> MethodRow:
    first = same[0]
    mean = math.fsum(row.advantage for row in same) / len(same)
    return MethodRow(first.prompt_ids, first.token_ids, first.episode, first.episode_reward, mean)


def select(
    method: str, adapters: Mapping[str, Sequence[MethodRow]], config: MarftConfig
) -> Selection:
    """What every adapter learns from under ``method``.

    Raises:
        NothingToLearn: when no adapter has anything.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}")
    chosen = Selection(method)
    choose = {"sft": _select_sft, "kto": _select_kto, "dpo": _select_dpo}[method]
    choose(chosen, adapters, config)
    if not chosen.adapters:
        whys = "; ".join(f"{adapter}: {why}" for adapter, why in chosen.idle.items())
        raise NothingToLearn(
            f"{method} has nothing to learn from ({whys}); {_REMEDY[method]};"
            " no adapter was changed"
        )
    return chosen


_REMEDY = {
    "sft": "set sft_threshold to the lowest reward to imitate, or record episodes that end better",
    "kto": "kto needs good turns and bad ones: record more episodes, with good and bad ends",
    "dpo": "dpo needs several replies to one prompt: record each task more than once; kto and awr"
    " do not",
}


def _select_sft(
    chosen: Selection, adapters: Mapping[str, Sequence[MethodRow]], config: MarftConfig
) -> None:
    rewards = episode_rewards([row for rows in adapters.values() for row in rows])
    rule = f"a reward of {config.sft_threshold} or more"
    if config.sft_threshold is None and rewards:
        rule = f"more than the mean reward of {math.fsum(rewards) / len(rewards):g}"
    for adapter, rows in adapters.items():
        good = imitated(rows, config.sft_threshold, rewards) if rows else []
        if good:
            chosen.imitated[adapter] = good
            chosen.lines.append(
                f"sft: {adapter} imitates {len(good)} of {len(rows)} turns, from"
                f" {len(episode_rewards(good))} episodes with {rule}"
            )
        elif rows:
            best = max(row.episode_reward for row in rows)
            chosen.idle[adapter] = (
                f"none of its {len(rows)} turns is of an episode with {rule}, the best has {best:g}"
            )
        else:
            chosen.idle[adapter] = "it has no turns"


def _select_kto(
    chosen: Selection, adapters: Mapping[str, Sequence[MethodRow]], config: MarftConfig
) -> None:
    for adapter, rows in adapters.items():
        known = labelled(rows)
        good = sum(one.desirable for one in known)
        counts = (
            f"{good} desirable and {len(known) - good} undesirable turns,"
            f" {len(rows) - len(known)} without advantage left out"
        )
        if 0 < good < len(known):
            chosen.labelled[adapter] = known
            chosen.lines.append(f"kto: {adapter} learns from {counts}")
        else:
            chosen.idle[adapter] = counts


def _select_dpo(
    chosen: Selection, adapters: Mapping[str, Sequence[MethodRow]], config: MarftConfig
) -> None:
    for adapter, rows in adapters.items():
        pairs = paired(rows)
        replies = _replies(rows)
        if pairs:
            chosen.pairs[adapter] = pairs
            prompts = len({tuple(pair.chosen.prompt_ids) for pair in pairs})
            chosen.lines.append(
                f"dpo: {adapter} learns from {len(pairs)} pairs over {prompts} prompts, of"
                f" {len(rows)} turns over {len(replies)} prompts (at most {PAIRS_PER_PROMPT} a"
                " prompt, the furthest apart)"
            )
        else:
            several = sum(len(of_prompt) > 1 for of_prompt in replies.values())
            chosen.idle[adapter] = (
                f"{len(rows)} turns over {len(replies)} prompts, {several} of them with different"
                " replies, none of different advantage"
            )
