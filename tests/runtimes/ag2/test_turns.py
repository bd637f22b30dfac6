"""Turns of AG2's agents: episodes, tools, agents behind tools, subtasks, summaries, humans."""

from __future__ import annotations

import asyncio
import copy
import logging
from typing import Any

import pytest
from ag2 import Agent, KnowledgeConfig, TaskConfig
from ag2.compact import CompactTrigger, SummarizeCompact
from ag2.config import OpenAIResponsesConfig
from ag2.events import ModelMessage, ModelResponse
from ag2.knowledge import MemoryKnowledgeStore
from ag2.middleware import BaseMiddleware
from ag2.testing import TestConfig
from ag2.tools.subagents import background_agent_tool
from pydantic import BaseModel

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
from tests.runtimes.ag2.kit import add, agent, config
from tests.runtimes.kit import calls_once


async def test_on_end_rewards_the_episode(
    recorder: MarftRecorder, log: InMemoryLog, stream: bool
) -> None:
    def score(handle: EpisodeHandle, response: Any) -> None:
        handle.reward(float(response.content == "done"))

    with ScriptedServer(["done"]) as server:
        planner = recorder.wrap(agent("planner", server.url, stream=stream), on_end=score)
        assert (await planner.ask("go")).body == "done"
    recorder.flush()
    assert [type(e) for e in log.events] == [EpisodeStarted, Turn, RewardEvent, EpisodeEnded]
    (reward,), (started,) = log.of(RewardEvent), log.of(EpisodeStarted)
    assert reward.value == 1.0 and started.task == "go" and log.turns[0].token_ids


async def test_a_tool_is_an_event_and_its_answer_a_step(
    recorder: MarftRecorder, log: InMemoryLog, stream: bool
) -> None:
    with ScriptedServer(calls_once({"planner": ("add", {"a": 1, "b": 2})})) as server:
        await recorder.wrap(agent("planner", server.url, stream=stream, tools=[add])).ask("go")
    recorder.flush()
    (tool,) = log.of(ToolEvent)
    assert (tool.name, tool.agent, tool.result, tool.ok) == ("add", "planner", "3", True)
    assert tool.call_id == "call-1-0" and tool.arguments == '{"a": 1, "b": 2}'
    assert [t.step for t in log.turns] == [0, 1]


async def test_a_failing_tool_is_not_ok(recorder: MarftRecorder, log: InMemoryLog) -> None:
    def fragile() -> str:
        """Break."""
        raise ValueError("broken")

    with ScriptedServer(calls_once({"planner": ("fragile", {})})) as server:
        planner = recorder.wrap(agent("planner", server.url, tools=[fragile]))
        await planner.ask("go")  # AG2 tells the model what went wrong
    recorder.flush()
    (tool,) = log.of(ToolEvent)
    assert not tool.ok and "broken" in tool.result


@pytest.mark.parametrize("background", [False, True], ids=["as_tool", "background"])
async def test_an_agent_behind_a_tool_serves_the_turn_that_called_it(
    recorder: MarftRecorder, log: InMemoryLog, background: bool
) -> None:
    name = "background_task_coder" if background else "task_coder"
    script = calls_once({"planner": (name, {"objective": "the boat's part"})})
    with ScriptedServer(script) as server:
        coder = agent("coder", server.url)
        tool: Any = (
            background_agent_tool(coder, description="writes code")
            if background
            else coder.as_tool(description="writes code")
        )
        await recorder.wrap(agent("planner", server.url, tools=[tool])).ask("go")
        async with asyncio.timeout(20):
            while not log.of(EpisodeEnded):  # what goes on in the background is waited for
                await asyncio.sleep(0)
    asked, inner = log.turns[0], next(t for t in log.turns if t.agent == "coder")
    assert (inner.parent_agent, inner.parent_turn) == ("planner", asked.turn_id)
    assert background or inner.turn_id in log.turns[-1].depends_on
    assert len({e.episode_id for e in log.events}) == 1
    assert {t.step for t in log.turns} == {0}  # an agent is no environment


async def test_a_subtask_is_an_agent_of_its_own(recorder: MarftRecorder, log: InMemoryLog) -> None:
    with ScriptedServer(calls_once({"planner": ("run_subtask", {"task": "dig"})})) as server:
        tasks = TaskConfig(config=config("digger", server.url))
        planner = agent("planner", server.url, tasks=tasks)
        await recorder.wrap(planner).ask("go")
        recorder.close()
        assert vars(planner)["_task_config"] is tasks
    asked, dug, answered = log.turns
    assert (dug.agent, dug.model) == ("planner-subtask", "digger") and dug.token_ids
    assert (dug.parent_agent, dug.parent_turn) == ("planner", asked.turn_id)
    assert dug.turn_id in answered.depends_on


async def test_compaction_is_a_summary(recorder: MarftRecorder, log: InMemoryLog) -> None:
    with ScriptedServer() as server:
        strategy = SummarizeCompact(target=1, config=config("writer", server.url))
        knowledge = KnowledgeConfig(
            store=MemoryKnowledgeStore(),
            expose_tool=False,
            compact=strategy,
            compact_trigger=CompactTrigger(max_events=2),
        )
        planner = recorder.wrap(agent("planner", server.url, knowledge=knowledge))
        with recorder.episode():
            reply = await planner.ask("go")
            await reply.ask("go on")
    recorder.flush()
    summaries = [t for t in log.turns if t.kind == "summary"]
    assert summaries and all((t.agent, t.model) == ("planner", "writer") for t in summaries)
    assert all(t.token_ids and t.depends_on for t in summaries)


async def test_humans_are_asked_and_heard(recorder: MarftRecorder, log: InMemoryLog) -> None:
    from ag2 import Context

    async def consult(context: Context) -> str:
        """Ask the human."""
        return await context.input("Green or blue?")

    with ScriptedServer(calls_once({"planner": ("consult", {})})) as server:
        planner = agent("planner", server.url, tools=[consult], hitl_hook=_green)
        recorder.wrap(planner)
        with recorder.episode():
            reply = await planner.ask("paint it")
            await reply.ask("now sink it")
    recorder.flush()
    assert [e.text for e in log.of(HumanEvent)] == ["green", "now sink it"]


async def _green(event: Any) -> str:
    return "green"


async def test_structured_output(recorder: MarftRecorder, log: InMemoryLog, stream: bool) -> None:
    class Plan(BaseModel):
        steps: int

    with ScriptedServer(['{"steps": 3}']) as server:
        planner = agent("planner", server.url, stream=stream, response_schema=Plan)
        reply = await recorder.wrap(planner).ask("go")
        assert await reply.content() == Plan(steps=3)
    recorder.flush()
    assert log.turns[0].token_ids and log.turns[0].sampling.grammar


async def test_a_chain_is_as_many_episodes_as_turns_unless_it_is_put_into_one(
    recorder: MarftRecorder, log: InMemoryLog
) -> None:
    with ScriptedServer() as server:
        planner = recorder.wrap(agent("planner", server.url))
        first = await planner.ask("first")
        await first.ask("second")
        async with planner.run("third") as run:
            await run.result()
        with recorder.episode(id="mine"):
            await (await planner.ask("fourth")).ask("fifth")
    recorder.flush()
    ids = [t.episode_id for t in log.turns]
    assert len(set(ids[:3])) == 3 and ids[3:] == ["mine", "mine"]
    assert log.turns[4].depends_on == [log.turns[3].turn_id]


async def test_the_same_agent_in_turns_at_once(
    recorder: MarftRecorder, log: InMemoryLog, stream: bool
) -> None:
    with ScriptedServer(calls_once({"planner": ("task_coder", {"objective": "it"})})) as server:
        tool = agent("coder", server.url).as_tool(description="writes code")
        planner = recorder.wrap(agent("planner", server.url, stream=stream, tools=[tool]))
        await asyncio.gather(*(planner.ask(f"task {i}") for i in range(5)))
    recorder.flush()
    assert [e.reason for e in log.of(EpisodeEnded)] == ["terminated"] * 5
    for started in log.of(EpisodeStarted):
        turns = [t for t in log.turns if t.episode_id == started.episode_id]
        assert [t.agent for t in turns] == ["planner", "coder", "planner"]
        assert str(started.task) in str(turns[0].messages)


async def test_turns_in_threads(recorder: MarftRecorder, log: InMemoryLog) -> None:
    def work(planner: Agent[Any]) -> None:
        asyncio.run(planner.ask("go"))

    with ScriptedServer() as server:
        planner = recorder.wrap(agent("planner", server.url))
        with recorder.episode(id="outer"):
            await asyncio.to_thread(work, planner)
        await asyncio.get_running_loop().run_in_executor(None, work, planner)
    recorder.flush()
    inside, alone = log.turns
    assert inside.episode_id == "outer" and alone.episode_id != "outer"


async def test_a_server_error_is_the_apps_and_a_failed_episode(
    recorder: MarftRecorder, log: InMemoryLog, stream: bool
) -> None:
    with ScriptedServer(lambda body: Reply(status=500, error="out of memory")) as server:
        planner = recorder.wrap(agent("planner", server.url, stream=stream))
        with pytest.raises(Exception, match="out of memory"):
            await planner.ask("go")
    recorder.flush()
    (turn,), (ended,) = log.turns, log.of(EpisodeEnded)
    assert "out of memory" in (turn.error or "") and ended.reason == "failed"


async def test_a_cancelled_turn(recorder: MarftRecorder, log: InMemoryLog) -> None:
    with ScriptedServer(lambda body: Reply(hang=True)) as server:
        planner = recorder.wrap(agent("planner", server.url))
        task = asyncio.create_task(planner.ask("go"))
        while not server.requests:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    recorder.flush()
    (turn,), (ended,) = log.turns, log.of(EpisodeEnded)
    assert not turn.trainable and ended.reason == "failed"


@pytest.mark.parametrize("kind", ["foreign", "responses"])
async def test_other_models_are_logged_without_tokens_and_said_once(
    recorder: MarftRecorder, log: InMemoryLog, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    with ScriptedServer() as server:
        other: Any = (
            TestConfig("canned", "canned")
            if kind == "foreign"
            else OpenAIResponsesConfig("m", base_url=server.url, api_key="sk-test", max_retries=0)
        )
        planner = recorder.wrap(Agent("planner", "Plan.", config=other))
        with caplog.at_level(logging.WARNING, "marft_agents.recording"):
            for _ in range(2):
                if kind == "foreign":
                    assert (await planner.ask("go")).body == "canned"
                else:  # the server knows chat completions only
                    with pytest.raises(Exception):  # noqa: B017 whatever the SDK makes of it
                        await planner.ask("go")
    recorder.flush()
    assert [t.token_ids for t in log.turns] == [None, None]
    assert [m["role"] for m in log.turns[0].messages] == ["system", "user"]
    said = [r.getMessage() for r in caplog.records]
    assert (len(said) == 1 and "OpenAIConfig" in said[0]) or kind == "responses"


async def test_what_a_middleware_answers_is_no_sample(
    recorder: MarftRecorder, log: InMemoryLog, caplog: pytest.LogCaptureFixture
) -> None:
    class Cache(BaseMiddleware):
        async def on_llm_call(self, call_next: Any, events: Any, context: Any) -> ModelResponse:
            return ModelResponse(ModelMessage("from the cache"))

    with ScriptedServer() as server:
        planner = recorder.wrap(agent("planner", server.url, middleware=[Cache]))
        assert (await planner.ask("go")).body == "from the cache"
    recorder.flush()
    (turn,) = log.turns
    assert turn.cached and turn.text == "from the cache" and "middleware" in caplog.text


async def test_a_halted_turn_is_truncated(recorder: MarftRecorder, log: InMemoryLog) -> None:
    class Halt(BaseMiddleware):
        async def on_llm_call(self, call_next: Any, events: Any, context: Any) -> ModelResponse:
            return ModelResponse(ModelMessage("HALTED: too dear"))

    with ScriptedServer() as server:
        await recorder.wrap(agent("planner", server.url, middleware=[Halt])).ask("go")
    recorder.flush()
    (ended,) = log.of(EpisodeEnded)
    assert (ended.reason, ended.detail) == ("truncated", "HALTED: too dear")


def held(planner: Agent[Any]) -> list[Any]:
    """The middleware of an agent."""
    return vars(planner)["_middleware"]


async def test_late_twice_and_taken_off(log: InMemoryLog) -> None:
    with ScriptedServer() as server:
        planner = agent("planner", server.url)
        before = list(held(planner))
        await planner.ask("before")
        first, second = MarftRecorder(log=log), MarftRecorder(log=log)
        first.wrap(planner)
        first.wrap(planner)
        with pytest.raises(IntegrationError, match="another MarftRecorder"):
            second.wrap(planner)
        await planner.ask("after")
        first.close()
        assert held(planner) == before
        second.wrap(planner)
        await planner.ask("again")
        second.close()
        assert held(planner) == before
    assert [e.task for e in log.of(EpisodeStarted)] == ["after", "again"] and len(log.turns) == 2


async def test_a_copy_of_its_middleware_does_nothing(
    recorder: MarftRecorder, log: InMemoryLog
) -> None:
    with ScriptedServer() as server:
        planner = recorder.wrap(agent("planner", server.url))
        twin = agent("planner", server.url, middleware=copy.deepcopy(held(planner)))
        assert (await twin.ask("go")).body
    recorder.flush()
    assert log.events == []


def test_what_is_neither_agent_nor_hub_is_refused(recorder: MarftRecorder) -> None:
    with pytest.raises(IntegrationError, match=r"pass an ag2\.Agent"):
        recorder.wrap(TaskConfig())
