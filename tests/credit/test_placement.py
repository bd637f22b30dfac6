"""Order of turns, and where rewards fall."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from marft_agents.credit import dependency_order, is_action, place_rewards
from marft_agents.errors import LogError
from marft_agents.schema import Episode, RewardEvent, Turn


def turn(turn_id: str, agent: str = "a", **fields: Any) -> Turn:
    return Turn(episode_id="e", turn_id=turn_id, agent=agent, **fields)


def reward(value: float, **fields: Any) -> RewardEvent:
    return RewardEvent(episode_id="e", value=value, **fields)


def ids(turns: list[Turn]) -> list[str]:
    return [t.turn_id for t in turns]


def test_completion_order_is_kept_when_it_respects_the_dependencies() -> None:
    turns = [turn("y", index=1, depends_on=["x"]), turn("z", index=2), turn("x", index=0)]
    assert ids(dependency_order(turns)) == ["x", "y", "z"]


def test_a_turn_moves_behind_what_it_read() -> None:
    turns = [turn("x", index=0, depends_on=["z"]), turn("y", index=1), turn("z", index=2)]
    assert ids(dependency_order(turns)) == ["y", "z", "x"]


def test_dependencies_outside_the_episode_are_ignored() -> None:
    assert ids(dependency_order([turn("x", depends_on=["elsewhere"])])) == ["x"]


def test_a_circle_is_named() -> None:
    turns = [turn("x", depends_on=["y"]), turn("y", index=1, depends_on=["x"])]
    with pytest.raises(LogError, match="circle: x, y"):
        dependency_order(turns)


def test_selection_and_failed_calls_are_no_actions() -> None:
    assert is_action(turn("x")) and is_action(turn("x", kind="reflect"))
    assert not is_action(turn("x", kind="select"))
    assert not is_action(turn("x", error="timeout"))


def test_team_agent_and_turn_rewards_add_up() -> None:
    turns = [turn("1", "a", index=0), turn("2", "b", index=1), turn("3", "a", index=2)]
    episode = Episode(
        episode_id="e",
        turns=turns,
        rewards=[
            reward(1),
            reward(0.5, agent="b"),
            reward(0.25, turn_id="1"),
            reward(2, agent="a"),
        ],
    )
    placed = place_rewards(episode, turns)
    assert placed.reward_K == [0.25, 0.5, 3]
    assert placed.team_K == [0.25, 0, 1], "a turn's reward is the team's unless it names an agent"
    assert placed.own_K == [0, 0.5, 2]
    assert placed.unplaced == []


def test_a_turns_reward_that_names_an_agent_is_its_own() -> None:
    turns = [
        turn("1", "a", index=0),
        turn("2", "b", index=1),
        turn("note", "a", index=2, kind="summary"),
        turn("3", "a", index=3),
        turn("4", "c", index=4),
    ]
    rewards = [
        reward(1, agent="b", turn_id="2"),
        reward(2, agent="a", turn_id="note"),
        reward(4, agent="c", turn_id="1"),
        reward(8, turn_id="2"),
    ]
    placed = place_rewards(Episode(episode_id="e", turns=turns, rewards=rewards), turns)
    assert placed.own_K == [2, 1, 0, 4], "each on an action of its agent, never on another's"
    assert placed.team_K == [0, 8, 0, 0]
    assert placed.reward_K == [2, 9, 0, 4]


def test_the_latest_reward_of_one_agent_turn_and_source_wins() -> None:
    turns = [turn("1", "a")]
    rewards = [
        reward(1, agent="a", turn_id="1", time=datetime(2025, 1, 2, tzinfo=UTC)),
        reward(9, agent="a", turn_id="1", time=datetime(2025, 1, 1, tzinfo=UTC)),
        reward(2, turn_id="1"),
        reward(4, turn_id="1", source="review"),
    ]
    placed = place_rewards(Episode(episode_id="e", turns=turns, rewards=rewards), turns)
    assert (placed.own_K, placed.team_K) == ([1], [6])


def test_the_team_reward_falls_on_the_last_action_not_on_a_selection() -> None:
    turns = [turn("1", index=0), turn("2", index=1, kind="select"), turn("3", index=2, error="x")]
    placed = place_rewards(Episode(episode_id="e", turns=turns, rewards=[reward(1)]), turns)
    assert placed.reward_K == [1]


def test_the_reward_of_a_turn_that_is_no_action_goes_to_the_action_before_it() -> None:
    turns = [
        turn("s", index=0, kind="select"),
        turn("1", index=1),
        turn("2", index=2),
        turn("r", index=3, kind="summary"),
    ]
    rewards = [reward(1, turn_id="r"), reward(0.5, turn_id="s")]
    placed = place_rewards(Episode(episode_id="e", turns=turns, rewards=rewards), turns)
    assert placed.reward_K == [0.5, 1]


def test_a_reward_for_nobody_is_reported_and_moved_to_nobody() -> None:
    turns = [turn("1")]
    rewards = [reward(1), reward(9, agent="ghost"), reward(9, turn_id="nowhere")]
    placed = place_rewards(Episode(episode_id="e", turns=turns, rewards=rewards), turns)
    assert placed.reward_K == [1]
    assert len(placed.unplaced) == 2 and "'ghost'" in placed.unplaced[0]
    named = [reward(9, agent="ghost", turn_id="1"), reward(9, agent="a", turn_id="nowhere")]
    placed = place_rewards(Episode(episode_id="e", turns=turns, rewards=named), turns)
    assert placed.reward_K == [0]
    assert placed.unplaced == ["turn 'nowhere' is not in the episode", "agent 'ghost' did not act"]


def test_an_episode_without_action_places_nothing() -> None:
    turns = [turn("s", kind="select")]
    placed = place_rewards(Episode(episode_id="e", turns=turns, rewards=[reward(1)]), turns)
    assert placed.reward_K == [] and placed.unplaced
