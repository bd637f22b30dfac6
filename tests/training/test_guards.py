"""What ends an update: how far it moved, a collapse, an explosion; and what is given back then."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from marft_agents.errors import TrainingError
from marft_agents.log import LogReader
from marft_agents.training import finetune
from marft_agents.training.dataset import TrainingSet, read_training_set
from marft_agents.training.guards import Guards, Tripped
from marft_agents.training.loop import Learner
from marft_agents.training.stages import Online
from marft_agents.training.work import UpdateReport
from tests.training.learning import (
    AGENTS,
    Watch,
    adam_of,
    learn,
    make_learner,
    make_rows,
    make_work,
    recorded,
    same,
    settings,
    states,
)
from tests.training.synthetic import Team, TinyModel, publish_untrained, snapshot


def everything(learner: Learner) -> dict[str, dict[str, Tensor]]:
    """All that an update can move."""
    adam = {f"{a}'s adam": adam_of(learner, a) for a in learner.session.adapters}
    return {**states(learner), **adam, "critic": learner.critics.state()}


def moved(
    one: Mapping[str, Mapping[str, Tensor]], other: Mapping[str, Mapping[str, Tensor]]
) -> Any:
    return [name for name in one if not same(one[name], other[name])]


# -- how far an agent moves ----------------------------------------------------------------------


def test_an_agents_passes_end_when_it_has_moved_far_enough(model_dir: Path, tmp_path: Path) -> None:
    said: list[str] = []
    learner = make_learner(
        model_dir, tmp_path, target_kl=1e-3, num_train_epochs=50.0, say=said.append
    )
    watch = Watch(learner)
    work = make_work(learner, recorded(learner, make_rows()))
    (report,) = learn(learner, [work])
    assert set(report.stopped) == set(AGENTS), "each agent by itself"
    for adapter in AGENTS:
        why = report.stopped[adapter]
        assert "KL to the start of the update " in why and "> target_kl 0.001" in why
        assert f"  {adapter}: passes end at {why}" in said
        assert 2 <= sum(m == [adapter] for m in watch.moved) < 20
    assert report.restored is None and set(report.effects) == set(AGENTS)


def test_regression_on_logs_has_no_such_limit(model_dir: Path, tmp_path: Path) -> None:
    learner = make_learner(model_dir, tmp_path, target_kl=1e-9)
    rows = recorded(learner, make_rows())
    (report,) = learn(learner, [make_work(learner, rows, objective="awr")])
    assert report.stopped == {} and learner.steps_taken == 10


# -- collapse ------------------------------------------------------------------------------------


def collapse(learner: Learner, adapter: str) -> None:
    """From now on this adapter's entropy counts as collapsed, and rewards as fallen."""
    learner.guards.first_reward = 1.0
    learner.guards.first_entropy[adapter] = 1e9


@pytest.mark.parametrize("adapter", AGENTS)
def test_a_collapse_gives_back_every_adapter_and_adam_state_bit_for_bit(
    adapter: str, model_dir: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    learner = make_learner(model_dir, tmp_path, weight_decay=0.1, say=said.append)
    rows = recorded(learner, make_rows())
    learn(learner, [make_work(learner, rows)])
    before = everything(learner)
    assert all(float(t) == 6 for n, t in before["router's adam"].items() if n.endswith("step"))
    collapse(learner, adapter)
    watch = Watch(learner)
    (report,) = learn(learner, [make_work(learner, rows, mean_reward=0.2)])
    assert ["router"] in watch.moved, "it did move before"
    assert moved(before, everything(learner)) == []
    assert report.restored is not None and report.effects == {}
    assert f"{adapter}: entropy" in report.restored and "0.200 below the first 1.000" in said[-1]
    assert "restored and the clip range halved (restore 1 of at most 3)" in said[-1]
    assert (learner.guards.clip_scale, learner.guards.trips) == (0.5, 1)
    learner.guards.first_entropy.clear()
    (report,) = learn(learner, [make_work(learner, rows)])
    assert report.restored is None
    assert learner.trainer.epsilon == (0.1, 0.1), "the next update is clipped more narrowly"


def test_a_first_update_that_collapses_leaves_no_adam_state(
    model_dir: Path, tmp_path: Path
) -> None:
    learner = make_learner(model_dir, tmp_path)
    rows, before = recorded(learner, make_rows()), everything(learner)
    collapse(learner, "writer")
    learn(learner, [make_work(learner, rows, mean_reward=0.2)])
    assert moved(before, everything(learner)) == [] and before["router's adam"] == {}


def test_after_too_many_restores_the_run_stops_with_the_reason(
    model_dir: Path, tmp_path: Path
) -> None:
    learner = make_learner(model_dir, tmp_path, max_guard_trips=2)
    rows, before = recorded(learner, make_rows()), everything(learner)
    collapse(learner, "router")
    works = [make_work(learner, rows, mean_reward=0.2) for _ in range(5)]
    with pytest.raises(
        TrainingError, match=r"router: entropy .* restored 2 times before \(limit 2"
    ):
        learn(learner, works)
    assert learner.guards.trips == 3 and learner.guards.clip_scale == 1 / 8
    assert moved(before, everything(learner)) == []


def test_a_sure_policy_that_earns_more_has_not_collapsed() -> None:
    guards = Guards(settings(entropy_floor=0.1), first_reward=0.5)
    guards.check_entropy("a", 2.0, 0.5)
    guards.check_entropy("a", 0.1, 0.6)
    guards.check_entropy("a", 0.3, 0.1)
    guards.check_entropy("b", None, 0.1)
    with pytest.raises(Tripped, match=r"entropy 0\.1000 is below 0\.2000"):
        guards.check_entropy("a", 0.1, 0.4)


def test_a_step_that_went_wrong_does_not_switch_the_guard_off(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last entropy seen is a number, even when the last loss was none."""
    from tests.training.test_trainer import Sick

    learner = make_learner(model_dir, tmp_path)
    rows = [r for r in recorded(learner, make_rows()) if r.adapter == "router"]
    Sick(monkeypatch, tmp_path, 5)
    learn(learner, [make_work(learner, rows, order=[["router"]])])
    assert learner.trainer.nonfinite == {"router": 1}
    assert math.isfinite(learner.guards.first_entropy["router"])


def test_a_guards_state_survives_json() -> None:
    guards = Guards(settings())
    guards.see_rewards(0.25)
    guards.see_rewards(0.75)
    guards.check_entropy("a", 1.5, 0.5)
    guards.trip("x")
    again = Guards(settings())
    again.load_state(json.loads(json.dumps(guards.state())))
    assert (again.trips, again.clip_scale, again.first_reward) == (1, 0.5, 0.25)
    assert again.first_entropy == {"a": 1.5}


# -- explosion of the values ---------------------------------------------------------------------


def from_logs(tiny: TinyModel, root: Path, count: int = 6, **kw: Any) -> TrainingSet:
    Team(tiny, root).write(count, **kw)
    return read_training_set(LogReader(root).episodes())


def test_exploded_values_take_no_step_and_give_the_critic_back(
    tiny: TinyModel, model_dir: Path, tmp_path: Path
) -> None:
    learner = make_learner(model_dir, tmp_path, offline="awr")
    data = from_logs(tiny, tmp_path / "logs")
    reports: list[UpdateReport] = []
    seen: list[Any] = []

    def program() -> Any:
        roles = {agent: agent for agent in AGENTS}
        for limit in (1e3, 1e-9, 1e3):
            learner.config.value_limit = limit
            before = everything(learner)
            report = yield from learner.update(data, roles, objective="ppo", iteration=1)
            reports.append(report)
            seen.append(moved(before, everything(learner)))

    learner.run(program())
    assert [report.restored is None for report in reports] == [True, False, True]
    assert "largest value" in str(reports[1].restored) and "exploded" in str(reports[1].restored)
    assert seen[1] == [] and "critic" in seen[0] and "critic" in seen[2]
    assert learner.guards.trips == 1


def test_values_are_held_against_all_that_an_episode_holds(
    tiny: TinyModel, model_dir: Path, tmp_path: Path
) -> None:
    """Rewards that cancel out add up to nothing, and values in between are no explosion."""
    learner = make_learner(model_dir, tmp_path, offline="awr", value_limit=2.0)
    data = from_logs(tiny, tmp_path / "logs")
    for n, episode in enumerate(data.episodes):
        size = 5.0 if n % 2 else 3.0
        episode.team_reward_K[:] = [size, -size]
    work = learner.prepare(
        data,
        {a: [i for i, r in enumerate(data.rows) if r.agent == a] for a in AGENTS},
        {a: a for a in AGENTS},
        objective="ppo",
        iteration=1,
    )
    assert work.report.restored is None


@pytest.mark.parametrize("value", [math.inf, math.nan, 11.0, -math.inf])
def test_values_beyond_the_limit_trip(value: float) -> None:
    guards = Guards(settings(value_limit=10.0))
    guards.check_values(9.9, 1.0)
    with pytest.raises(Tripped, match="exploded"):
        guards.check_values(abs(value), 1.0)


# -- nothing of it is published ------------------------------------------------------------------


def test_a_stage_on_logs_that_is_given_back_publishes_nothing(
    tiny: TinyModel, model_dir: Path, tmp_path: Path
) -> None:
    Team(tiny, tmp_path / "logs").write(6)
    registry = publish_untrained(tmp_path / "adapters", model_dir)
    before = snapshot(registry.root)
    with pytest.raises(TrainingError, match="nothing was published: the critic's largest value"):
        finetune(
            [tmp_path / "logs"],
            model=str(model_dir),
            output=registry.root,
            config=settings(offline="ppo", value_limit=1e-9),
            say=lambda line: None,
        )
    assert snapshot(registry.root) == before


class Fixed:
    """The same episodes every iteration."""

    def __init__(self, data: TrainingSet) -> None:
        self.data, self.signal = data, True

    def collect(self, iteration: int, current: Mapping[str, int]) -> TrainingSet:
        return self.data

    def lines(self) -> list[str]:
        return []

    def metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        raise AssertionError("nothing is resumed here")


def test_an_iteration_that_is_given_back_publishes_and_swaps_nothing(
    tiny: TinyModel, model_dir: Path, tmp_path: Path
) -> None:
    registry = publish_untrained(tmp_path / "adapters", model_dir)
    source, swaps, said = Fixed(from_logs(tiny, tmp_path / "logs")), list[Any](), list[str]()
    with pytest.raises(TrainingError, match=r"restored 2 times before .* what was published stays"):
        finetune(
            [],
            model=str(model_dir),
            output=registry.root,
            config=settings(offline="none", iterations=9, value_limit=1e-9, max_guard_trips=2),
            online=Online(source, lambda adapter, version: swaps.append((adapter, version))),
            say=said.append,
        )
    assert swaps == [] and all(registry.versions(a) == [1] for a in AGENTS)
    assert sum("restored and the clip range halved" in line for line in said) == 2
    assert [line for line in said if line.startswith("iteration")][-1] == "iteration 3 of 9"
