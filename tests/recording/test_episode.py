"""Borders, endings, rewards and the order of events."""

from __future__ import annotations

import contextvars
import logging
import math
from datetime import timedelta
from typing import Any

import pytest

from marft_agents.errors import RewardError
from marft_agents.recording import MarftRecorder
from marft_agents.schema import (
    EditEvent,
    EpisodeEnded,
    EpisodeStarted,
    HumanEvent,
    RewardEvent,
    ToolEvent,
)
from marft_agents.testing import FakeClock, FakeIds, InMemoryLog
from tests.recording.kit import ask, recording, sdk


def _ended(log: InMemoryLog) -> list[tuple[str, str | None]]:
    return [(e.reason, e.detail) for e in log.of(EpisodeEnded)]


def test_the_borders_hold_task_metadata_and_time() -> None:
    log = InMemoryLog()
    with MarftRecorder(log=log, clock=FakeClock(), ids=FakeIds("ep")) as recorder:
        metadata: dict[str, Any] = {"split": "train", "class": dict}
        with recorder.episode(task={"q": 1}, metadata=metadata) as episode:
            assert episode.id == "ep-1"
            metadata["split"] = "changed later"
    started, ended = log.events
    assert isinstance(started, EpisodeStarted) and started.task == {"q": 1}
    assert started.metadata == {"split": "train", "class": "<class 'dict'>"}
    assert ended.time - started.time == timedelta(seconds=1)


async def test_async_with_is_the_same() -> None:
    with recording() as (_, recorder, log):
        async with recorder.episode() as episode:
            assert recorder.current() is not None
        assert recorder.current() is None
    assert {e.episode_id for e in log.events} == {episode.id}


def test_an_exception_is_a_failed_end_and_goes_on() -> None:
    with recording() as (_, recorder, log):
        with pytest.raises(ValueError, match="oops"), recorder.episode():
            raise ValueError("oops")
        with pytest.raises(KeyboardInterrupt), recorder.episode():
            raise KeyboardInterrupt
    assert _ended(log) == [("failed", "ValueError: oops"), ("failed", "KeyboardInterrupt")]


def test_the_apps_word_about_the_end_counts() -> None:
    with recording() as (_, recorder, log):
        with recorder.episode() as episode:
            episode.end("truncated", "out of budget")
        with pytest.raises(ValueError, match="x"), recorder.episode() as episode:
            episode.end("terminated")
            raise ValueError("x")
    assert _ended(log) == [("truncated", "out of budget"), ("terminated", None)]


def test_odd_words_about_the_borders_lose_neither(caplog: pytest.LogCaptureFixture) -> None:
    log = InMemoryLog()
    with MarftRecorder(log=log, raise_errors=False) as recorder:
        odd: Any = "finished"
        with recorder.episode(metadata=odd) as episode:
            episode.end(odd)
    assert [e.metadata for e in log.of(EpisodeStarted)] == [{"value": "finished"}]
    assert _ended(log) == [("terminated", None)]
    assert "terminated, truncated, failed, not 'finished'" in caplog.text


class Unreadable:
    """An object that fails whatever is done with it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} of mine")

    def __str__(self) -> str:
        raise RuntimeError("no text of mine")

    __repr__ = __str__


class UnreadableMapping(dict[str, int]):
    def items(self) -> Any:
        raise RuntimeError("no items of mine")

    __iter__ = items


def test_objects_that_cannot_be_read_lose_nothing(caplog: pytest.LogCaptureFixture) -> None:
    log, odd = InMemoryLog(), Unreadable()
    nothing: Any = odd
    with MarftRecorder(log=log, raise_errors=False) as recorder:
        with recorder.episode(nothing, id=nothing, metadata=nothing) as episode:
            episode.reward(nothing)
            episode.reward(1.0, source=nothing)
            recorder.reward("other", 10**5000)
            episode.edit("turn", nothing, editor=nothing)
            episode.end("failed", nothing)
        with recorder.episode(id="x" * 20_000, metadata=UnreadableMapping(a=1)) as long:
            long.edit("turn", "y" * 20_000)
    assert [e.task for e in log.of(EpisodeStarted)] == ["<Unreadable>", None]
    assert [list(e.metadata) for e in log.of(EpisodeStarted)] == [["value"], ["value"]]
    assert _ended(log) == [("failed", "<Unreadable>"), ("terminated", None)]
    assert [r.value for r in log.of(RewardEvent)] == [None, 1.0, None]
    assert "cannot be read" in str(log.of(RewardEvent)[0].refused)
    assert [len(e.text) for e in log.of(EditEvent)] == [12, 20_000]
    assert log.of(EditEvent)[1].episode_id == long.id
    assert "ERROR" not in {r.levelname for r in caplog.records}


def test_an_id_that_is_used_again_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with MarftRecorder(log=InMemoryLog()) as recorder:
        for name in ("task-1", "task-2", None, "", None, ""):
            with recorder.episode(id=name):
                pass
        assert "was given the id" not in caplog.text
        for name in ("task-1", "task-2"):
            with recorder.episode(id=name):
                pass
    assert [r.args for r in caplog.records if "was given the id 'task-1'" in r.getMessage()]
    assert "was given the id 'task-2'" not in caplog.text


def test_names_too_long_for_a_header_are_left_out_of_the_request() -> None:
    with recording(raise_errors=False) as (server, recorder, log), sdk(server) as client:
        recorder.attach_client(client, "planner")
        with recorder.episode(id="x" * 100_000):
            ask(client)
        with recorder.episode(id="half a pair \ud83d"):
            ask(client)
    assert [t.episode_id[:6] for t in log.turns] == ["xxxxxx", "half a"]
    first, second = (request.headers for request in server.requests)
    assert "x-marft-episode" not in first and first["x-marft-agent"] == "planner"
    assert second["x-marft-episode"] == "half%20a%20pair%20%5Cud83d"


def test_a_nested_episode_knows_its_parent_and_ends_first() -> None:
    with recording() as (_, recorder, log), recorder.episode(id="outer"):
        with recorder.episode(id="inner"):
            live = recorder.current()
            assert live is not None and live.id == "inner"
        live = recorder.current()
        assert live is not None and live.id == "outer"
    parents = {e.episode_id: e.parent_id for e in log.of(EpisodeStarted)}
    assert parents == {"outer": None, "inner": "outer"}


def test_recorders_do_not_see_each_others_episodes() -> None:
    with recording() as (_, one, _), recording() as (_, two, _), one.episode():
        assert two.current() is None
        with two.episode():
            assert one.current() is not two.current()


def test_an_episode_left_in_another_context_ends_and_is_current_nowhere() -> None:
    with recording() as (_, recorder, log):
        inside = contextvars.copy_context()
        context = recorder.episode()
        inside.run(context.__enter__)
        assert inside.run(recorder.current) is not None and recorder.current() is None
        context.__exit__(None, None, None)
        assert inside.run(recorder.current) is None
    assert _ended(log) == [("terminated", None)]


def test_steps_begin_when_the_environment_answers() -> None:
    with recording(["a", "b", "c", "d"]) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode():
            live = recorder.current()
            assert live is not None
            ask(client)
            ask(client)
            live.tool("add", agent="planner", call_id="c", arguments="{}", result=3)
            live.tool("add", result=4)
            ask(client)
            live.tool("handoff", environment=False)
            live.human("user", "go on")
            ask(client)
            live.tool("late")
    assert [(t.index, t.step) for t in log.turns] == [(0, 0), (1, 0), (2, 1), (3, 2)]
    assert [t.index for t in log.of(ToolEvent)] == [2, 2, 3, 4]
    assert log.of(HumanEvent)[0].index == 3
    assert log.of(ToolEvent)[0].result == 3


def test_prompts_are_linked_across_agents() -> None:
    with recording(["the plan is simple", "the code is short", "fine"]) as (server, recorder, log):
        recorder.attach_client(planner := sdk(server), "planner")
        recorder.attach_client(coder := sdk(server), "coder")
        with recorder.episode() as episode:
            plan = ask(planner).choices[0].message.content
            messages: Any = [{"role": "user", "name": "planner", "content": plan}]
            code = ask(coder, messages=messages).choices[0].message.content
            messages = [{"role": "user", "content": f"plan: {plan}\ncode: {code}"}]
            ask(planner, messages=messages)
            planned, _, checked = episode.turns()
            assert episode.turns("planner") == (planned, checked)
    first, second, third = log.turns
    assert first.depends_on == [] and second.depends_on == [first.turn_id]
    assert third.depends_on == [first.turn_id, second.turn_id]


def test_rewards_come_any_time_and_for_anyone() -> None:
    with recording() as (_, recorder, log):
        with recorder.episode(id="e") as episode:
            episode.reward(1, agent="planner")
        episode.reward(True, turn_id="t")
        recorder.reward("e", None, source="review")
        recorder.reward("from another process", 0.5)
    assert [(r.episode_id, r.value, r.agent, r.turn_id, r.source) for r in log.of(RewardEvent)] == [
        ("e", 1.0, "planner", None, "app"),
        ("e", 1.0, None, "t", "app"),
        ("e", None, None, None, "review"),
        ("from another process", 0.5, None, None, "app"),
    ]


class Scalar:
    """As numpy and torch have them."""

    shape = ()

    def item(self) -> float:
        return 0.25


def test_scalars_of_array_libraries_are_numbers() -> None:
    with recording() as (_, recorder, log):
        value: Any = Scalar()
        recorder.reward("e", value)
    assert log.of(RewardEvent)[0].value == 0.25


@pytest.mark.parametrize("value", [math.nan, math.inf, "0.5", [1.0], object()])
def test_anything_else_is_recorded_as_refused(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    with recording(raise_errors=False) as (_, recorder, log), caplog.at_level(logging.WARNING):
        recorder.reward("e", value)
        recorder.reward("e", value)
    assert [r.value for r in log.of(RewardEvent)] == [None, None]
    assert all(r.refused for r in log.of(RewardEvent))
    assert len(caplog.records) == 1


@pytest.mark.parametrize("names", [{"agent": object()}, {"agent": 3}, {"turn_id": 3}])
def test_a_reward_for_something_that_is_no_name_is_refused(
    names: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with recording(raise_errors=False) as (_, recorder, log), caplog.at_level(logging.WARNING):
        recorder.reward("e", 1.0, **names)
    (event,) = log.of(RewardEvent)
    assert event.value is None and "not a name" in str(event.refused)
    assert "not a name" in caplog.text


def test_numbers_may_name_episodes() -> None:
    number: Any = 0
    with recording() as (_, recorder, log):
        with recorder.episode(id=number) as episode:
            episode.reward(1.0)
        recorder.reward(number, 0.5, source="later")
    assert episode.id == "0" and {e.episode_id for e in log.events} == {"0"}


def test_an_exception_that_cannot_be_printed_ends_its_episode() -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no str")

    with recording() as (_, recorder, log), pytest.raises(Unspeakable), recorder.episode():
        raise Unspeakable
    (end,) = log.of(EpisodeEnded)
    assert (end.reason, end.detail) == ("failed", "Unspeakable")


def test_a_refused_reward_is_raised_under_pytest() -> None:
    with recording() as (_, recorder, log), pytest.raises(RewardError, match="episode 'e' refused"):
        recorder.reward("e", math.nan)
    assert log.of(RewardEvent)[0].refused == "not finite: nan"
