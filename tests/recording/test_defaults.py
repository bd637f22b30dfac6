"""Task and metadata that episodes take where the app gives none."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import Any

from marft_agents.schema import EpisodeStarted
from marft_agents.testing import InMemoryLog
from tests.integrations.autogen_kit import round_robin
from tests.recording.kit import recording


def _started(log: InMemoryLog) -> list[tuple[str, Any, dict[str, Any]]]:
    return [(e.episode_id, e.task, e.metadata) for e in log.of(EpisodeStarted)]


def test_an_episode_takes_what_the_app_does_not_give() -> None:
    with recording() as (_, recorder, log):
        with recorder.defaults(task="t", metadata={"split": "train", "n": 1}) as ids:
            with recorder.episode(id="bare"):
                pass
            with recorder.episode("own", id="full", metadata={"n": 2, "mine": True}):
                pass
        with recorder.episode(id="after"):
            pass
    assert ids == ["bare", "full"]
    assert _started(log) == [
        ("bare", "t", {"split": "train", "n": 1}),
        ("full", "own", {"split": "train", "n": 2, "mine": True}),
        ("after", None, {}),
    ]


def test_a_task_that_is_false_is_the_apps() -> None:
    with recording() as (_, recorder, log), recorder.defaults(task="t"):
        for task in ("", 0, []):
            with recorder.episode(task):
                pass
    assert [task for _, task, _ in _started(log)] == ["", 0, []]


def test_inner_defaults_win_over_outer_ones_and_both_know_the_episode() -> None:
    with (
        recording() as (_, recorder, log),
        recorder.defaults(task="outer", metadata={"a": 1, "b": 1}) as outer,
        recorder.defaults(metadata={"b": 2}) as inner,
        recorder.episode(id="e"),
    ):
        pass
    assert outer == inner == ["e"]
    assert _started(log) == [("e", "outer", {"a": 1, "b": 2})]


def test_an_episode_inside_another_one_takes_nothing() -> None:
    with (
        recording() as (_, recorder, log),
        recorder.defaults(task="t", metadata={"a": 1}) as ids,
        recorder.episode(id="outer"),
        recorder.episode(id="inner"),
    ):
        pass
    assert ids == ["outer"]
    assert _started(log)[1] == ("inner", None, {})


def test_defaults_are_of_one_recorder() -> None:
    with (
        recording() as (_, one, _),
        recording() as (_, two, log),
        one.defaults(task="t") as ids,
        two.episode(),
    ):
        pass
    assert ids == [] and [task for _, task, _ in _started(log)] == [None]


def test_what_was_given_is_a_copy_without_secrets() -> None:
    metadata: dict[str, Any] = {"tags": ["a"], "api_key": "sk-test"}
    with recording() as (_, recorder, log), recorder.defaults(metadata=metadata):
        metadata["tags"].append("changed later")
        with recorder.episode():
            pass
    assert [given for _, _, given in _started(log)] == [
        {"tags": ["a"], "api_key": "[redacted:api-key]"}
    ]


async def test_tasks_and_threads_that_inherit_the_context_are_inside() -> None:
    with recording() as (_, recorder, log):

        def work(name: str) -> None:
            with recorder.episode(id=name):
                pass

        async def one(name: str) -> list[str]:
            with recorder.defaults(task=name) as ids:
                await asyncio.gather(
                    asyncio.to_thread(work, f"{name}-thread"), asyncio.to_thread(work, f"{name}-2")
                )
                await asyncio.create_task(asyncio.to_thread(work, f"{name}-task"))
            return ids

        a, b = await asyncio.gather(one("a"), one("b"))
        with recorder.defaults(task="c") as c:
            foreign = threading.Thread(target=work, args=("foreign",))
            copied = threading.Thread(target=contextvars.copy_context().run, args=(work, "copied"))
            for thread in (foreign, copied):
                thread.start()
                thread.join()
    assert (sorted(a), sorted(b), c) == (
        ["a-2", "a-task", "a-thread"],
        ["b-2", "b-task", "b-thread"],
        ["copied"],
    )
    tasks = {name: task for name, task, _ in _started(log)}
    assert tasks["a-thread"] == "a" and tasks["b-task"] == "b"
    assert (tasks["copied"], tasks["foreign"]) == ("c", None)


async def test_the_episode_of_a_wrapped_team_takes_them() -> None:
    with recording() as (server, recorder, log):
        team = recorder.wrap(round_robin(server.url, turns=2))
        with recorder.defaults(task="the item", metadata={"attempt": 3}) as ids:
            await team.run(task="what the team reads")
            await team.run()
    assert len(ids) == 2
    assert [(task, given) for _, task, given in _started(log)] == [
        ("what the team reads", {"attempt": 3}),
        ("the item", {"attempt": 3}),
    ]
