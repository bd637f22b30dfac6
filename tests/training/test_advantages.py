"""From values to weights: per adapter, per agent, and never scaling noise up."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import NothingToLearn
from marft_agents.schema import BaseModelInfo
from marft_agents.training.advantages import Credits, assign_credit
from marft_agents.training.config import MarftConfig
from marft_agents.training.critic import EpisodeValues
from marft_agents.training.dataset import EpisodeView, TrainingSet, TurnRow
from marft_agents.training.effect import best_and_worst
from marft_agents.training.plan import AdapterPlan, Plan

BASE = BaseModelInfo(
    name="b", hidden_size=1, num_hidden_layers=1, vocab_size=9, model_type="x", fingerprint="f"
)


def row(episode: int, k: int, agent: str) -> TurnRow:
    return TurnRow(
        episode=episode,
        k=k,
        turn_id=f"{episode}.{k}",
        agent=agent,
        prompt_ids=array("q", [1]),
        token_ids=array("q", [2]),
        logprobs=array("d", [-0.1]),
        temperature=1.0,
        incomparable=None,
        compare_at=1.0,
        adapter=None,
    )


def make_plan(rewards: Sequence[tuple[float, float]], adapters: dict[str, list[str]]) -> Plan:
    """Episodes of agents a then b, each with a reward of its own."""
    data = TrainingSet()
    for n, pair in enumerate(rewards):
        data.episodes.append(
            EpisodeView(
                episode_id=f"e{n}",
                task=None,
                agents_K=["a", "b"],
                turn_ids_K=[f"{n}.0", f"{n}.1"],
                steps_K=[0, 1],
                team_reward_K=list(pair),
                own_reward_K=[0.0, 0.0],
                depends_K=[[], [0]],
                truncated=False,
                lines=[],
            )
        )
        data.rows += [row(n, 0, "a"), row(n, 1, "b")]
    plans = [
        AdapterPlan(
            adapter=name,
            agents=agents,
            rows=[i for i, r in enumerate(data.rows) if r.agent in agents],
            start=None,
            rank=4,
            behaviour=Counter(),
        )
        for name, agents in adapters.items()
    ]
    return Plan(data, BASE, Path("."), 99, plans, [])


def assign(plan: Plan, value: float = 0.0, **settings: Any) -> Credits:
    values = [EpisodeValues([value, value], 0.0) for _ in plan.data.episodes]
    return assign_credit(plan, values, MarftConfig(use_cpu=True, **settings))


def test_advantages_are_normalised_per_agent_and_weighted() -> None:
    plan = make_plan([(0, 0), (0, 1), (0, 0), (0, 1)], {"a": ["a"], "b": ["b"]})
    credits = assign(plan, lam=1.0, awr_temperature=0.5, awr_weight_max=5.0, awr_skip_share=0)
    assert [round(credits.advantage[i], 3) for i in range(8)] == [-1, -1, 1, 1] * 2
    assert credits.weight[2] == pytest.approx(5.0), "clipped"
    assert credits.weight[0] == pytest.approx(math.exp(-2), abs=1e-6)
    assert credits.skipped == {"a": 0, "b": 0}


def test_credit_of_an_episode_adds_up_to_the_teams_advantage() -> None:
    plan = make_plan([(0, 0), (0.5, 1)], {"a": ["a"], "b": ["b"]})
    credits = assign(plan, value=0.25)
    for episode, total in zip(credits.actions, (0.0, 1.5), strict=True):
        assert math.fsum(a.delta for a in episode) == pytest.approx(total - 0.25)


def test_an_adapter_whose_turns_do_not_differ_is_left_out() -> None:
    plan = make_plan([(0, 1), (1, 1), (0, 1)], {"a": ["a"], "b": ["b"]})
    credits = assign(plan, lam=0.0)
    assert credits.flat == ["b"]
    assert set(credits.weight) == {0, 2, 4}


def test_nothing_is_trained_when_no_adapters_turns_differ() -> None:
    with pytest.raises(NothingToLearn, match="nothing to learn"):
        assign(make_plan([(0, 1), (0, 1)], {"a": ["a"], "b": ["b"]}))


@pytest.mark.parametrize(("share", "skipped"), [(0.0, 0), (0.02, 1), (0.04, 2), (0.5, 3)])
def test_the_lightest_turns_are_skipped_up_to_a_share_of_all_weight(
    share: float, skipped: int
) -> None:
    plan = make_plan([(0, 0), (0.1, 0), (0.2, 0), (1, 0)], {"a": ["a"]})
    everything = assign(plan, lam=0.0, awr_skip_share=0).weight
    credits = assign(plan, lam=0.0, awr_skip_share=share)
    left = [credits.weight[i] for i in (0, 2, 4, 6)]
    assert left == [0.0] * skipped + [everything[i] for i in (0, 2, 4, 6)][skipped:]
    assert credits.skipped == {"a": skipped}
    used = [w for w in left if w > 0]
    assert credits.mean_weight["a"] == pytest.approx(math.fsum(used) / len(used))
    dropped = math.fsum(everything.values()) - math.fsum(left)
    assert dropped <= share * math.fsum(everything.values()) + 1e-12


def test_a_shared_adapter_scales_each_agent_by_itself() -> None:
    plan = make_plan([(0, 0), (1, 100)], {"ab": ["a", "b"]})
    credits = assign(plan, lam=0.0)
    assert [round(credits.advantage[i], 3) for i in range(4)] == [-1, -1, 1, 1]


def test_best_and_worst_turns_do_not_overlap() -> None:
    advantage = {i: float(i) for i in range(5)}
    assert best_and_worst(range(5), advantage, 8) == ([3, 4], [0, 1])
    assert best_and_worst(range(5), advantage, 1) == ([4], [0])
