"""Finding the user's app and running it: many at once, failing, too slow, interrupted."""

from __future__ import annotations

import asyncio
import functools
import math
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import ConfigError, TrainingError
from marft_agents.log import LogReader
from marft_agents.recording import MarftRecorder
from marft_agents.schema import Episode
from marft_agents.testing import ScriptedServer, token_ids_of
from marft_agents.training import app
from marft_agents.training.rollouts import (
    Attempt,
    Collected,
    Recorder,
    collect,
    failures,
    give_returned,
    load_run,
)
from marft_agents.training.tasks import Task
from tests.integrations.autogen_kit import round_robin


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in [n for n in sys.modules if n.startswith("app_of_mine")]:
        del sys.modules[name]


def test_a_function_beside_the_user_is_found(workdir: Path) -> None:
    (workdir / "app_of_mine.py").write_text(
        "class App:\n    @staticmethod\n    async def run(task, recorder, hints=()): return task\n"
    )
    assert asyncio.run(load_run("app_of_mine:App.run")("t", None)) == "t"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("app", "package.module:function, not 'app'"),
        ("app:", "package.module:function"),
        (":run", "package.module:function"),
        ("app_of_mine_missing:run", "no module 'app_of_mine_missing' .looked in"),
        ("app_of_mine_2:rum", "app_of_mine_2 has no 'rum'; did you mean 'run'"),
        ("app_of_mine_2:LIMIT", "LIMIT is a int, not a function"),
        ("app_of_mine_2:run", r"run\(task, recorder\), and cannot be: too many"),
        ("app_of_mine_3:run", "importing app_of_mine_3 failed: SyntaxError"),
        ("app_of_mine_4:run", r"ended the program \(exit code 0\); put .*__main__"),
    ],
)
def test_what_is_wrong_with_a_name_is_said(workdir: Path, spec: str, message: str) -> None:
    (workdir / "app_of_mine_2.py").write_text("LIMIT = 3\ndef run(task): return 1\n")
    (workdir / "app_of_mine_3.py").write_text("def run(:\n")
    (workdir / "app_of_mine_4.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match=message) as caught:
        load_run(spec)
    assert str(caught.value).startswith("--online ")


def _attempts(*tasks: Any) -> list[Attempt]:
    return [Attempt(f"1.0.{n}", Task(f"t{n}", task)) for n, task in enumerate(tasks)]


def _silent(_: str) -> None:
    pass


def _collect(run: Any, tasks: list[Any], recorder: Recorder, **options: Any) -> Collected:
    standard: dict[str, Any] = {"at_once": 4, "timeout": 60.0, "say": _silent}
    return collect(run, _attempts(*tasks), recorder, **(standard | options))


@contextmanager
def _recorder(folder: Path) -> Generator[MarftRecorder]:
    with MarftRecorder(folder) as recorder:
        yield recorder


def _episodes(folder: Path, recorder: MarftRecorder) -> dict[Any, Episode]:
    """By task."""
    assert recorder.flush()
    return {episode.task: episode for episode in LogReader(folder).episodes()}


def _sync(task: Any, recorder: Any) -> Any:
    with recorder.episode():
        return task


async def _async(task: Any, recorder: Any) -> Any:
    async with recorder.episode():
        await asyncio.sleep(0)
        return task


class _Callable:
    async def __call__(self, task: Any, recorder: Any) -> Any:
        return await _async(task, recorder)


def _hands_on(task: Any, recorder: Any) -> Awaitable[Any]:
    return _async(task, recorder)


@pytest.mark.parametrize(
    "run", [_sync, _async, _Callable(), _hands_on, functools.partial(_async)], ids=repr
)
def test_every_attempt_gets_its_task_and_marks_its_episodes(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    with _recorder(tmp_path) as recorder:
        collected = _collect(run, ["a", "b", "c"], recorder)
        episodes = _episodes(tmp_path, recorder)
    assert [o.returned for o in collected.outcomes] == ["a", "b", "c"]
    assert [list(o.episode_ids) for o in collected.outcomes] == [
        [episodes[task].episode_id] for task in ("a", "b", "c")
    ]
    assert episodes["b"].metadata == {"marft_task": "t1", "marft_attempt": "1.0.1"}
    collected.require_episodes()


def test_a_run_that_changes_its_task_changes_nobody_elses(tmp_path: Path) -> None:
    seen: list[int] = []

    def run(task: Any, recorder: Any) -> None:
        seen.append(len(task["items"]))
        task["items"].append("mine")

    one = Task("t", {"items": []})
    with _recorder(tmp_path) as recorder:
        attempts = [Attempt("1", one), Attempt("2", one)]
        collect(run, attempts, recorder, at_once=1, timeout=60, say=_silent)
    assert seen == [0, 0] and one.task == {"items": []}


def test_as_many_run_at_once_as_asked(tmp_path: Path) -> None:
    running = most = 0

    async def run(task: Any, recorder: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1

    with _recorder(tmp_path) as recorder:
        _collect(run, [*range(10)], recorder, at_once=3)
    assert most == 3
    meet = threading.Barrier(3, timeout=30)

    def together(task: Any, recorder: Any) -> None:
        meet.wait()

    with _recorder(tmp_path) as recorder:
        collected = _collect(together, [1, 2, 3], recorder, at_once=3)
    assert not collected.failed


def test_a_failing_run_is_data(tmp_path: Path) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    async def run(task: Any, recorder: Any) -> float:
        async with recorder.episode():
            match task:
                case "raises":
                    raise ValueError("line one\nline two\nTraceback:\n  File ...")
                case "exits":
                    sys.exit(3)
                case "group":
                    raise ExceptionGroup("many", [ExceptionGroup("few", [KeyError("inner")])])
                case "cancels":
                    current = asyncio.current_task()
                    assert current is not None
                    current.cancel()
                    await asyncio.sleep(0)
                case "unprintable":
                    raise Unprintable
                case _:
                    return 1.0
        return 0.0

    tasks = ["good", "raises", "exits", "group", "cancels", "unprintable", "raises"]
    with _recorder(tmp_path) as recorder:
        collected = _collect(run, tasks, recorder)
        episodes = _episodes(tmp_path, recorder)
    assert [o.failure and o.failure.kind for o in collected.outcomes] == [
        None, "ValueError", "SystemExit", "KeyError", "CancelledError", "Unprintable", "ValueError",
    ]  # fmt: skip
    lines = failures(collected.outcomes)
    assert lines[0] == "2 ValueError (first, task 't1': ValueError: line one line two)"
    assert "1 KeyError (first, task 't3': KeyError: 'inner')" in lines
    ends = {task: e.ended and e.ended.reason for task, e in episodes.items()}
    assert ends.pop("good") == "terminated" and set(ends.values()) == {"failed"}
    collected.require_episodes()


def test_a_sync_run_may_fail_in_any_way(tmp_path: Path) -> None:
    def run(task: Any, recorder: Any) -> None:
        with recorder.episode():
            raise task

    tasks = [ValueError("v"), SystemExit(2), KeyboardInterrupt(), StopIteration()]
    with _recorder(tmp_path) as recorder:
        collected = _collect(run, tasks, recorder)
    assert [o.failure and o.failure.kind for o in collected.outcomes] == [
        "ValueError", "SystemExit", "KeyboardInterrupt", "StopIteration",
    ]  # fmt: skip


def test_a_slow_run_is_stopped_and_its_episode_fails(tmp_path: Path) -> None:
    async def run(task: Any, recorder: Any) -> float:
        async with recorder.episode():
            if task == "slow":
                await asyncio.Event().wait()
        return 1.0

    with _recorder(tmp_path) as recorder, asyncio.Runner() as runner:
        collected = _collect(run, ["fast", "slow"], recorder, timeout=0.05, runner=runner)
        episodes = _episodes(tmp_path, recorder)
    assert [o.returned for o in collected.outcomes] == [1.0, None]
    assert failures(collected.failed) == ["1 timeout (first, task 't1': took longer than 0.05 s)"]
    ended = episodes["slow"].ended
    assert ended is not None and (ended.reason, ended.detail) == ("failed", "CancelledError")


def test_a_clean_up_that_hangs_is_stopped_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "GRACE_S", 0.01)

    async def run(task: Any, recorder: Any) -> None:
        async with recorder.episode(task):
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.Event().wait()

    with _recorder(tmp_path) as recorder, asyncio.Runner() as runner:
        _collect(run, ["stuck"], recorder, timeout=0.01, runner=runner)
        assert _episodes(tmp_path, recorder)["stuck"].ended


def test_a_thread_that_is_too_slow_is_left_alone(tmp_path: Path) -> None:
    release, left = threading.Event(), threading.Event()

    def run(task: Any, recorder: Any) -> float:
        with recorder.episode():
            release.wait(30)
        left.set()
        return 1.0

    with _recorder(tmp_path) as recorder:
        collected = _collect(run, ["slow"], recorder, timeout=0.05)
        (episode,) = _episodes(tmp_path, recorder).values()
        assert episode.ended is None
        release.set()
        assert left.wait(30)
    assert [o.failure and o.failure.kind for o in collected.outcomes] == ["timeout"]
    assert list(collected.outcomes[0].episode_ids) == [episode.episode_id]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A process that was started in the background begins with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("how", ["signal", "raise"])
def test_an_interrupt_ends_every_episode(how: str, tmp_path: Path) -> None:
    async def run(task: Any, recorder: Any) -> None:
        async with recorder.episode():
            if task == "presses":
                if how == "raise":  # as the command's handler of SIGTERM does
                    raise KeyboardInterrupt
                signal.raise_signal(signal.SIGINT)
            await asyncio.Event().wait()

    with _recorder(tmp_path) as recorder:
        with pytest.raises(KeyboardInterrupt):
            _collect(run, ["waits", "presses"], recorder)
        episodes = _episodes(tmp_path, recorder)
    ends = {task: e.ended and e.ended.reason for task, e in episodes.items()}
    assert ends == {"waits": "failed", "presses": "failed"}


def test_a_real_team_gives_token_ids_and_the_returned_reward(tmp_path: Path) -> None:
    async def run(task: Any, recorder: Any) -> bool:
        team = recorder.wrap(round_robin(server.url, turns=3))
        result = await team.run(task=task)
        return "coder" in result.messages[-1].to_text()

    with ScriptedServer() as server, _recorder(tmp_path) as recorder:
        collected = _collect(run, ["Plan it.", "Code it."], recorder)
        unscored = _episodes(tmp_path, recorder).values()
        episodes = {e.task: e for e in give_returned(collected, unscored, recorder)}
    for task, episode in episodes.items():
        assert [t.agent for t in episode.turns] == ["planner", "coder"]
        for turn in episode.turns:
            assert turn.token_ids == token_ids_of(turn.text or "")
            assert turn.logprobs and turn.prompt_token_ids and turn.trainable
        assert episode.turns[1].depends_on == [episode.turns[0].turn_id]
        assert (episode.team_reward, episode.metadata["marft_task"]) == (
            1.0,
            {"Plan it.": "t0", "Code it.": "t1"}[task],
        )


def test_the_event_loop_can_outlive_a_round(tmp_path: Path) -> None:
    loops: list[object] = []

    async def run(task: Any, recorder: Any) -> None:
        loops.append(asyncio.get_running_loop())

    with _recorder(tmp_path) as recorder, asyncio.Runner() as runner:
        _collect(run, [1], recorder, runner=runner)
        _collect(run, [1], recorder, runner=runner)
    assert loops[0] is loops[1]


def test_progress_is_said_by_quarters(tmp_path: Path) -> None:
    said: list[str] = []

    def run(task: int, recorder: Any) -> float:
        return 1 / task

    with _recorder(tmp_path) as recorder:
        _collect(run, [*range(8)], recorder, at_once=1, say=said.append)
    assert said == [f"  {n} of 8 runs, 1 failed" for n in (2, 4, 6)]


def test_runs_that_all_fail_or_record_nothing_stop_everything(tmp_path: Path) -> None:
    def down(task: Any, recorder: Any) -> None:
        raise ConnectionError("no server at 127.0.0.1:1")

    def divide(task: int, recorder: Any) -> float:
        return 1 / task

    with _recorder(tmp_path) as recorder:
        collected = _collect(down, ["a", "b"], recorder)
        with pytest.raises(TrainingError, match=r"all 2 runs failed: 2 ConnectionError .*'t0'.*:1"):
            collected.require_episodes()
        collected = _collect(divide, [0, 1], recorder)
        with pytest.raises(
            TrainingError,
            match=r"1 runs ended without .*`team = recorder\.wrap\(team\)`; 1 ZeroDivisionError",
        ):
            collected.require_episodes()


class _Scalar:
    """As numpy's and torch's."""

    ndim = 0

    def __init__(self, value: Any) -> None:
        self.value = value

    def item(self) -> Any:
        return self.value


@pytest.mark.parametrize(
    ("returned", "reward"),
    [
        (0.25, 0.25),
        (0, 0.0),
        (True, 1.0),
        (False, 0.0),
        (_Scalar(0.5), 0.5),
        (None, None),
        ("0.5", None),
        ({"planner": 1.0}, None),
        (Fraction(1, 2), None),
    ],
    ids=repr,
)
def test_a_returned_number_is_the_teams_reward(
    returned: Any, reward: float | None, tmp_path: Path
) -> None:
    def run(task: Any, recorder: Any) -> Any:
        with recorder.episode("once"):
            pass
        with recorder.episode("twice"):
            pass
        return returned

    with _recorder(tmp_path) as recorder:
        collected = _collect(run, ["x"], recorder)
        unscored = _episodes(tmp_path, recorder).values()
        given = list(give_returned(collected, unscored, recorder))
        logged = _episodes(tmp_path, recorder).values()
    assert [e.team_reward for e in given] == [e.team_reward for e in logged] == [reward] * 2
    assert collected.no_number == ({} if reward is not None else {type(returned).__name__: 2})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e16, 10**400])
def test_a_number_that_is_no_reward_is_refused_with_its_task(value: Any, tmp_path: Path) -> None:
    def run(task: Any, recorder: Any) -> Any:
        with recorder.episode(task):
            pass
        return value

    with _recorder(tmp_path) as recorder:
        collected = _collect(run, ["x"], recorder)
        (episode,) = give_returned(collected, _episodes(tmp_path, recorder).values(), recorder)
        (logged,) = _episodes(tmp_path, recorder).values()
    assert not episode.scored and episode.refused_rewards and logged.refused_rewards
    assert len(collected.refused) == 1 and collected.refused[0].startswith("task 't0': ")


def test_what_the_app_gave_stands(tmp_path: Path) -> None:
    def run(task: Any, recorder: Any) -> Any:
        with recorder.episode(task) as episode:
            match task:
                case "team":
                    episode.reward(0.5)
                case "agent":
                    episode.reward(0.5, agent="planner")
                case "turn":
                    episode.reward(0.5, turn_id="t1")
                case _:
                    with recorder.episode("inner"):
                        pass
        return 1.0

    with _recorder(tmp_path) as recorder:
        collected = _collect(run, ["team", "agent", "turn", "none"], recorder)
        episodes = _episodes(tmp_path, recorder).values()
        given = {e.task: e for e in give_returned(collected, episodes, recorder)}
    assert {task: e.team_reward for task, e in given.items()} == {
        "team": 0.5, "agent": 1.0, "turn": None, "none": 1.0, "inner": None,
    }  # fmt: skip
    assert given["agent"].agent_rewards == {"planner": 0.5}
