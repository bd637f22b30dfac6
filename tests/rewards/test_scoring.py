"""Scoring recorded episodes with a function."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from marft_agents.rewards import ScoreTally, score_episodes
from marft_agents.schema import Episode, RewardEvent, Turn

CASES = Path(__file__).parents[1] / "cases"


def episode(name: str = "e", *values: Any) -> Episode:
    return Episode(
        episode_id=name,
        turns=[Turn(episode_id=name, turn_id=f"{name}1", agent="writer")],
        rewards=[RewardEvent(episode_id=name, value=v) for v in values],
    )


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no str")


class Scalar:
    """What numpy's and torch's scalars have in common."""

    def __init__(self, value: float, ndim: int = 0) -> None:
        self.value, self.ndim = value, ndim

    def item(self) -> float:
        return self.value


def score(answer: Any, *episodes: Episode) -> tuple[list[Episode], ScoreTally]:
    def function(episode: Episode) -> Any:
        if isinstance(answer, Exception | SystemExit):
            raise answer
        return answer

    tally = ScoreTally()
    return list(score_episodes(function, episodes or (episode(),), tally)), tally


@pytest.mark.parametrize(("answer", "reward"), [(0.5, 0.5), (True, 1.0), (False, 0.0), (2, 2.0)])
def test_a_number_or_a_bool_is_a_reward(answer: Any, reward: float) -> None:
    scored, tally = score(answer)
    assert scored[0].team_reward == reward
    assert tally.scored == 1


def test_scalars_of_array_libraries_are_numbers_as_they_are_in_the_app() -> None:
    assert score(Scalar(0.25))[0][0].team_reward == 0.25
    assert score(Scalar(float("nan")))[1].failed == 1
    assert score(Scalar(0.25, ndim=1))[1].failed == 1


def test_a_dict_gives_each_agent_its_own() -> None:
    scored, _ = score({"writer": 0.5})
    assert scored[0].agent_rewards == {"writer": 0.5}
    assert scored[0].team_reward is None


def test_none_means_not_scored() -> None:
    scored, tally = score(None)
    assert not scored[0].scored
    assert (tally.unscored, tally.failed) == (1, 0)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (float("nan"), "not a finite number: nan"),
        (float("inf"), "not a finite number: inf"),
        ("0.5", "not a finite number: '0.5'"),
        ([1], r"not a finite number: \[1\]"),
        (1e308, "larger than 1e\\+15: 1e\\+308"),
        (10**400, "not a finite number: 1000"),
        (Unprintable(), "not a finite number: <Unprintable>"),
        (Unspeakable(), "Unspeakable: <Unspeakable>"),
        (ValueError("two\nlines"), "ValueError: two lines$"),
        (SystemExit(0), "SystemExit: 0"),
        ({}, "an empty dict"),
        ({"writer": None}, "not a finite number for agent 'writer': None"),
        ({"ghost": 1.0}, "a reward for 'ghost', who is not among writer"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
    ],
)
def test_anything_else_is_counted_and_named_and_never_zero(answer: Any, why: str) -> None:
    scored, tally = score(answer)
    assert not scored[0].scored
    assert tally.failed == 1
    assert tally.examples[0].startswith("episode e: ")
    assert re.search(why, tally.examples[0])


def test_a_given_reward_is_not_replaced_and_a_refused_one_not_hidden() -> None:
    given, refused = episode("given", 0.25), episode("refused", float("nan"))
    scored, tally = score(1.0, given, refused, episode("open"))
    assert [e.team_reward for e in scored] == [0.25, None, 1.0]
    assert (tally.already_scored, tally.scored) == (2, 1)


def test_case_15_which_recorded_rewards_count() -> None:
    lines = [json.loads(x) for x in (CASES / "15-rewards.jsonl").read_text().splitlines()]
    episodes = {x["episode"]: episode(x["episode"], x["value"]) for x in lines}
    assert {k: e.team_reward for k, e in episodes.items() if e.scored} == {"a": 1, "c": 0, "g": 1}
    assert [k for k, e in episodes.items() if e.refused_rewards] == ["d", "e", "f"]
