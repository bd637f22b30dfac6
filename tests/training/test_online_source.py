"""Collecting iterations of episodes: rounds, groups, rewards, and what can go wrong."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import ConfigError, NothingToLearn, RewardError, TrainingError
from marft_agents.log import LogReader
from marft_agents.recording import MarftRecorder
from marft_agents.schema import Episode, EpisodeStarted, Turn
from marft_agents.testing import ScriptedServer, token_ids_of
from marft_agents.training.tasks import Task
from tests.integrations.autogen_kit import agent, round_robin
from tests.log.events import CASES
from tests.training.online_kit import (
    CURRENT,
    App,
    always_half,
    by_task,
    drawn,
    fails_on_0,
    make_source,
    make_tasks,
    never,
    parity,
    rewards_by_task,
)


def test_an_iteration_is_read_from_its_own_folder(tmp_path: Path) -> None:
    tasks = make_tasks(9)
    with make_source(tmp_path, App(parity), tasks, group_size=2) as source:
        first, second = source.collect(1, CURRENT), source.collect(2, CURRENT)
    assert sorted(p.name for p in (tmp_path / "online" / "r1").iterdir()) == [
        "iteration-0001",
        "iteration-0002",
    ]
    for iteration, data in ((1, first), (2, second)):
        want = {task: [0.0, 1.0] for task in drawn(iteration, 2, tasks)}
        assert rewards_by_task(data) == want
        assert len(data.rows) == 8 and data.episodes_read == 4
        assert [row.episode for row in data.rows] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert data.agents == {"router": 4, "writer": 4}
    assert source.signal
    recorded = LogReader(tmp_path / "online" / "r1" / "iteration-0002").episodes()
    assert {e.episode_id for e in recorded} == {e.episode_id for e in second.episodes}


def test_every_number_is_said_and_tracked(tmp_path: Path) -> None:
    def score(task: Any, number: int) -> Any:
        return ValueError("no") if (task, number) == (0, 0) else float(number)

    with make_source(
        tmp_path, App(score), make_tasks(2), group_size=4, episodes_per_iteration=8
    ) as source:
        source.collect(1, CURRENT)
    assert source.report.no_number == {}
    metrics = source.metrics()
    assert metrics.pop("online/seconds") >= 0
    assert metrics == {
        "online/runs": 8, "online/failed": 1, "online/without_episode": 0, "online/tasks": 2,
        "online/episodes": 8, "online/scored": 7, "online/unscored": 1, "online/refused": 0,
        "online/dropped_flat": 0, "online/replaced": 0, "online/stale_turns": 0,
        "online/mixed_turns": 0, "online/unversioned_turns": 0, "online/replayed": 0,
        "online/used_episodes": 7, "online/used_turns": 14,
        "online/reward_mean": pytest.approx(12 / 7),
        "online/reward_std": pytest.approx(1.0301575),
        "online/reward_min": 0.0, "online/reward_max": 3.0,
    }  # fmt: skip
    assert source.lines() == [
        "collected 8 episodes of 2 tasks in 0 s: 7 scored, mean 1.714 (std 1.030, from 0 to 3);"
        " learning from 7 episodes, 14 turns",
        "  runs failed: 1 ValueError (first, task 't0': ValueError: no)",
        "  episodes left out: 1 no reward, the episode failed",
    ]


# -- groups ---------------------------------------------------------------------------------------


def test_case_16_tasks_that_earned_the_same_are_dropped_and_replaced(tmp_path: Path) -> None:
    """Case 16: [.7, .7, .7], [1, 1, 1, 1] and [.3] say nothing; only [0, 1] counts."""
    groups = json.loads((CASES / "16-flat-groups.json").read_text())["groups"]
    tasks = [Task(f"g{n}", n) for n in range(4)]

    def score(task: int, number: int) -> float | None:
        return groups[task][number] if number < len(groups[task]) else None

    settings: dict[str, Any] = {"group_size": 4, "episodes_per_iteration": 16, "max_resample": 0}
    with make_source(tmp_path, App(score), tasks, **settings) as source:
        data = source.collect(1, CURRENT)
    assert rewards_by_task(data) == {"g3": [0.0, 1.0]} and source.signal
    report = source.report
    assert (report.dropped_flat, report.flat_episodes, report.replaced) == (3, 8, 0)
    assert report.unscored == 6 and len(report.returns) == 10
    assert report.mean == pytest.approx((3 * 0.7 + 4 + 0.3 + 1) / 10)


def test_replacements_are_tasks_that_were_not_drawn_yet(tmp_path: Path) -> None:
    tasks = make_tasks(6)
    spread = drawn(1, 2, tasks)[0]

    def score(task: int, number: int) -> float:
        return float(number % 2) if f"t{task}" == spread else 1.0

    app = App(score)
    said: list[str] = []
    settings: dict[str, Any] = {"group_size": 2, "max_resample": 3}
    with make_source(tmp_path, app, tasks, say=said.append, **settings) as source:
        data = source.collect(1, CURRENT)
    assert rewards_by_task(data) == {spread: [0.0, 1.0]} and source.signal
    assert len(app.seen) == 10 and set(Counter(app.seen).values()) == {2}
    assert (source.report.tasks, source.report.dropped_flat, source.report.replaced) == (5, 4, 3)
    assert source.report.flat_episodes == 8 and len(source.report.returns) == 10
    assert [line for line in said if "spread" in line] == [
        "  1 of 2 tasks gave no spread of rewards, drawing others",
        "  1 of 1 tasks gave no spread of rewards, drawing others",
        "  1 of 1 tasks gave no spread of rewards, drawing others",
        "  1 of 1 tasks gave no spread of rewards",
    ]


def test_without_dynamic_sampling_flat_groups_stay(tmp_path: Path) -> None:
    app = App(lambda task, number: 1.0)
    settings: dict[str, Any] = {"group_size": 2, "dynamic_sampling": False}
    with make_source(tmp_path, app, make_tasks(3), **settings) as source:
        data = source.collect(1, CURRENT)
    assert len(data.episodes) == 4 and len(app.seen) == 4 and not source.signal


def test_tasks_without_a_usable_episode_are_replaced_too(tmp_path: Path) -> None:
    tasks = make_tasks(3)
    (bad,) = drawn(1, 1, tasks)

    def score(task: int, number: int) -> Any:
        return None if f"t{task}" == bad else float(number % 2)

    settings: dict[str, Any] = {"group_size": 2, "episodes_per_iteration": 2}
    with make_source(tmp_path, App(score), tasks, **settings) as source:
        with pytest.raises(RewardError):
            source.collect(1, CURRENT)  # the first reward of a run is waited for
        source.load_state({**source.state(), "scored_before": True})
        data = source.collect(1, CURRENT)
    assert list(rewards_by_task(data).values()) == [[0.0, 1.0]]
    assert (source.report.empty, source.report.dropped_flat, source.report.replaced) == (1, 0, 1)


def test_who_was_paid_for_the_last_word_is_no_spread(tmp_path: Path) -> None:
    """The team's reward falls on whoever spoke last; the group earned the same all the same."""

    class Short(App):
        def turns(self, episode_id: str) -> list[Turn]:
            return super().turns(episode_id)[:: 1 if len(self.seen) % 2 else -1]

    settings: dict[str, Any] = {"group_size": 2, "max_resample": 0}
    with make_source(tmp_path, Short(lambda task, n: 1.0), make_tasks(2), **settings) as source:
        assert source.collect(1, CURRENT).episodes == []
    assert source.report.dropped_flat == 2


def test_a_round_of_few_tasks_repeats_them_in_one_group(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"group_size": 2, "episodes_per_iteration": 12}
    with make_source(tmp_path, App(parity), make_tasks(2), **settings) as source:
        data = source.collect(1, CURRENT)
    assert rewards_by_task(data) == {"t0": [0.0] * 3 + [1.0] * 3, "t1": [0.0] * 3 + [1.0] * 3}
    with pytest.raises(ConfigError, match="group_size is 9 and episodes_per_iteration is 4"):
        make_source(tmp_path, App(parity), make_tasks(2), group_size=9)


# -- rewards --------------------------------------------------------------------------------------


def test_case_15_an_unscored_episode_is_no_zero(tmp_path: Path) -> None:
    """Case 15: 1.0, null, 0.0 | NaN, Infinity | "0.5", true."""
    records = [json.loads(line) for line in (CASES / "15-rewards.jsonl").read_text().splitlines()]
    values: dict[str, list[Any]] = {}
    for record in records:
        values.setdefault(record["group"], []).append(record["value"])
    tasks = [Task(group, group) for group in values]

    def score(task: str, number: int) -> Any:
        return values[task][number] if number < len(values[task]) else None

    settings: dict[str, Any] = {"group_size": 3, "episodes_per_iteration": 9, "max_resample": 0}
    with make_source(tmp_path, App(score), tasks, **settings) as source:
        data = source.collect(1, CURRENT)
    assert rewards_by_task(data) == {"g1": [0.0, 1.0]}
    report = source.report
    assert sorted(report.returns) == [0.0, 1.0, 1.0]
    assert report.left_out == {"no reward": 4, "refused reward": 2}
    assert report.refused == ["task 'g2': not finite: nan", "task 'g2': not finite: inf"]
    assert (report.dropped_flat, report.empty) == (1, 1)
    assert "  refused: task 'g2': not finite: nan" in source.lines()


def test_a_run_that_never_scores_stops_at_once(tmp_path: Path) -> None:
    def fails(episode: Episode) -> float:
        raise KeyError("answer")

    with (
        make_source(tmp_path, App(lambda task, n: "done"), make_tasks(4), fails) as source,
        pytest.raises(RewardError) as caught,
    ):
        source.collect(1, CURRENT)
    text = str(caught.value)
    assert text.startswith(
        "none of 4 episodes has a usable reward (4 no reward; run returned str x4;"
    )
    assert "KeyError: 'answer')" in text and "Return a number from run" in text


def test_once_scored_a_silent_iteration_is_skipped_and_the_third_in_a_row_ends(
    tmp_path: Path,
) -> None:
    app = App(by_task)
    with make_source(tmp_path, app, make_tasks(4)) as source:
        source.collect(1, CURRENT)
        assert source.signal
        app.score = never
        assert source.collect(2, CURRENT).episodes == [] and not source.signal
        assert "online/reward_mean" not in source.metrics()
        app.score = by_task
        source.collect(3, CURRENT)
        app.score = always_half
        assert len(source.collect(4, CURRENT).episodes) == 4 and not source.signal
        source.load_state(json.loads(json.dumps(source.state())))
        source.collect(5, CURRENT)
        with pytest.raises(
            NothingToLearn, match=r"3 iterations in a row .*mean 0\.500 .std 0\.000"
        ):
            source.collect(6, CURRENT)


def test_the_reward_function_scores_what_nobody_scored_and_its_scores_are_logged(
    tmp_path: Path,
) -> None:
    asked: list[Any] = []

    def reward(episode: Episode) -> dict[str, float]:
        asked.append(episode.task)
        return {"router": 0.25, "writer": 1.0}

    def score(task: int, number: int) -> float | None:
        return 3.0 if task == 0 else None

    with make_source(tmp_path, App(score), make_tasks(4), reward) as source:
        data = source.collect(1, CURRENT)
    assert rewards_by_task(data) == {"t0": [3.0], "t1": [1.25], "t2": [1.25], "t3": [1.25]}
    assert sorted(asked) == ["text of 1", "text of 2", "text of 3"]
    logged = {
        e.task: e for e in LogReader(tmp_path / "online" / "r1" / "iteration-0001").episodes()
    }
    assert logged["text of 1"].agent_rewards == {"router": 0.25, "writer": 1.0}
    assert logged["text of 0"].team_reward == 3.0 and not logged["text of 0"].agent_rewards
    assert "  reward function: 3 scored, 1 had a reward, 0 not scored, 0 failed" in source.lines()


# -- what can go wrong ----------------------------------------------------------------------------


def test_an_interrupted_try_is_not_read(tmp_path: Path) -> None:
    with MarftRecorder(tmp_path / "online" / "r1" / "iteration-0001") as recorder:
        recorder.core.emit(EpisodeStarted(episode_id="old"))
    with make_source(tmp_path, App(by_task), make_tasks(4)) as source:
        data = source.collect(1, CURRENT)
    assert data.episodes_read == 4 and source.report.outside == 0
    assert (tmp_path / "online" / "r1" / "iteration-0001-2").is_dir()


def test_all_runs_failing_stops_and_some_do_not(tmp_path: Path) -> None:
    app = App(lambda task, number: ConnectionError("refused"))
    with make_source(tmp_path, app, make_tasks(4)) as source:
        with pytest.raises(TrainingError, match=r"all 4 runs failed: 4 ConnectionError .*refused"):
            source.collect(1, CURRENT)
        app.score = fails_on_0
        assert len(source.collect(2, CURRENT).episodes) == 3
    assert source.metrics()["online/failed"] == 1


def test_a_team_that_is_not_wrapped_is_told(tmp_path: Path) -> None:
    async def run(task: Any, recorder: Any) -> float:
        return 1.0

    with (
        make_source(tmp_path, run, make_tasks(4)) as source,
        pytest.raises(TrainingError, match=r"`team = recorder\.wrap\(team\)`"),
    ):
        source.collect(1, CURRENT)


def test_one_episode_id_for_two_runs_is_refused(tmp_path: Path) -> None:
    async def run(task: Any, recorder: Any) -> float:
        async with recorder.episode(id="mine"):
            return 1.0

    with (
        make_source(tmp_path, run, make_tasks(4)) as source,
        pytest.raises(TrainingError, match="episode id 'mine' was used by several runs"),
    ):
        source.collect(1, CURRENT)


def test_episodes_outside_their_run_are_used_and_said(tmp_path: Path) -> None:
    app = App(by_task)

    async def run(task: Any, recorder: MarftRecorder) -> None:
        def inside() -> None:
            with recorder.episode(task=str(task)) as episode:
                live = recorder.current()
                assert live is not None
                for made in app.turns(live.id):
                    live.add_turn(made)
                episode.reward(float(task))

        # an executor's threads do not inherit the context
        await asyncio.get_running_loop().run_in_executor(None, inside)

    with make_source(tmp_path, run, make_tasks(4)) as source:
        data = source.collect(1, CURRENT)
    assert rewards_by_task(data) == {f'"{n}"': [float(n)] for n in range(4)}
    assert source.report.outside == 4 and source.report.without_episode == 4
    assert any(line.startswith("WARNING: 4 episodes began outside") for line in source.lines())


def test_a_nested_episode_belongs_to_its_task(tmp_path: Path) -> None:
    async def run(task: Any, recorder: MarftRecorder) -> float:
        async with recorder.episode():
            with recorder.episode() as inner:
                inner.reward(5.0)
        return float(task)

    with make_source(tmp_path, run, make_tasks(4)) as source:
        source.load_state({**source.state(), "scored_before": True})
        source.collect(1, CURRENT)
    assert source.report.outside == 0
    assert source.report.left_out == {"no model call was recorded": 8}


def test_a_real_team_is_recorded_again_in_every_iteration(tmp_path: Path) -> None:
    clients: dict[str, Any] = {}

    async def run(task: str, recorder: MarftRecorder) -> float:
        for name in ("planner", "coder"):
            clients.setdefault(name, agent(name, server.url)._model_client)  # pyright: ignore[reportPrivateUsage]
        team = recorder.wrap(round_robin(server.url, turns=3))
        result = await team.run(task=f"Please: {task}")
        return float(len(result.messages[-1].to_text()) % 2 == len(task) % 2)

    tasks = [Task(word, word) for word in ("one", "three", "seven", "four", "five", "eleven")]
    with ScriptedServer() as server, make_source(tmp_path, run, tasks, replay_share=1.0) as source:
        sets = [source.collect(iteration, {}) for iteration in (1, 2)]
    for data in sets:
        for row in data.rows:
            said = next(t for t in _recorded(tmp_path) if t.turn_id == row.turn_id)
            assert list(row.token_ids) == token_ids_of(said.text or "")
            assert list(row.logprobs) == said.logprobs
        assert {row.agent for row in data.rows} == {"planner", "coder"}
    assert [len(data.rows) for data in sets] == [8, 8]


def _recorded(logs: Path) -> list[Turn]:
    folders = sorted((logs / "online" / "r1").iterdir())
    return [t for folder in folders for e in LogReader(folder).episodes() for t in e.turns]
