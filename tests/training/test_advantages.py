"""From values to advantages and weights: per adapter, per agent, and never scaling noise up."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from marft_agents.errors import NothingToLearn
from marft_agents.training.advantages import Credits, add_awr_weights, assign_credit
from marft_agents.training.config import MarftConfig
from marft_agents.training.critic import EpisodeValues
from marft_agents.training.dataset import EpisodeView, TrainingSet, TurnRow
from marft_agents.training.effect import best_and_worst
from tests.log.events import CASES

Rows = dict[str, list[int]]
NO_SKIP: dict[str, Any] = {"awr_skip_share": 0}


def row(episode: int, k: int, agent: str, tokens: int = 1) -> TurnRow:
    return TurnRow(
        episode=episode,
        k=k,
        turn_id=f"{episode}.{k}",
        agent=agent,
        prompt_ids=array("q", [1]),
        token_ids=array("q", [2] * tokens),
        logprobs=array("d", [-0.1] * tokens),
        temperature=1.0,
        incomparable=None,
        compare_at=1.0,
        adapter=None,
    )


@dataclass
class Given:
    data: TrainingSet
    by_adapter: Rows


def given(
    rewards: Sequence[tuple[float, float]],
    adapters: dict[str, list[str]],
    *,
    tasks: Sequence[str] | None = None,
    own: Sequence[tuple[float, float]] | None = None,
) -> Given:
    """Episodes of agents a then b, in two steps, each with a reward of its own."""
    episodes: list[EpisodeView] = []
    turns: list[TurnRow] = []
    for n, pair in enumerate(rewards):
        episodes.append(
            EpisodeView(
                episode_id=f"e{n}",
                task=None if tasks is None else tasks[n],
                agents_K=["a", "b"],
                turn_ids_K=[f"{n}.0", f"{n}.1"],
                steps_K=[0, 1],
                team_reward_K=list(pair),
                own_reward_K=[0.0, 0.0] if own is None else list(own[n]),
                depends_K=[[], [0]],
                truncated=False,
                lines=[],
            )
        )
        turns += [row(n, 0, "a", tokens=2), row(n, 1, "b")]
    rows = {
        name: [i for i, r in enumerate(turns) if r.agent in agents]
        for name, agents in adapters.items()
    }
    return Given(TrainingSet(episodes, turns), rows)


def assign(
    g: Given,
    value: float = 0.0,
    *,
    tokens: Sequence[Sequence[float]] | None = None,
    weights: bool = True,
    **settings: Any,
) -> Credits:
    config = MarftConfig(use_cpu=True, **settings)
    values = None
    if config.estimator != "group":
        per_token = None if tokens is None else [list(v) for v in tokens]
        values = [EpisodeValues([value, value], 0.0, per_token) for _ in g.data.episodes]
    credits = assign_credit(g.data, g.by_adapter, values, config)
    if weights:
        add_awr_weights(credits, g.by_adapter, config)
    return credits


def test_advantages_are_normalised_per_agent_and_weighted() -> None:
    g = given([(0, 0), (0, 1), (0, 0), (0, 1)], {"a": ["a"], "b": ["b"]})
    credits = assign(g, lam=1.0, awr_temperature=0.5, awr_weight_max=5.0, **NO_SKIP)
    assert [round(credits.mean(i), 3) for i in range(8)] == [-1, -1, 1, 1] * 2
    light, heavy = math.exp(-2), 5.0  # the heavy one is clipped
    mean = (light + heavy) / 2
    assert credits.weight[2] == [pytest.approx(heavy / mean)]
    assert credits.weight[0] == [pytest.approx(light / mean)]
    assert credits.mean_weight == {"a": pytest.approx(mean), "b": pytest.approx(mean)}
    assert credits.skipped == {"a": 0, "b": 0}


def test_credit_of_an_episode_adds_up_to_the_teams_advantage() -> None:
    credits = assign(given([(0, 0), (0.5, 1)], {"a": ["a"], "b": ["b"]}), value=0.25)
    for episode, total in zip(credits.actions, (0.0, 1.5), strict=True):
        assert math.fsum(a.delta for a in episode) == pytest.approx(total - 0.25)


def test_an_adapter_whose_turns_do_not_differ_is_left_out() -> None:
    credits = assign(given([(0, 1), (1, 1), (0, 1)], {"a": ["a"], "b": ["b"]}), lam=0.0)
    assert credits.flat == ["b"]
    assert set(credits.advantage) == {0, 2, 4} == set(credits.weight)


@pytest.mark.parametrize("estimator", ["marft", "group", "ippo", "single"])
def test_nothing_is_trained_when_no_adapters_turns_differ(estimator: str) -> None:
    g = given([(0, 1), (0, 1)], {"a": ["a"], "b": ["b"]}, tasks=["t", "t"])
    with pytest.raises(NothingToLearn, match="nothing to learn"):
        assign(g, estimator=estimator)


@pytest.mark.parametrize(("share", "skipped"), [(0.0, 0), (0.02, 1), (0.04, 2), (0.5, 3)])
def test_the_lightest_turns_are_skipped_up_to_a_share_of_all_weight(
    share: float, skipped: int
) -> None:
    g = given([(0, 0), (0.1, 0), (0.2, 0), (1, 0)], {"a": ["a"]})
    everything = assign(g, lam=0.0, **NO_SKIP)
    credits = assign(g, lam=0.0, awr_skip_share=share)
    absolute = [everything.weight[i][0] * everything.mean_weight["a"] for i in (0, 2, 4, 6)]
    left = [credits.weight[i][0] * credits.mean_weight["a"] for i in (0, 2, 4, 6)]
    assert left == pytest.approx([0.0] * skipped + absolute[skipped:])
    assert credits.skipped == {"a": skipped}
    used = [w for w in left if w > 0]
    assert credits.mean_weight["a"] == pytest.approx(math.fsum(used) / len(used))
    assert math.fsum(absolute) - math.fsum(left) <= share * math.fsum(absolute) + 1e-12


def test_a_shared_adapter_scales_each_agent_by_itself() -> None:
    credits = assign(given([(0, 0), (1, 100)], {"ab": ["a", "b"]}), lam=0.0)
    assert [round(credits.mean(i), 3) for i in range(4)] == [-1, -1, 1, 1]
    team = assign(given([(0, 0), (1, 100)], {"ab": ["a", "b"]}), lam=0.0, normalise="team")
    assert abs(team.mean(2)) < 0.7 < team.mean(3)


def test_at_token_level_every_token_has_an_advantage_and_a_weight() -> None:
    """a's two tokens have values of their own; b's one comes after them."""
    g = given([(0, 0), (0, 1)], {"a": ["a"], "b": ["b"]})
    values = [[0.5, 0.25], [0.5]]
    credits = assign(
        g, tokens=values, level="token", lam=0.0, lam_w=0.0, normalise="none", **NO_SKIP
    )
    assert credits.advantage[0] == [pytest.approx(-0.25), pytest.approx(0.25)]
    assert credits.advantage[1] == [pytest.approx(-0.5)]
    assert credits.advantage[3] == [pytest.approx(0.5)]
    assert [len(credits.weight[i]) for i in range(4)] == [2, 1, 2, 1]
    assert credits.weight[0][1] > credits.weight[0][0] > 0


def test_ippo_gives_an_agent_the_teams_reward_and_no_others_own() -> None:
    """b's own reward is b's alone, where the team's estimator lets a earn it too."""
    g = given([(0, 0), (0, 1)], {"a": ["a"], "b": ["b"]}, own=[(0, 2.0), (0, 0)])
    alone = assign(g, estimator="ippo", lam=1.0, normalise="none", weights=False)
    assert [alone.mean(i) for i in range(4)] == pytest.approx([0, 2, 1, 1])
    team = assign(g, lam=1.0, normalise="none", weights=False)
    assert [team.mean(i) for i in range(4)] == pytest.approx([2, 2, 1, 1])


# -- group ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["action", "token"])
def test_case_16_groups_without_spread_take_no_part(level: str) -> None:
    """Case 16: neither an advantage nor a weight, so no share in any mean; signs as wanted."""
    case = json.loads((CASES / "16-flat-groups.json").read_text())
    rewards = [(0.0, float(g)) for group in case["groups"] for g in group]
    tasks = [f"t{n}" for n, group in enumerate(case["groups"]) for _ in group]
    wanted = [sign for group in case["want_advantage_signs"] for sign in group]
    g = given(rewards, {"a": ["a"], "b": ["b"]}, tasks=tasks)
    credits = assign(g, estimator="group", level=level, **NO_SKIP)
    assert credits.flat_groups == 3 and credits.flat == []
    loud = [i for i in range(len(g.data.rows)) if wanted[g.data.rows[i].episode] != 0]
    assert set(credits.advantage) == set(loud) == set(credits.weight)
    for i in loud:
        assert math.copysign(1, credits.mean(i)) == wanted[g.data.rows[i].episode]
    for episode, sign in enumerate(wanted):
        for action in credits.actions[episode]:
            assert math.isfinite(action.advantage_L[0])
            assert sign or action.advantage_L == [0.0]
    for adapter, rows in g.by_adapter.items():
        used = [credits.weight[i][0] for i in rows if i in credits.weight]
        assert math.fsum(used) / len(used) == pytest.approx(1), adapter


def test_a_group_may_say_something_to_one_agent_only() -> None:
    """b has rewards of its own that differ; a's returns of the task are the same."""
    own = [(0.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.0, 0.0)]
    rewards = [(0.0, 1.0), (0.0, 1.0), (0.0, 0.0), (0.0, 1.0)]
    tasks = ["t", "t", "u", "u"]
    g = given(rewards, {"a": ["a"], "b": ["b"]}, tasks=tasks, own=own)
    credits = assign(g, estimator="group", **NO_SKIP)
    assert set(credits.advantage) == {4, 6, 1, 3, 5, 7}
    assert credits.flat_groups == 0


def test_a_middling_episode_of_a_group_counts() -> None:
    """An advantage of exactly 0 in a group with spread is a baseline met, not silence."""
    g = given([(0, 0), (0, 0.5), (0, 1)], {"a": ["a"]}, tasks=["t"] * 3)
    credits = assign(g, estimator="group", **NO_SKIP)
    assert credits.advantage[2] == [0.0] and set(credits.weight) == {0, 2, 4}


def test_best_and_worst_turns_do_not_overlap() -> None:
    advantage = {i: float(i) for i in range(5)}
    assert best_and_worst(advantage, 8) == ([3, 4], [0, 1])
    assert best_and_worst(advantage, 1) == ([4], [0])
