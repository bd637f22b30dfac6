"""Runs of agents as episodes: how they end, in threads and tasks, wrapped late, twice, copied."""

from __future__ import annotations

import asyncio
import copy
import importlib
import inspect
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from agents import (
    Agent,
    MaxTurnsExceeded,
    RunConfig,
    RunHooks,
    Runner,
    SQLiteSession,
    function_tool,
    handoff,
    input_guardrail,
)
from agents.run import get_default_agent_runner

from marft_agents import MarftRecorder
from marft_agents.errors import IntegrationError
from marft_agents.recording import EpisodeHandle
from marft_agents.schema import (
    EpisodeEnded,
    EpisodeStarted,
    HumanEvent,
    RewardEvent,
    ToolEvent,
    Turn,
)
from marft_agents.testing import InMemoryLog, Reply, ScriptedServer
from tests.runtimes.kit import calls_once, noting
from tests.runtimes.openai_agents.kit import add, agent, model, play

pytestmark = pytest.mark.usefixtures("closing")


def again(body: Any) -> Reply:
    """An agent that never stops calling its tool."""
    return Reply(tool_calls=[("add", {"a": 1, "b": 1})])


@pytest.mark.parametrize(("end", "reason"), [("auto", "truncated"), ("terminated", "terminated")])
async def test_a_run_that_hits_its_limit(
    recorder: MarftRecorder, log: InMemoryLog, stream: bool, end: str, reason: str
) -> None:
    ends: list[Any] = []
    with ScriptedServer(again) as server:
        planner = agent("planner", server.url, tools=[add])
        recorder.wrap(planner, end=end, on_end=noting(ends))
        with pytest.raises(MaxTurnsExceeded):
            await play(planner, "go", stream=stream, max_turns=2)
    recorder.flush()
    (ended,) = log.of(EpisodeEnded)
    assert ended.reason == reason and "MaxTurnsExceeded" in (ended.detail or "")
    assert len(log.turns) == 2 and [type(e) for e in ends] == [MaxTurnsExceeded]


async def test_on_end_rewards_the_episode(
    recorder: MarftRecorder, log: InMemoryLog, stream: bool
) -> None:
    with ScriptedServer(["done"]) as server:

        def score(handle: EpisodeHandle, result: Any) -> None:
            handle.reward(float(result.final_output == "done"))

        planner = recorder.wrap(agent("planner", server.url), on_end=score)
        await play(planner, "go", stream=stream)
    recorder.flush()
    assert [type(e) for e in log.events] == [EpisodeStarted, Turn, RewardEvent, EpisodeEnded]


async def test_a_server_error_is_the_apps_and_a_failed_episode(
    recorder: MarftRecorder, log: InMemoryLog, stream: bool
) -> None:
    with ScriptedServer(lambda body: Reply(status=500, error="out of memory")) as server:
        planner = recorder.wrap(agent("planner", server.url))
        with pytest.raises(Exception, match="out of memory"):
            await play(planner, "go", stream=stream)
    recorder.flush()
    (turn,), (ended,) = log.turns, log.of(EpisodeEnded)
    assert "out of memory" in (turn.error or "") and ended.reason == "failed"


async def test_a_cancelled_run(recorder: MarftRecorder, log: InMemoryLog) -> None:
    with ScriptedServer(lambda body: Reply(hang=True)) as server:
        task = asyncio.create_task(Runner.run(recorder.wrap(agent("planner", server.url)), "go"))
        while not server.requests:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    recorder.flush()
    (turn,), (ended,) = log.turns, log.of(EpisodeEnded)
    assert not turn.trainable and ended.reason == "failed"


@pytest.mark.parametrize("how", ["cancelled", "left", "unread"])
async def test_a_stream_that_is_not_read_to_its_end(
    recorder: MarftRecorder, log: InMemoryLog, how: str
) -> None:
    with ScriptedServer(again) as server:
        planner = recorder.wrap(agent("planner", server.url, tools=[add]))
        result = Runner.run_streamed(planner, "go", max_turns=3)
        if how != "unread":
            events = result.stream_events()
            await anext(events)
            if how == "cancelled":
                result.cancel()
                async for _ in events:
                    pass
            await events.aclose()  # pyright: ignore[reportAttributeAccessIssue] a generator
        task: Any = getattr(result, "run_loop_task", None) or getattr(result, "_run_impl_task", 0)
        await asyncio.wait([task])
    await asyncio.sleep(0)
    recorder.flush()
    (ended,) = log.of(EpisodeEnded)
    assert ended.reason == ("failed" if how == "cancelled" else "truncated")
    assert how == "cancelled" or len(log.turns) == 3


def test_a_synchronous_run_in_a_thread(recorder: MarftRecorder, log: InMemoryLog) -> None:
    def work(planner: Agent[Any]) -> str:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            return str(Runner.run_sync(planner, "go").final_output)
        finally:
            loop.close()

    async def main() -> None:
        with ScriptedServer() as server:
            planner = recorder.wrap(agent("planner", server.url))
            with recorder.episode(id="outer"):
                await asyncio.to_thread(work, planner)
            await asyncio.get_running_loop().run_in_executor(None, work, planner)

    asyncio.run(main())
    recorder.flush()
    inside, alone = log.turns
    assert inside.episode_id == "outer" and alone.episode_id != "outer"
    assert inside.token_ids and alone.token_ids


async def test_the_same_agents_in_runs_at_once(
    recorder: MarftRecorder, log: InMemoryLog, stream: bool
) -> None:
    with ScriptedServer(calls_once({"planner": ("transfer_to_coder", {})})) as server:
        planner = agent("planner", server.url, handoffs=[agent("coder", server.url)])
        recorder.wrap(planner)
        await asyncio.gather(*(play(planner, f"task {i}", stream=stream) for i in range(5)))
    recorder.flush()
    assert [e.reason for e in log.of(EpisodeEnded)] == ["terminated"] * 5
    for started in log.of(EpisodeStarted):
        turns = [t for t in log.turns if t.episode_id == started.episode_id]
        assert [t.agent for t in turns] == ["planner", "coder"]
        assert all(started.task in str(t.messages) for t in turns)
        assert turns[1].selected_by == turns[0].turn_id


async def test_a_session_is_not_an_episode(
    recorder: MarftRecorder, log: InMemoryLog, stream: bool
) -> None:
    with ScriptedServer() as server:
        planner, session = recorder.wrap(agent("planner", server.url)), SQLiteSession("s")
        for task in ("first", "second"):
            await play(planner, task, stream=stream, session=session)
        assert "logprob" not in str(await session.get_items()).replace("'logprobs': []", "")
        session.close()
    recorder.flush()
    assert len({t.episode_id for t in log.turns}) == 2
    assert len(log.turns[1].messages) == 4 and log.turns[1].depends_on == []


async def test_later_words_in_one_episode_are_a_humans_unless_an_agent_said_them(
    recorder: MarftRecorder, log: InMemoryLog
) -> None:
    with ScriptedServer() as server:
        planner = recorder.wrap(agent("planner", server.url))
        critic = recorder.wrap(agent("critic", server.url))
        with recorder.episode():
            first = await Runner.run(planner, "plan it")
            await Runner.run(critic, f"Judge: {first.final_output}")
            more: Any = [*first.to_input_list(), {"role": "user", "content": "make it shorter"}]
            await Runner.run(planner, more)
    recorder.flush()
    assert [e.text for e in log.of(HumanEvent)] == ["make it shorter"]
    plan, judged, shorter = log.turns
    assert [t.step for t in log.turns] == [0, 0, 1]
    assert judged.depends_on == [plan.turn_id] and shorter.depends_on == [plan.turn_id]


async def test_wrapped_after_its_first_run_and_twice(
    recorder: MarftRecorder, log: InMemoryLog
) -> None:
    with ScriptedServer() as server:
        planner = agent("planner", server.url)
        await play(planner, "before")
        for _ in range(2):
            recorder.wrap(planner)
        await play(planner, "after")
    recorder.flush()
    assert [e.task for e in log.of(EpisodeStarted)] == ["after"] and len(log.turns) == 1


async def test_copies_are_not_recorded_and_said_once(
    recorder: MarftRecorder, log: InMemoryLog, caplog: pytest.LogCaptureFixture
) -> None:
    with ScriptedServer() as server:
        planner = recorder.wrap(agent("planner", server.url, model=None))
        for made in (planner.clone(instructions="Other."), copy.deepcopy(planner)):
            made.model = model("planner", server.url)
            with caplog.at_level(logging.WARNING, "marft_agents.recording"):
                await play(made, "go")
    recorder.flush()
    said = [r.getMessage() for r in caplog.records if "is not the recorded one" in r.getMessage()]
    assert log.events == [] and len(said) == 1


async def test_an_agent_made_while_running_is_recorded(
    recorder: MarftRecorder, log: InMemoryLog
) -> None:
    with ScriptedServer(calls_once({"planner": ("transfer_to_template", {})})) as server:
        template = agent("template", server.url)
        offer: Any = handoff(template)
        offer.on_invoke_handoff = _made(lambda: agent("fresh", server.url))
        planner = recorder.wrap(agent("planner", server.url, handoffs=[offer]))
        result = await Runner.run(planner, "go")
        await Runner.run(result.last_agent, "again")
    recorder.flush()
    assert [t.agent for t in log.turns] == ["planner", "fresh", "fresh"]
    assert log.turns[1].selected_by == log.turns[0].turn_id


def _made(make: Any) -> Any:
    async def on_invoke_handoff(context: Any, given: str) -> Agent[Any]:
        return make()

    return on_invoke_handoff


async def test_the_apps_own_hooks_are_called_as_before(recorder: MarftRecorder) -> None:
    class Watching(RunHooks[Any]):
        def __init__(self) -> None:
            self.seen: list[str] = []

        async def on_agent_start(self, context: Any, agent: Any) -> None:
            self.seen.append(f"start {agent.name}")

        async def on_handoff(self, context: Any, from_agent: Any, to_agent: Any) -> None:
            self.seen.append(f"{from_agent.name} to {to_agent.name}")

        async def on_agent_end(self, context: Any, agent: Any, output: Any) -> None:
            self.seen.append(f"end {agent.name}")

    hooks: Any = Watching()
    with ScriptedServer(calls_once({"planner": ("transfer_to_coder", {})})) as server:
        planner = agent("planner", server.url, handoffs=[agent("coder", server.url)])
        await Runner.run(recorder.wrap(planner), "go", hooks=hooks)
    assert hooks.seen == ["start planner", "planner to coder", "start coder", "end coder"]


async def test_everything_is_put_back(log: InMemoryLog) -> None:
    @input_guardrail
    async def fine(context: Any, agent: Any, given: Any) -> Any:
        raise NotImplementedError

    with ScriptedServer() as server:
        planner = agent("planner", server.url, input_guardrails=[fine])
        touched: list[Any] = [planner, planner.model, fine, get_default_agent_runner()]
        before = [dict(vars(thing)) for thing in touched]
        first, second = MarftRecorder(log=log), MarftRecorder(log=log)
        first.wrap(planner)
        with pytest.raises(IntegrationError, match="another MarftRecorder"):
            second.wrap(planner)
        first.close()
        second.wrap(planner)
        second.close()
        assert [dict(vars(thing)) for thing in touched] == before


async def test_a_recorder_leaves_the_others_runs_alone(log: InMemoryLog) -> None:
    with ScriptedServer() as server, MarftRecorder(log=log) as mine:
        theirs = MarftRecorder(log=InMemoryLog())
        shared = model("base", server.url)
        planner = mine.wrap(agent("planner", server.url, model=shared))
        coder = theirs.wrap(agent("coder", server.url, model=shared))
        await play(planner, "go")
        await play(coder, "go")
        theirs.close()
        await play(planner, "go")
        await play(coder, "go")
        assert "x-marft-agent" not in server.requests[-1].headers
        mine.flush()
    assert [t.agent for t in log.turns] == ["planner"] * 2


def test_what_is_no_agent_is_refused(recorder: MarftRecorder) -> None:
    with pytest.raises(IntegrationError, match=r"pass the agents\.Agent"):
        recorder.wrap(RunConfig())


def test_a_package_of_the_users_called_agents_is_not_the_sdk(
    recorder: MarftRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "__init__.py").write_text("class Agent:\n    name = 'mine'\n")
    hidden = [name for name in sys.modules if name.split(".")[0] == "agents"]
    for name in hidden:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    mine: Any = importlib.import_module("agents")
    with pytest.raises(IntegrationError, match=r"object of type agents\.Agent"):
        recorder.wrap(mine.Agent())
    monkeypatch.delitem(sys.modules, "agents")


@pytest.mark.parametrize("together", [False, True])
async def test_a_run_that_stops_to_have_a_tool_approved(
    recorder: MarftRecorder, log: InMemoryLog, together: bool
) -> None:
    if "needs_approval" not in inspect.signature(function_tool).parameters:
        pytest.skip("this version knows no approvals")
    guarded: Any = function_tool(_guarded, needs_approval=True)
    with ScriptedServer(calls_once({"planner": ("_guarded", {})})) as server:
        planner = recorder.wrap(agent("planner", server.url, tools=[guarded]))

        async def approved() -> None:
            result: Any = await Runner.run(planner, "go")
            state = result.to_state()
            state.approve(result.interruptions[0])
            assert (await Runner.run(planner, state)).final_output

        if together:
            async with recorder.episode() as episode:
                episode.end("terminated")
                await approved()
        else:
            await approved()
    recorder.flush()
    assert [t.agent for t in log.turns] == ["planner", "planner"]
    assert log.of(ToolEvent)[0].result == "done"
    ends = [e.reason for e in log.of(EpisodeEnded)]
    assert ends == (["terminated"] if together else ["truncated", "terminated"])


def _guarded() -> str:
    """Do what needs approval."""
    return "done"
