"""Runs of agents and workflows: how they begin, end, fail, are left, and come side by side."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import AsyncIterable, Awaitable
from typing import Any

import pytest
from agent_framework import (
    Agent,
    BaseAgent,
    BaseChatClient,
    ChatResponse,
    ChatResponseUpdate,
    Message,
    ResponseStream,
)
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from agent_framework.orchestrations import GroupChatBuilder, SequentialBuilder

from marft_agents import MarftRecorder
from marft_agents.errors import IntegrationError
from marft_agents.schema import EpisodeEnded, EpisodeStarted, RewardEvent
from marft_agents.testing import InMemoryLog, Reply, ScriptedServer
from tests.recording.kit import recording
from tests.runtimes.agent_framework.kit import (
    agent,
    agents,
    by_turns,
    client,
    events,
    group_chat,
    heard,
    sequential,
)


def _ends(log: InMemoryLog) -> list[tuple[str, str | None]]:
    return [(e.reason, e.detail) for e in log.of(EpisodeEnded)]


def _tasks(log: InMemoryLog) -> list[Any]:
    return [e.task for e in log.of(EpisodeStarted)]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_alone_is_a_run(stream: bool) -> None:
    with recording() as (server, recorder, log):
        planner = recorder.wrap(agent("planner", server.url))
        session = planner.create_session()
        for task in ("x", "y"):
            if stream:
                said = await planner.run(task, stream=True, session=session).get_final_response()
            else:
                said = await planner.run(task, session=session)
            assert said.text
    assert _tasks(log) == ["x", "y"] and _ends(log) == [("terminated", None)] * 2
    assert all(t.trainable for t in log.turns)


async def test_a_conversation_in_one_episode_is_linked() -> None:
    with recording() as (server, recorder, log):
        planner = recorder.wrap(agent("planner", server.url))
        session = planner.create_session()
        async with recorder.episode(task="talk"):
            await planner.run("x", session=session)
            await planner.run(Message("user", ["y"]), session=session)
    assert log.turns[1].depends_on == [log.turns[0].turn_id]


async def test_runs_of_one_agent_at_once_are_episodes_of_their_own() -> None:
    with recording() as (server, recorder, log):
        planner = recorder.wrap(agent("planner", server.url))

        async def play(task: str) -> None:
            await planner.run(task)

        await asyncio.gather(*(play(f"task {i}") for i in range(4)))
    episodes = {t.episode_id: t.messages[-1]["content"] for t in log.turns}
    assert episodes == {e.episode_id: e.task for e in log.of(EpisodeStarted)}
    assert len(episodes) == 4


async def test_workflows_at_once_with_the_same_agents() -> None:
    with recording() as (server, recorder, log):
        members = agents(server.url, "planner", "coder")
        teams = [
            recorder.wrap(SequentialBuilder(participants=members).build()),
            recorder.wrap(
                GroupChatBuilder(
                    participants=members, selection_func=by_turns, max_rounds=2
                ).build()
            ),
        ]
        await asyncio.gather(*(t.run(f"task {i}") for i, t in enumerate(teams)))
    for started in log.of(EpisodeStarted):
        turns = [t for t in log.turns if t.episode_id == started.episode_id]
        assert [t.agent for t in turns] == ["planner", "coder"]
        assert all(m[1]["content"] == started.task for m in (t.messages for t in turns))


async def test_a_stream_read_in_another_task() -> None:
    with recording() as (server, recorder, log):
        stream = recorder.wrap(sequential(server.url)).run("x", stream=True)

        async def read() -> list[Any]:
            return [event async for event in stream]

        assert await asyncio.create_task(read())
        assert recorder.current() is None
    assert [t.agent for t in log.turns] == ["planner", "coder"]
    assert _ends(log) == [("terminated", None)]


@pytest.mark.parametrize("how", ["close", "drop"])
async def test_a_run_that_nobody_reads_to_its_end_has_failed(how: str) -> None:
    with recording() as (server, recorder, log):
        workflow = recorder.wrap(sequential(server.url))
        stream: Any = workflow.run("x", stream=True)
        assert await anext(stream)
        if how == "close" and hasattr(stream, "close"):
            await stream.close()
        del stream
        gc.collect()
    assert _ends(log) == [("failed", "the run was left before its result")]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failing_model_call_fails_the_run_and_the_app_sees_its_error(stream: bool) -> None:
    script = ["fine", Reply(status=400, error="maximum context length is 512 tokens")]
    with recording(script) as (server, recorder, log):
        workflow = recorder.wrap(sequential(server.url))
        with pytest.raises(Exception, match="maximum context length"):
            await events(workflow, "x", stream=stream)
    assert [t.error is None for t in log.turns] == [True, False]
    assert log.turns[0].trainable
    ((reason, detail),) = _ends(log)
    assert reason == "failed" and "maximum context length" in str(detail)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_run_has_failed(stream: bool) -> None:
    with recording([Reply("never", hang=True)]) as (server, recorder, log):
        run = asyncio.create_task(events(recorder.wrap(sequential(server.url)), "x", stream=stream))
        while not server.requests:
            await asyncio.sleep(0.01)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    (turn,) = log.turns
    assert turn.error is not None and not turn.token_ids and not turn.trainable
    ((reason, _),) = _ends(log)
    assert reason == "failed"


async def test_a_broken_stream_is_an_incomplete_turn() -> None:
    with recording([Reply("one two three four", cut_after=3)]) as (server, recorder, log):
        planner = recorder.wrap(agent("planner", server.url))
        with pytest.raises(Exception, match=r"incomplete|peer closed|failed to complete"):
            await planner.run("x", stream=True).get_final_response()
    assert not log.turns[0].trainable
    assert _ends(log)[0][0] == "failed"


async def test_models_sends_one_agent_to_its_adapter() -> None:
    with recording(models={"planner": "planner-lora"}) as (server, recorder, log):
        shared = client("base", server.url)
        members = [agent(n, server.url, client=shared) for n in ("planner", "coder")]
        await recorder.wrap(SequentialBuilder(participants=members).build()).run("x")
    assert [r.body["model"] for r in server.requests] == ["planner-lora", "base"]
    assert [t.agent for t in log.turns] == ["planner", "coder"]


async def test_wrap_after_a_first_run_and_twice() -> None:
    with recording() as (server, recorder, log):
        workflow = sequential(server.url)
        await workflow.run("x")
        for _ in range(2):
            assert recorder.wrap(workflow) is workflow
        await workflow.run("y")
    assert len(log.turns) == 2 and _tasks(log) == ["y"]


async def test_a_builder_records_what_it_builds() -> None:
    ended: list[Any] = []

    def take_note(episode: Any, result: Any) -> None:
        ended.append((episode.id, result))

    with recording() as (server, recorder, log):
        builder = SequentialBuilder(participants=agents(server.url, "planner", "coder"))
        assert recorder.wrap(builder, on_end=take_note) is builder
        assert recorder.wrap(builder) is builder
        for task in ("x", "y"):
            await builder.build().run(task)
    assert _tasks(log) == ["x", "y"] and len(log.turns) == 4
    assert [e for e, _ in ended] == [e.episode_id for e in log.of(EpisodeStarted)]
    assert "build" not in vars(builder)


async def test_the_app_rewards_a_run_when_it_ends() -> None:
    def reward(episode: Any, result: Any) -> None:
        episode.reward(len(result.get_outputs()))

    with recording() as (server, recorder, log):
        workflow = recorder.wrap(sequential(server.url), on_end=reward)
        await events(workflow, "x", stream=True)
        with recorder.episode():
            await workflow.run("not mine to end")
    rewards = log.of(RewardEvent)
    assert [e.episode_id for e in rewards] == [log.of(EpisodeStarted)[0].episode_id]
    assert log.events.index(rewards[0]) < log.events.index(log.of(EpisodeEnded)[0])


async def test_close_takes_everything_off_and_another_recorder_may_come() -> None:
    with ScriptedServer() as server:
        members = agents(server.url, "planner", "coder")
        workflow = SequentialBuilder(participants=members).build()
        before = [dict(vars(o)) for o in (workflow, *members)]
        first, second = InMemoryLog(), InMemoryLog()
        with MarftRecorder(log=first) as recorder:
            recorder.wrap(workflow)
            await workflow.run("x")
            with MarftRecorder(log=second) as other, pytest.raises(IntegrationError, match="close"):
                other.wrap(workflow)
        after = [vars(o) for o in (workflow, *members)]
        assert [b.keys() for b in before] == [a.keys() for a in after]
        assert all(m.client is b["client"] for m, b in zip(members, before[1:], strict=True))
        await workflow.run("not recorded")
        with MarftRecorder(log=second) as recorder:
            recorder.wrap(workflow)
            await workflow.run("y")
    assert [len(log.turns) for log in (first, second)] == [2, 2]
    assert _tasks(second) == ["y"]


async def test_an_agent_stays_what_it_was() -> None:
    with recording() as (server, recorder, log):
        plain, shared = agent("planner", server.url), client("planner", server.url)
        planner: Any = recorder.wrap(agent("planner", server.url, client=shared, id=plain.id))
        assert type(planner) is Agent and planner.to_dict() == plain.to_dict()
        assert isinstance(planner.client, OpenAIChatCompletionClient)
        assert planner.client.__class__ is OpenAIChatCompletionClient
        assert repr(type(planner.client)) == repr(OpenAIChatCompletionClient)
        planner.client.model = "other"
        assert shared.model == "other" and vars(shared) is vars(planner.client)
        shared.client = client("planner", server.url).client
        await planner.run("x")
    assert log.turns[0].trainable
    assert planner.client is shared


async def test_calls_of_the_app_on_the_same_client_are_its_own() -> None:
    with recording() as (server, recorder, log):
        shared = client("base", server.url)
        planner = recorder.wrap(agent("planner", server.url, client=shared))
        with recorder.episode():
            await planner.run("x")
            await shared.get_response([Message("user", ["judge it"])])
    assert len(server.requests) == 2 and len(log.turns) == 1


async def test_recording_keeps_no_workflow_alive() -> None:
    with recording() as (server, recorder, _):
        workflow: Any = recorder.wrap(sequential(server.url))
        await workflow.run("x")
        alive = weakref.ref(workflow)
        chat = weakref.ref(workflow.executors["planner"]._agent.client.client)
        del workflow
        gc.collect()
        assert alive() is None and chat() is None


async def test_a_call_outside_any_run_passes_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with recording() as (server, recorder, log), caplog.at_level(logging.WARNING):
        planner = agent("planner", server.url)
        recorder.wrap(SequentialBuilder(participants=[planner]).build())
        assert (await planner.run("x")).text
    assert not log.turns and "outside a recorded run" in caplog.text


class Replies(BaseChatClient[Any]):
    """A chat client of another provider."""

    def _inner_get_response(
        self, *, messages: Any, stream: bool, options: Any, **kwargs: Any
    ) -> Awaitable[ChatResponse] | ResponseStream[ChatResponseUpdate, ChatResponse]:
        if not stream:
            return self._reply()
        return self._build_response_stream(self._updates())

    async def _reply(self) -> ChatResponse:
        return ChatResponse(messages=[Message("assistant", ["from elsewhere"])])

    async def _updates(self) -> AsyncIterable[ChatResponseUpdate]:
        from agent_framework import Content

        for text in ("from ", "elsewhere"):
            yield ChatResponseUpdate(contents=[Content.from_text(text)], role="assistant")


@pytest.mark.parametrize("stream", [False, True])
async def test_other_providers_are_logged_without_tokens(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with recording() as (server, recorder, log), caplog.at_level(logging.WARNING):
        other: Any = agent("planner", server.url, client=Replies())
        members = [other, agent("coder", server.url)]
        workflow = recorder.wrap(SequentialBuilder(participants=members).build())
        await events(workflow, "x", stream=stream)
    planner, coder = log.turns
    assert planner.text == "from elsewhere" and not planner.trainable and planner.error is None
    assert planner.messages[-1] == {"role": "user", "content": "x"}
    assert coder.trainable and coder.depends_on == [planner.turn_id]
    said = [r.getMessage() for r in caplog.records if "without tokens" in r.getMessage()]
    assert len(said) == 1 and "'planner' uses" in said[0] and "Replies" in said[0]


async def test_the_responses_api_is_said_with_the_cure(caplog: pytest.LogCaptureFixture) -> None:
    with recording() as (server, recorder, _), caplog.at_level(logging.WARNING):
        chat = OpenAIChatClient(model="planner", base_url=server.url, api_key="sk-test")
        recorder.wrap(agent("planner", server.url, client=chat))
        recorder.wrap(agent("coder", server.url, client=chat))
    (record,) = (r for r in caplog.records if "Responses API" in r.getMessage())
    assert "OpenAIChatCompletionClient(model=..., base_url=...)" in record.getMessage()


async def test_agents_without_a_name_or_a_client_are_said(caplog: pytest.LogCaptureFixture) -> None:
    class Remote(BaseAgent):
        def run(self, messages: Any = None, **options: Any) -> Any:
            raise NotImplementedError

    with recording() as (server, recorder, _), caplog.at_level(logging.WARNING):
        recorder.wrap(Agent(client("x", server.url)))
        recorder.wrap(Remote(name="far"))
    assert "without a name is recorded under its id" in caplog.text
    assert "'far' is a" in caplog.text and "without a chat client" in caplog.text


def test_a_wrap_that_is_refused_leaves_nothing_behind() -> None:
    with recording() as (server, one, _), recording() as (_, two, _):
        free, taken = agents(server.url, "planner", "coder")
        one.wrap(taken)
        workflow = SequentialBuilder(participants=[free, taken]).build()
        before = [set(vars(o)) for o in (workflow, free)]
        with pytest.raises(IntegrationError, match="'coder' is still recorded"):
            two.wrap(workflow)
        assert [set(vars(o)) for o in (workflow, free)] == before


def test_only_what_runs_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    with recording() as (server, recorder, _):
        with pytest.raises(IntegrationError, match="pass a workflow, an agent or a builder"):
            recorder.wrap(client("x", server.url))
        monkeypatch.setattr(
            "marft_agents_agent_framework.roots.installed_runtime", _newer_than_known
        )
        with pytest.raises(IntegrationError, match=r"agent-framework-core 3\.0\.0 is installed"):
            recorder.wrap(agent("planner", server.url))


def _newer_than_known(label: str, known: Any) -> str:
    from marft_agents.recording import installed_runtime

    return installed_runtime(label, known, version_of=lambda name: "3.0.0")


async def test_the_app_sees_the_same_events_in_both_modes() -> None:
    with ScriptedServer() as server:
        plain = heard(await events(group_chat(server.url), "x", stream=True))
    with recording() as (server, recorder, _):
        assert heard(await events(recorder.wrap(group_chat(server.url)), "x", stream=True)) == plain
