"""Where teams run: two at once, other runtimes, threads, tasks that are cut off or paused."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest
from autogen_agentchat.base import Response
from autogen_agentchat.conditions import ExternalTermination, MaxMessageTermination
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat, SelectorGroupChat
from autogen_core import SingleThreadedAgentRuntime

from marft_agents.recording import MarftRecorder
from marft_agents.schema import EpisodeEnded, EpisodeStarted, HumanEvent, Turn
from marft_agents.testing import InMemoryLog, Reply, ScriptedServer
from tests.integrations.autogen_kit import (
    TEAM_IN_TEAM,
    Custom,
    agent,
    known,
    model,
    round_robin,
    script,
    team,
)
from tests.recording.kit import recording


def _by_episode(turns: list[Turn]) -> dict[str, list[Turn]]:
    found: dict[str, list[Turn]] = {}
    for turn in turns:
        found.setdefault(turn.episode_id, []).append(turn)
    return found


def _ends(log: InMemoryLog) -> list[tuple[str, str | None]]:
    return [(e.reason, e.detail) for e in log.of(EpisodeEnded)]


@pytest.mark.parametrize("runtimes", ["their own", "one of the app's"])
async def test_two_teams_of_the_same_agents_at_once(runtimes: str) -> None:
    """The agents keep nothing; each of their speeches belongs to the team that asked for it."""
    with recording() as (server, recorder, log):
        runtime = SingleThreadedAgentRuntime() if runtimes != "their own" else None
        members = [Custom(name, llm=model(name, server.url)) for name in ("planner", "coder")]

        async def play(task: str) -> None:
            stop = MaxMessageTermination(3)
            pair = RoundRobinGroupChat(list(members), termination_condition=stop, runtime=runtime)
            await recorder.wrap(pair).run(task=task)

        if runtime is not None:
            runtime.start()
        await asyncio.gather(play("the boats"), play("the geese"), play("the trees"))
        if runtime is not None:
            await runtime.stop()
    tasks = {e.episode_id: e.task for e in log.of(EpisodeStarted)}
    assert sorted(tasks.values()) == ["the boats", "the geese", "the trees"]
    for name, turns in _by_episode(log.turns).items():
        assert [t.agent for t in turns] == ["planner", "coder"]
        assert all(t.messages[0]["content"] == tasks[name] for t in turns)
        assert turns[1].depends_on == [turns[0].turn_id]


@TEAM_IN_TEAM
async def test_a_team_in_a_team_on_a_runtime_that_was_started_elsewhere() -> None:
    with recording(script(boss="inner", chief="planner")) as (server, recorder, log):
        runtime = SingleThreadedAgentRuntime()
        async with recorder.episode(id="around the runtime"):
            runtime.start()
            names = ("planner", "coder", "tester")
            members: list[Any] = [agent(n, server.url) for n in names]
            inner = SelectorGroupChat(
                members, model("chief", server.url), name="inner", max_turns=1, runtime=runtime
            )
            others: list[Any] = [inner, agent("critic", server.url), agent("judge", server.url)]
            outer = SelectorGroupChat(
                others, model("boss", server.url), max_turns=1, runtime=runtime
            )
        async with recorder.episode(id="mine"):
            await recorder.wrap(outer).run(task="go")
        await runtime.stop()
    assert {t.episode_id for t in log.turns} == {"mine"}
    boss, chief, planner = log.turns
    assert [t.parent_agent for t in log.turns] == [None, "inner", "inner"]
    assert [t.selected_by for t in log.turns] == [None, boss.turn_id, chief.turn_id]
    assert planner.agent == "planner"


def test_threads_with_loops_of_their_own_and_one_recorder() -> None:
    log = InMemoryLog()
    with ScriptedServer() as server, MarftRecorder(log=log) as recorder:

        def play(task: str) -> None:
            pair = recorder.wrap(round_robin(server.url, turns=3))
            asyncio.run(pair.run(task=task))

        threads = [threading.Thread(target=play, args=(f"task {i}",)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    episodes = _by_episode(log.turns)
    assert len(episodes) == 3
    for turns in episodes.values():
        assert [t.agent for t in turns] == ["planner", "coder"]
        assert len({t.messages[1]["content"] for t in turns}) == 1


class Elsewhere(Custom):
    """Asks its model in a thread that takes no context along, on a loop of its own."""

    waits_for: Any = None

    async def answer(self, messages: Any, cancellation_token: Any) -> str:
        if self.waits_for is not None:
            await self.waits_for()

        def ask() -> str:
            return asyncio.run(self.ask(vars(self)["llm"], messages))

        return await asyncio.get_running_loop().run_in_executor(None, ask)


async def test_a_call_from_a_thread_without_context_is_its_agents() -> None:
    with recording() as (server, recorder, log):
        pair = team(Elsewhere("planner", llm=model("planner", server.url)), turns=1)
        await recorder.wrap(pair).run(task="go")
    (turn,) = log.turns
    assert turn.agent == "planner" and turn.token_ids


async def test_a_call_that_could_be_of_two_runs_is_nobodys_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with recording() as (server, recorder, log), caplog.at_level(logging.WARNING, "marft_agents"):
        shared = Elsewhere("planner", llm=model("planner", server.url))
        pairs = [recorder.wrap(team(shared, turns=1)) for _ in range(2)]
        both = asyncio.Barrier(2)
        shared.waits_for = both.wait
        await asyncio.gather(*(pair.run(task="go") for pair in pairs))
    assert log.turns == [] and len(log.of(EpisodeEnded)) == 2
    assert caplog.text.count("is in several runs at once") == 1


async def test_two_recorders_one_for_each_of_two_nested_teams() -> None:
    outer_log, inner_log = InMemoryLog(), InMemoryLog()
    with (
        ScriptedServer(script(boss=Reply(None, [("consult", {})]))) as server,
        MarftRecorder(log=outer_log) as outer,
        MarftRecorder(log=inner_log) as inner,
    ):
        experts = inner.wrap(team(agent("planner", server.url), turns=1))

        async def consult() -> str:
            """Ask."""
            await experts.run(task="how")
            return "asked"

        await outer.wrap(agent("boss", server.url, tools=[consult])).run(task="go")
    assert [t.agent for t in outer_log.turns] == ["boss"]
    assert [(t.agent, t.parent_agent) for t in inner_log.turns] == [("planner", None)]


async def test_a_task_that_is_cancelled_fails_its_episode() -> None:
    with recording([Reply("never", hang=True)]) as (server, recorder, log):
        alone = recorder.wrap(agent("planner", server.url))
        run = asyncio.create_task(alone.run(task="x"))
        while not server.requests:
            await asyncio.sleep(0.01)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    (turn,) = log.turns
    assert turn.error is not None and "CancelledError" in turn.error
    assert _ends(log) == [("failed", "CancelledError")]


async def test_an_external_stop_is_an_end_and_the_next_run_another_episode() -> None:
    with recording() as (server, recorder, log):
        stop = ExternalTermination()
        members: list[Any] = [agent(n, server.url) for n in ("planner", "coder")]
        pair = recorder.wrap(RoundRobinGroupChat(members, termination_condition=stop, max_turns=3))
        async for item in pair.run_stream(task="x"):
            if getattr(item, "source", "") == "planner":
                stop.set()
        await pair.run()
    assert [reason for reason, _ in _ends(log)] == ["terminated", "truncated"]
    assert _ends(log)[0][1] == "External termination requested"


class Pausing(Custom):
    """Counts how often it was paused and resumed."""

    pauses = resumes = 0

    async def on_pause(self, cancellation_token: Any) -> None:
        self.pauses += 1

    async def on_resume(self, cancellation_token: Any) -> None:
        self.resumes += 1


async def test_a_team_is_paused_and_resumed_as_before() -> None:
    with recording() as (server, recorder, log):
        planner = Pausing("planner", llm=model("planner", server.url))
        pair = recorder.wrap(team(planner, agent("coder", server.url), turns=2))
        async for item in pair.run_stream(task="x"):
            if getattr(item, "source", "") == "user":
                await pair.pause()
                await pair.resume()
    assert (planner.pauses, planner.resumes) == (1, 1)
    assert [t.agent for t in log.turns] == ["planner", "coder"]
    assert len(_ends(log)) == 1


class Failing(Custom):
    async def on_messages(self, messages: Any, cancellation_token: Any) -> Response:
        await super().on_messages(messages, cancellation_token)
        raise ZeroDivisionError("a bug of the app")


async def test_an_exception_inside_an_agent_is_the_apps_and_fails_the_episode() -> None:
    with recording() as (server, recorder, log):
        pair = recorder.wrap(team(Failing("planner", llm=model("planner", server.url)), turns=1))
        with pytest.raises(Exception, match="a bug of the app"):
            await pair.run(task="x")
        await pair.reset()
        with pytest.raises(Exception, match="a bug of the app"):
            await pair.run(task="y")
    assert [reason for reason, _ in _ends(log)] == ["failed", "failed"]
    assert all("a bug of the app" in str(detail) for _, detail in _ends(log))
    assert len(log.turns) == 2 and all(t.trainable for t in log.turns)


async def test_runs_of_an_episode_that_go_on_with_new_input_hear_the_app() -> None:
    with recording() as (server, recorder, log):
        pair = recorder.wrap(round_robin(server.url, turns=2))
        async with recorder.episode(task="write"):
            await pair.run(task="write")
            await pair.run(task=[TextMessage(content="shorter", source="editor")])
            await pair.run()
    assert [(h.name, h.text) for h in log.of(HumanEvent)] == [("editor", "shorter")]
    assert [t.step for t in log.turns] == [0, 1, 1, 1]


async def test_a_reset_between_two_runs_of_one_episode_forgets_what_was_said() -> None:
    with recording(script(planner=["always the same words"] * 2)) as (server, recorder, log):
        pair = recorder.wrap(
            team(agent("planner", server.url), agent("coder", server.url), turns=2)
        )
        async with recorder.episode():
            await pair.run(task="one")
            await pair.reset()
            await pair.run(task="two")
    last = log.turns[-1]
    assert last.agent == "coder" and last.depends_on == [log.turns[-2].turn_id]
    assert log.turns[2].depends_on == []


async def test_a_state_is_saved_and_loaded_into_a_team_of_the_same_making() -> None:
    with recording() as (server, recorder, log):
        first = recorder.wrap(round_robin(server.url, turns=3))
        await first.run(task="x")
        second = RoundRobinGroupChat.load_component(first.dump_component())
        await second.load_state(await first.save_state())
        await recorder.wrap(second).run(task="y")
    episodes = list(_by_episode(log.turns).values())
    said = [m.get("content") for m in episodes[1][0].messages]
    assert "x" in said and said[-1] == "y"
    assert not {t.turn_id for t in episodes[0]} & {d for t in episodes[1] for d in t.depends_on}


async def test_an_agent_in_two_teams_one_after_the_other() -> None:
    with recording(script(boss="planner")) as (server, recorder, log):
        planner, coder = agent("planner", server.url), agent("coder", server.url)
        pair = recorder.wrap(team(planner, coder, turns=1))
        options = known(SelectorGroupChat, max_turns=1)
        other: list[Any] = [planner, agent("critic", server.url), agent("judge", server.url)]
        group = recorder.wrap(SelectorGroupChat(other, model("boss", server.url), **options))
        await pair.run(task="one")
        await group.run(task="two")
        await pair.run(task="three")
    assert [(t.kind, t.agent) for t in log.turns] == [
        ("act", "planner"),
        ("select", "SelectorGroupChatManager"),
        ("act", "planner"),
        ("act", "coder"),
    ]
    assert [t.selected_by for t in log.turns] == [None, None, log.turns[1].turn_id, None]
    assert len(log.of(EpisodeStarted)) == 3
