"""What is too old, what is replayed, and how a run is resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import TrainingError
from marft_agents.recording import MarftRecorder
from marft_agents.schema import Turn
from marft_agents.training.dataset import TrainingSet
from tests.log.events import CASES, case_event
from tests.training.online_kit import (
    CURRENT,
    App,
    by_task,
    make_source,
    make_tasks,
    parity,
    rewards_by_task,
)

# -- age ------------------------------------------------------------------------------------------


def test_case_38_mixed_and_stale_turns_go_and_the_reward_stays(tmp_path: Path) -> None:
    """Case 38: versions 3, 3, 3 to 4, 4 in one episode."""
    lines = (CASES / "38-mixed-versions.jsonl").read_text().splitlines()
    events = [case_event(json.loads(line), number) for number, line in enumerate(lines)]

    async def run(task: Any, recorder: MarftRecorder) -> float:
        async with recorder.episode() as episode:
            live = recorder.current()
            assert live is not None
            for event in events:
                if isinstance(event, Turn):
                    turn_id = f"{episode.id}.{event.turn_id}"
                    names = {"episode_id": episode.id, "turn_id": turn_id, "response_id": turn_id}
                    live.add_turn(event.model_copy(update=names))
        return float(task)

    kept: dict[int, list[str | None]] = {}
    for limit in (1, 0):
        with make_source(tmp_path, run, make_tasks(2), max_staleness=limit) as source:
            data = source.collect(1 + limit, {"planner": 4, "critic": 4})
        assert [e.reward_K for e in data.episodes] == [
            [0, 0, 0, e.total_reward] for e in data.episodes
        ]
        assert sorted(e.total_reward for e in data.episodes) == [0.0, 0.0, 1.0, 1.0]
        assert source.report.mixed_turns == 4
        kept[limit] = [row.adapter for row in data.rows if row.episode == 0]
    assert kept == {1: ["planner@v3", "critic@v3", "planner@v4"], 0: ["planner@v4"]}
    assert source.report.stale_turns == 8
    assert data.left_out_turns["planner", "older than max_staleness versions"] == 4
    assert any(line.startswith("  4 turns whose adapter changed") for line in source.lines())
    assert any(line.startswith("  8 turns older than 0 versions") for line in source.lines())


def test_turns_of_unknown_age_are_kept_and_said(tmp_path: Path) -> None:
    class Foreign(App):
        def turns(self, episode_id: str) -> list[Turn]:
            router, writer = super().turns(episode_id)
            gpt = {"adapter_start": "gpt-x", "adapter_end": "gpt-x"}
            none = {"adapter_start": None, "adapter_end": None}
            return [router.model_copy(update=gpt), writer.model_copy(update=none)]

    with make_source(tmp_path, Foreign(by_task), make_tasks(4), max_staleness=0) as source:
        data = source.collect(1, {"router": 9})
    assert len(data.rows) == 8 and source.metrics()["online/unversioned_turns"] == 8
    assert any("4 turns of router answered by gpt-x" in line for line in source.lines())


# -- replay ---------------------------------------------------------------------------------------


def _replayed(data: TrainingSet) -> list[str]:
    return [str(e.task) for e in data.episodes if " of iteration " in str(e.task)]


def test_fresh_enough_episodes_are_replayed_as_groups_of_their_own(tmp_path: Path) -> None:
    app = App(parity)
    settings: dict[str, Any] = {"group_size": 2, "replay_share": 0.5, "max_staleness": 1}
    with make_source(tmp_path, app, make_tasks(9), **settings) as source:
        first = source.collect(1, CURRENT)
        assert _replayed(first) == [] and source.report.replayed == 0
        data = source.collect(2, CURRENT)
        (task,) = set(_replayed(data))
        assert task.removesuffix(" of iteration 1") in rewards_by_task(first)
        assert rewards_by_task(data)[task] == [0.0, 1.0]
        assert (source.report.replayed, source.report.used_episodes) == (2, 6)
        assert source.report.episodes == 4 and len(source.report.returns) == 4
        assert any("replayed 2 episodes of 1 task from" in line for line in source.lines())
        app.version = 3
        assert _replayed(source.collect(3, {"router": 1, "writer": 3})) == []  # writer@v1 is old
        assert source.report.lost == 0
        again = source.collect(4, {"router": 3, "writer": 3})
        assert {t.rsplit(" ", 1)[1] for t in _replayed(again)} == {"3"}


def test_no_task_is_replayed_twice_in_one_iteration(tmp_path: Path) -> None:
    with make_source(tmp_path, App(parity), make_tasks(2), replay_share=1.0) as source:
        for iteration in range(1, 9):
            data = source.collect(iteration, CURRENT)
            groups = set(_replayed(data))
            names = {name.split(" of ")[0] for name in groups}
            assert len(groups) == len(names) == (2 if iteration > 1 else 0)


def test_a_resumed_run_draws_and_replays_the_same(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"replay_share": 0.5, "episodes_per_iteration": 6}
    tasks = make_tasks(20)
    with make_source(tmp_path, App(by_task), tasks, **settings) as source:
        for iteration in (1, 2):
            source.collect(iteration, CURRENT)
        state = json.loads(json.dumps(source.state()))
        data = source.collect(3, CURRENT)
    shutil.rmtree(tmp_path / "online" / "r1" / "iteration-0003")
    said: list[str] = []
    with make_source(tmp_path, App(by_task), tasks, say=said.append, **settings) as resumed:
        resumed.load_state(state)
        again = resumed.collect(3, CURRENT)
    assert said == []
    assert len(_replayed(data)) == 3
    assert rewards_by_task(again) == rewards_by_task(data)
    replayed = [e.episode_id for e in data.episodes if e.task in _replayed(data)]
    assert [e.episode_id for e in again.episodes if e.task in _replayed(again)] == replayed


def test_a_state_that_does_not_fit_is_refused_whole(tmp_path: Path) -> None:
    with make_source(tmp_path, App(by_task), make_tasks(4), replay_share=0.5) as source:
        source.collect(1, CURRENT)
        before = source.state()
        for state in ({}, {**before, "past": [{"task": "t"}]}, {**before, "silent": None}):
            with pytest.raises(TrainingError, match="saved"):
                source.load_state(state)
        assert source.state() == before
    said: list[str] = []
    with make_source(tmp_path, App(by_task), make_tasks(5), say=said.append) as other:
        other.load_state(before)
    assert "tasks or the seed changed" in said[0]


def test_episodes_whose_log_is_gone_are_counted_and_forgotten(tmp_path: Path) -> None:
    with make_source(tmp_path, App(by_task), make_tasks(8), replay_share=0.5) as source:
        source.collect(1, CURRENT)
        shutil.rmtree(tmp_path / "online" / "r1" / "iteration-0001")
        source.collect(2, CURRENT)
        assert (source.report.replayed, source.report.lost) == (0, 2)
        assert {group["iteration"] for group in source.state()["past"]} == {2}
