"""Scoring recorded episodes with a function.

Invariant: only an episode that nobody scored is asked about, and every answer that is no finite
number is counted and named. A function that fails gives no reward, never a reward of 0.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from marft_agents.rewards.function import RewardFunction
from marft_agents.schema import LARGEST_REWARD, Episode, RewardEvent

SOURCE = "reward-function"
_EXAMPLES = 5


@dataclass
class ScoreTally:
    """What became of the episodes that a function was asked about; filled while they pass."""

    already_scored: int = 0
    scored: int = 0
    unscored: int = 0
    """The function answered ``None``."""
    failed: int = 0
    """The function raised, or answered with something that is no finite number."""
    examples: list[str] = field(default_factory=list[str])
    """The first failures, each with its episode."""

    def fail(self, episode: Episode, why: str) -> None:
        self.failed += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(f"episode {episode.episode_id}: {why}")


def _number(value: object) -> float | None:
    """A finite float for a real number, a bool or an array library's scalar, else ``None``."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        value = item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _shown(value: object) -> str:
    """One line about something foreign, whose own ``__repr__`` may fail."""
    try:
        text = str(value) if isinstance(value, BaseException) else repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
    return " ".join(text[:400].split())[:140]


def _rewards(episode: Episode, answer: object) -> list[RewardEvent] | str:
    """Reward events for an answer, or what is wrong with it."""
    per_agent: Mapping[object, object]
    if isinstance(answer, Mapping):
        per_agent = answer  # pyright: ignore[reportUnknownVariableType] whatever the user returned
        if not per_agent:
            return "an empty dict of rewards"
    else:
        per_agent = {None: answer}
    agents = {turn.agent for turn in episode.turns}
    events: list[RewardEvent] = []
    for agent, value in per_agent.items():
        number = _number(value)
        whose = "" if agent is None else f" for agent {agent!r}"
        if number is not None and abs(number) > LARGEST_REWARD:
            return f"larger than {LARGEST_REWARD:g}{whose}: {number}"
        if number is None:
            return f"not a finite number{whose}: {_shown(value)}"
        if agent is not None and agent not in agents:
            return f"a reward for {agent!r}, who is not among {', '.join(sorted(agents))}"
        events.append(
            RewardEvent(
                episode_id=episode.episode_id,
                value=number,
                agent=None if agent is None else str(agent),
                source=SOURCE,
            )
        )
    return events


def score_episodes(
    function: RewardFunction, episodes: Iterable[Episode], tally: ScoreTally
) -> Iterator[Episode]:
    """The same episodes in the same order, the unscored ones with the function's reward.

    An episode whose recorded reward was refused (NaN, a string) is passed on as it is: the
    function's answer must not hide a broken source.
    """
    for episode in episodes:
        if episode.scored or episode.refused_rewards:
            tally.already_scored += 1
            yield episode
            continue
        try:
            answer = function(episode)
        except (Exception, SystemExit) as error:
            tally.fail(episode, f"{type(error).__name__}: {_shown(error)}")
            yield episode
            continue
        if answer is None:
            tally.unscored += 1
            yield episode
            continue
        rewards = _rewards(episode, answer)
        if isinstance(rewards, str):
            tally.fail(episode, rewards)
            yield episode
        else:
            tally.scored += 1
            yield episode.model_copy(update={"rewards": [*episode.rewards, *rewards]})
