"""One update of all agents: order, compounding, ratios and the reference of the KL term."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from marft_agents.credit import compound_factors
from marft_agents.training.batch import TrainRow
from marft_agents.training.critic import EpisodeValues
from marft_agents.training.dataset import EpisodeView, TrainingSet, TurnRow
from marft_agents.training.loop import Learner, rows_by_adapter
from marft_agents.training.work import UpdateReport, Work
from tests.training.learning import (
    AGENTS,
    Watch,
    learn,
    make_learner,
    make_rows,
    make_work,
    recorded,
    same,
    states,
)

TEAM = ("planner", "coder", "tester")
ONE_STEP: dict[str, Any] = {"num_train_epochs": 1.0, "per_device_train_batch_size": 99}
"""Every adapter takes one step: its metrics are those from before it moved."""


class Scored:
    """Log-probabilities of an adapter's rows after each of its updates, scored by the test."""

    def __init__(self, learner: Learner, rows: Sequence[TrainRow]) -> None:
        self.learner, self.rows = learner, rows
        self.old = self._score()
        self.new: dict[int, list[float]] = {}
        learner.after_step = self._look

    def _score(self, adapter: str | None = None) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}
        for i, row in enumerate(self.rows):
            if adapter in (None, row.adapter):
                (found[i],) = self.learner.session.score([row], row.adapter)
        return found

    def _look(self) -> None:
        self.new |= self._score(self.learner.trainer.last.adapter)

    def log_ratio(self, row: int, norm: str) -> float:
        pairs = zip(self.new[row], self.old[row], strict=True)
        count = {"token": len(self.new[row]), "word": self.rows[row].words, "sum": 1}[norm]
        return math.fsum(new - old for new, old in pairs) / count


def updated(
    learner: Learner, rows: Sequence[TrainRow], depends: Mapping[int, list[list[int]]], **kw: Any
) -> tuple[Work, Scored]:
    scored, work = Scored(learner, rows), make_work(learner, rows, depends=depends, **kw)
    learn(learner, [work])
    return work, scored


DEPENDS = {0: [[], [0], [0, 1], [0, 1, 2]], 1: [[], [], [1], []], 2: [[], [0], [], [2]]}


@pytest.mark.parametrize(
    ("norm", "order"),
    [("token", TEAM), ("word", TEAM), ("sum", TEAM), ("token", ("tester", "planner", "coder"))],
)
def test_later_agents_are_compounded_with_those_before_them(
    norm: str, order: Sequence[str], model_dir: Path, tmp_path: Path
) -> None:
    learner = make_learner(
        model_dir, tmp_path, adapters=TEAM, action_norm=norm, compound_clip=1e6, learning_rate=2e-3
    )
    rows = recorded(learner, make_rows(TEAM, episodes=3))
    work, scored = updated(learner, rows, DEPENDS, order=[[a] for a in order])
    factors = [work.batch.factor.get(i, 1.0) for i in range(len(rows))]
    for i, row in enumerate(rows):
        before = order[: order.index(row.adapter)]
        ratios = [
            math.exp(scored.log_ratio(j, norm))
            for j, other in enumerate(rows)
            if other.episode == row.episode
            and other.k in DEPENDS[row.episode][row.k]
            and row.k < 3  # the last turn is in a step of its own
            and other.adapter in before
        ]
        assert factors[i] == pytest.approx(math.prod(ratios), rel=1e-4), row.turn_id
    assert max(abs(factor - 1) for factor in factors) > 0.05, "the agents moved"
    first = [f for f, row in zip(factors, rows, strict=True) if row.adapter == order[0]]
    assert first == [1.0] * len(first)


def test_the_factors_are_the_credit_rooms_own_and_are_clipped(
    model_dir: Path, tmp_path: Path
) -> None:
    learner = make_learner(model_dir, tmp_path, adapters=TEAM, compound_clip=1.25)
    rows = recorded(learner, make_rows(TEAM, episodes=3))
    work, scored = updated(learner, rows, DEPENDS)
    for episode, depends in DEPENDS.items():
        numbers = {row.k: i for i, row in enumerate(rows) if row.episode == episode}
        for adapter, k in (("coder", 1), ("tester", 2)):
            done = TEAM[: TEAM.index(adapter)]
            ratios = [
                scored.log_ratio(numbers[j], "token") if rows[numbers[j]].adapter in done else None
                for j in range(4)
            ]
            wanted = compound_factors(ratios, depends, [0, 0, 0, 1], limit=1.25)[k]
            assert work.batch.factor[numbers[k]] == pytest.approx(wanted, rel=1e-5)
    found = set(work.batch.factor.values())
    assert {1.25, 0.8} & found, "at least one agent moved as far as the clip"
    assert all(0.8 <= factor <= 1.25 for factor in found)


def test_simultaneous_updates_start_together_and_know_nothing_of_each_other(
    model_dir: Path, tmp_path: Path
) -> None:
    learner = make_learner(model_dir, tmp_path)
    rows = recorded(learner, make_rows())
    work = make_work(learner, rows, order=[["writer", "router"]])
    learn(learner, [work])
    assert set(work.batch.factor.values()) <= {1.0}
    alone = {}
    for adapter in AGENTS:
        one = make_learner(model_dir, tmp_path)
        one.session.try_sharing(rows)
        learn(one, [make_work(one, [r for r in rows if r.adapter == adapter], order=[[adapter]])])
        alone[adapter] = states(one)[adapter]
    assert all(same(states(learner)[a], alone[a]) for a in AGENTS)


def test_compounding_changes_what_the_later_agent_learns(model_dir: Path, tmp_path: Path) -> None:
    ends = []
    for order in ([["router"], ["writer"]], [["router", "writer"]]):
        learner = make_learner(model_dir, tmp_path)
        learn(learner, [make_work(learner, recorded(learner, make_rows()), order=order)])
        ends.append(states(learner))
    assert same(ends[0]["router"], ends[1]["router"])
    assert not same(ends[0]["writer"], ends[1]["writer"])


# -- ratios --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "mode"),
    [("action", "token_truncate"), ("token", "sequence_mask"), ("token", "none")],
)
def test_case_17_every_ratio_is_1_before_anything_has_moved(
    level: str, mode: str, model_dir: Path, tmp_path: Path
) -> None:
    """Case 17: rows of both temperatures, adapters that are not the base."""
    learner = make_learner(
        model_dir, tmp_path, level=level, importance_sampling_mode=mode, **ONE_STEP
    )
    rows = recorded(learner, make_rows(level=level))
    assert {row.temperature for row in rows} == {0.7, 1.0}
    (report,) = learn(learner, [make_work(learner, rows)])
    for adapter in AGENTS:
        metrics = report.metrics
        assert metrics[f"{adapter}/ratio"] == pytest.approx(1, abs=1e-4)
        assert metrics[f"{adapter}/sampling/importance_sampling_ratio"] == pytest.approx(
            1, abs=1e-4
        )
        assert metrics[f"{adapter}/sampling/sampling_logp_difference/max"] < 1e-3
        assert metrics[f"{adapter}/kl"] == pytest.approx(0, abs=1e-6)
        assert metrics[f"{adapter}/clip_ratio/low_mean"] == 0


def test_case_17_a_cold_call_scored_at_temperature_1_has_another_ratio(
    model_dir: Path, tmp_path: Path
) -> None:
    """What the right temperature saves from: without it the ratio is far from 1."""
    learner = make_learner(model_dir, tmp_path, importance_sampling_mode="none", learning_rate=1e-6)
    rows = [r for r in recorded(learner, make_rows()) if r.temperature == 0.7]
    warm = [replace(row, temperature=1.0) for row in rows]
    (report,) = learn(learner, [make_work(learner, warm)])
    assert abs(report.metrics["router/ratio"] - 1) > 0.05


# -- reference of the KL term --------------------------------------------------------------------


def k3(learner: Learner, rows: Sequence[TrainRow], reference: Sequence[Sequence[float]]) -> float:
    """Mean over tokens of exp(ref - logp) - (ref - logp) - 1, with the adapters as they are."""
    terms: list[float] = []
    for row, ref_L in zip(rows, reference, strict=True):
        (now_L,) = learner.session.score([row], row.adapter)
        terms += [math.exp(r - n) - (r - n) - 1 for r, n in zip(ref_L, now_L, strict=True)]
    return math.fsum(terms) / len(terms)


@pytest.mark.parametrize("reference", ["start", "base"])
def test_case_25_the_kl_term_starts_at_zero_unless_the_base_is_its_reference(
    reference: str, model_dir: Path, tmp_path: Path
) -> None:
    """Case 25: continuing a tuned adapter; and still the start's after a first update."""
    said: list[str] = []
    learner = make_learner(
        model_dir, tmp_path, beta=0.1, kl_reference=reference, say=said.append, **ONE_STEP
    )
    rows = recorded(learner, [r for r in make_rows() if r.adapter == "router"])
    base = [learner.session.score([row], None)[0] for row in rows]
    start = [learner.session.score([row], "router")[0] for row in rows]
    wanted = base if reference == "base" else start
    seen: list[float] = []
    learner.after_step = lambda: seen.append(learner.trainer.last.means["kl_reference"])
    expected = [k3(learner, rows, wanted)]

    def second() -> Work:
        expected.append(k3(learner, rows, wanted))
        return make_work(learner, recorded(learner, rows), order=[["router"]])

    learn(learner, [make_work(learner, rows, order=[["router"]]), second])
    assert seen == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert seen[1] > 1e-4
    if reference == "start":
        assert seen[0] == pytest.approx(0, abs=1e-5)
    else:
        assert seen[0] > 1e-2
    to = "the base model" if reference == "base" else "the adapters this run started from"
    assert [line for line in said if "KL term" in line] == [f"KL term: weight 0.1, to {to}"]


def test_the_kl_term_pulls_back(model_dir: Path, tmp_path: Path) -> None:
    ends: list[float] = []
    for beta in (0.0, 1.0):
        learner = make_learner(model_dir, tmp_path, beta=beta, num_train_epochs=4.0)
        rows = [r for r in recorded(learner, make_rows()) if r.adapter == "router"]
        start = [learner.session.score([row], "router")[0] for row in rows]
        learn(learner, [make_work(learner, rows, order=[["router"]])])
        ends.append(k3(learner, rows, start))
    assert ends[1] < 0.5 * ends[0]


def test_reading_the_reference_changes_no_adapter(model_dir: Path, tmp_path: Path) -> None:
    learner = make_learner(model_dir, tmp_path, beta=0.1)
    rows = recorded(learner, make_rows())
    learn(learner, [make_work(learner, rows)])  # now the adapters are not the start's
    before = states(learner)
    turns = [row for row in rows if row.adapter == "router"]
    learner._reference(turns, "router")  # pyright: ignore[reportPrivateUsage] between two steps
    assert all(same(before[a], states(learner)[a]) for a in AGENTS)


# -- from episodes -------------------------------------------------------------------------------


def episodes(learner: Learner, rewards: Sequence[float]) -> TrainingSet:
    """Pairs of episodes of one task: router, then writer who read it, in one step."""
    views: list[EpisodeView] = []
    turns: list[TurnRow] = []
    made = make_rows(episodes=len(rewards))
    for n, reward in enumerate(rewards):
        views.append(
            EpisodeView(
                episode_id=f"e{n}",
                task=f"t{n // 2}",
                agents_K=["router", "writer"],
                turn_ids_K=[f"e{n}.0", f"e{n}.1"],
                steps_K=[0, 0],
                team_reward_K=[0.0, reward],
                own_reward_K=[0.0, 0.0],
                depends_K=[[], [0]],
                truncated=False,
                lines=[],
            )
        )
        for row in recorded(learner, [r for r in made if r.episode == n and r.k < 2]):
            turns.append(
                TurnRow(
                    episode=n,
                    k=row.k,
                    turn_id=row.turn_id,
                    agent=row.adapter,
                    prompt_ids=array("q", row.prompt_ids),
                    token_ids=array("q", row.token_ids),
                    logprobs=array("d", row.behaviour_L),
                    temperature=row.temperature,
                    incomparable=None,
                    compare_at=row.temperature,
                    adapter=f"{row.adapter}@v1",
                )
            )
    return TrainingSet(views, turns)


def run_updates(learner: Learner, data: TrainingSet, *iterations: int) -> list[UpdateReport]:
    reports: list[UpdateReport] = []
    roles = {agent: agent for agent in AGENTS}

    def program() -> Any:
        for i in iterations:
            reports.append((yield from learner.update(data, roles, objective="ppo", iteration=i)))

    learner.run(program())
    return reports


def order_of_steps(moved: Sequence[Sequence[str]]) -> list[str]:
    names = [adapter for (adapter,) in moved]
    return [a for n, a in enumerate(names) if n == 0 or names[n - 1] != a]


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({}, ["router", "writer"] * 3),
        ({"schedule": "alternate"}, ["writer", "router", "writer"]),
        ({"schedule": "simultaneous"}, ["router", "writer"] * 3),
    ],
)
def test_the_schedule_decides_who_is_updated_in_a_round(
    values: dict[str, Any], wanted: list[str], model_dir: Path, tmp_path: Path
) -> None:
    """The writer reads the router, so it comes second wherever all are trained."""
    learner = make_learner(model_dir, tmp_path, estimator="group", update_epochs=1, **values)
    watch = Watch(learner)
    run_updates(learner, episodes(learner, [0, 1, 1, 0]), 1, 2, 3)
    assert order_of_steps(watch.moved) == wanted
    assert watch.adam_moved == watch.moved


def test_a_random_order_is_drawn_anew_each_round(model_dir: Path, tmp_path: Path) -> None:
    learner = make_learner(
        model_dir, tmp_path, estimator="group", update_epochs=1, order="random", seed=1
    )
    watch = Watch(learner)
    run_updates(learner, episodes(learner, [0, 1, 1, 0]), *range(1, 7))
    firsts = [moved[0] for moved in watch.moved[::2]]
    assert set(firsts) == set(AGENTS)


def test_case_16_a_group_without_spread_has_no_share_in_the_loss(
    model_dir: Path, tmp_path: Path
) -> None:
    """Case 16: the same weights, bit for bit, with and without such groups, KL term included."""
    ends = []
    for rewards in ([0, 1, 1, 1, 0.3, 0.3], [0, 1]):
        learner = make_learner(model_dir, tmp_path, estimator="group", beta=0.1)
        (report,) = run_updates(learner, episodes(learner, rewards), 0)
        assert report.rows == {"router": 2, "writer": 2}
        ends.append(states(learner))
    assert all(same(ends[0][a], ends[1][a]) for a in AGENTS)
    assert not torch.equal(*(next(iter(ends[0][a].values())) for a in AGENTS))


def test_turns_without_a_ratio_have_no_say_in_the_baseline(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two good and two bad episodes are trained: mean 1/2, deviation 1/2, whatever is beside."""
    learner = make_learner(model_dir, tmp_path)
    data = episodes(learner, [0, 1, 0, 1, 1, 1, 1, 1])
    data.rows = [replace(r, off_policy="greedy" if r.episode > 3 else None) for r in data.rows]
    values = [EpisodeValues([0.0, 0.0], 0.0) for _ in data.episodes]
    monkeypatch.setattr(learner, "_values", lambda *_: values)  # pyright: ignore[reportUnknownLambdaType] a stand-in
    roles = {agent: agent for agent in AGENTS}
    by_adapter = rows_by_adapter(data, roles, AGENTS)
    work = learner.prepare(data, by_adapter, roles, objective="ppo", iteration=0)
    for adapter in AGENTS:
        found = [work.batch.rows[i].advantage for i in work.batch.rows_of(adapter)]
        assert found == pytest.approx([-1, 1, -1, 1], abs=1e-6)
        assert work.report.left_out[adapter] == {"greedy": 4}
