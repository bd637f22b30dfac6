"""Who speaks in an orchestration, who chose the speaker, and what humans said between."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from agent_framework import (
    AgentExecutor,
    AgentExecutorRequest,
    AgentExecutorResponse,
    Executor,
    InMemoryCheckpointStorage,
    Message,
    WorkflowBuilder,
    WorkflowContext,
    WorkflowExecutor,
    executor,
    handler,
    step,
    tool,
    workflow,
)
from agent_framework.orchestrations import (
    AgentRequestInfoResponse,
    GroupChatBuilder,
    HandoffBuilder,
    MagenticBuilder,
    SequentialBuilder,
)

from marft_agents import MarftRecorder
from marft_agents.schema import (
    EpisodeEnded,
    EpisodeStarted,
    HumanEvent,
    JsonDict,
    ToolEvent,
    Turn,
)
from marft_agents.testing import InMemoryLog, Reply, default_reply
from tests.recording.kit import recording
from tests.runtimes.agent_framework.kit import (
    agent,
    agents,
    by_turns,
    client,
    events,
    group_chat,
    handing_off,
    handoff,
    sequential,
)


def _ends(log: InMemoryLog) -> list[tuple[str, str | None]]:
    return [(e.reason, e.detail) for e in log.of(EpisodeEnded)]


def _who(turns: list[Turn]) -> list[str]:
    return [t.agent for t in turns]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_handoff_chooses_the_next_speaker(stream: bool) -> None:
    with recording(handing_off) as (server, recorder, log):
        await events(recorder.wrap(handoff(server.url)), "go", stream=stream)
    first, second, third = log.turns
    assert _who(log.turns) == ["planner", "coder", "planner"]
    assert [t.selected_by for t in log.turns] == [None, first.turn_id, second.turn_id]
    assert [t.name for t in log.of(ToolEvent)] == ["handoff_to_coder", "handoff_to_planner"]
    assert [t.step for t in log.turns] == [0, 0, 0]
    assert first.turn_id in second.depends_on and second.turn_id in third.depends_on
    assert _ends(log) == [("terminated", "it waits for 1 answer(s)")]


async def test_a_handoff_of_agents_that_were_wrapped_themselves() -> None:
    """The workflow runs copies of the agents."""
    with recording(handing_off) as (server, recorder, log):
        planner, coder = agents(
            server.url, "planner", "coder", require_per_service_call_history_persistence=True
        )
        recorder.wrap(planner)
        recorder.wrap(coder)
        builder = HandoffBuilder(participants=[planner, coder]).with_start_agent(planner)
        with recorder.episode():
            await builder.build().run("go")
    assert _who(log.turns) == ["planner", "coder", "planner"]
    assert all(t.token_ids for t in log.turns) and log.turns[2].trainable


async def test_copies_that_outlive_a_recorder_are_recorded_by_the_next() -> None:
    second = InMemoryLog()
    with recording(handing_off) as (server, recorder, first):
        planner, coder = agents(
            server.url, "planner", "coder", require_per_service_call_history_persistence=True
        )
        recorder.wrap(planner)
        builder = HandoffBuilder(participants=[planner, coder]).with_start_agent(planner)
        workflow: Any = builder.build()
        recorder.close()
        await workflow.run("not recorded")
        assert not first.events and "x-marft-agent" not in server.requests[0].headers
        with MarftRecorder(log=second) as other:
            await other.wrap(builder.build()).run("go")
            copy = workflow.executors["planner"]._agent.client
            other.wrap(workflow)
            again = workflow.executors["planner"]._agent.client
    assert _who(second.turns) == ["planner", "coder", "planner"]
    assert _stand_ins(copy) == _stand_ins(again) == 1


def _stand_ins(chat: Any) -> int:
    return sum("_marft_seat" in vars(base) for base in type(chat).__mro__)


async def test_a_participant_acts_even_if_its_orchestrator_knows_it() -> None:
    with recording() as (server, recorder, log):
        workflow: Any = group_chat(server.url)
        for held in workflow.executors.values():
            if "Orchestrator" in type(held).__name__:
                held.members = [e._agent for e in workflow.executors.values() if e is not held]
        await recorder.wrap(workflow).run("go")
    assert {t.kind for t in log.turns} == {"act"}


async def test_a_human_answers_a_handoff_workflow() -> None:
    with recording(handing_off) as (server, recorder, log):
        workflow: Any = recorder.wrap(handoff(server.url))
        with recorder.episode(task="talk"):
            result = await workflow.run("go")
            (request,) = result.get_request_info_events()
            answer = request.data.create_response("be brief please")
            await workflow.run(responses={request.request_id: answer})
    assert [h.text for h in log.of(HumanEvent)] == ["be brief please"]
    assert [t.step for t in log.turns] == [0, 0, 0, 1]
    assert len(log.of(EpisodeStarted)) == 1
    assert log.turns[3].messages[-1]["content"] == "be brief please"


async def test_a_run_that_answers_an_earlier_one_is_said_to_be_apart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with recording(handing_off) as (server, recorder, log), caplog.at_level(logging.WARNING):
        workflow: Any = recorder.wrap(handoff(server.url))
        (request,) = (await workflow.run("go")).get_request_info_events()
        answer = request.data.create_response("be brief")
        await workflow.run(responses={request.request_id: answer})
    assert len(log.of(EpisodeStarted)) == 2
    assert "is an episode of its own; put runs that belong together" in caplog.text


def choosing(body: JsonDict) -> Reply | str:
    if body["model"] != "boss":
        return default_reply(body)
    turns = sum(1 for m in body["messages"] if m["role"] == "assistant") // 2
    name = ("planner", "coder")[turns % 2]
    return json.dumps({"terminate": turns == 2, "reason": "next", "next_speaker": name})


@pytest.mark.parametrize("stream", [False, True])
async def test_an_orchestrator_agent_selects(stream: bool) -> None:
    with recording(choosing) as (server, recorder, log):
        builder = GroupChatBuilder(
            participants=agents(server.url, "planner", "coder"),
            orchestrator_agent=agent("boss", server.url),
        )
        await events(recorder.wrap(builder.build()), "go", stream=stream)
    kinds = [(t.agent, t.kind) for t in log.turns]
    select = ("boss", "select")
    assert kinds == [select, ("planner", "act"), select, ("coder", "act"), select]
    chosen = [t.selected_by for t in log.turns if t.kind == "act"]
    assert chosen == [log.turns[0].turn_id, log.turns[2].turn_id]
    assert all(t.selected_by is None for t in log.turns if t.kind == "select")
    assert log.turns[1].turn_id in log.turns[3].depends_on
    assert _ends(log) == [("terminated", None)]


def managing(body: JsonDict) -> str:
    """A Magentic manager: facts, a plan, a ledger that sends the coder once, an answer."""
    text = str(body["messages"][-1]["content"])
    if body["model"] != "manager":
        return "the code is written by me"
    if "next_speaker" not in text:
        return f"some facts or a plan, number {len(text)}"
    done = any("the code is written by me" in str(m["content"]) for m in body["messages"])
    reasons: dict[str, Any] = {
        "is_request_satisfied": done,
        "is_in_loop": False,
        "is_progress_being_made": True,
        "next_speaker": "coder",
        "instruction_or_question": "write the code",
    }
    return json.dumps({k: {"reason": "so", "answer": v} for k, v in reasons.items()})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_magentic_manager_orchestrates(stream: bool) -> None:
    with recording(managing) as (server, recorder, log):
        builder = MagenticBuilder(
            participants=agents(server.url, "planner", "coder"),
            manager_agent=agent("manager", server.url),
        )
        await events(recorder.wrap(builder.build()), "go", stream=stream)
    kinds = {(t.agent, t.kind) for t in log.turns}
    assert kinds == {("manager", "orchestrate"), ("coder", "act")}
    acting = next(t for t in log.turns if t.agent == "coder")
    ledger = log.turns[log.turns.index(acting) - 1]
    assert acting.selected_by == ledger.turn_id and "next_speaker" in str(ledger.text)
    assert _ends(log) == [("terminated", None)]


class Editor(Executor):
    """An executor of the app's own that holds an agent, and a chat client."""

    def __init__(self, url: str) -> None:
        super().__init__(id="editor")
        self.helper = agent("helper", url)
        self.chat = client("editor", url)

    @handler
    async def edit(self, response: AgentExecutorResponse, ctx: WorkflowContext[str]) -> None:
        helped = await self.helper.run(response.agent_response.text)
        edited = await self.chat.get_response([Message("user", [helped.text])])
        await ctx.send_message(edited.text)


async def test_a_workflow_of_the_apps_own_executors() -> None:
    with recording() as (server, recorder, log):
        closing = agent("closing", server.url)

        @executor(id="finish")
        async def finish(text: str, ctx: WorkflowContext[Any, str]) -> None:
            await ctx.yield_output((await closing.run(text)).text)

        writer, editor = AgentExecutor(agent("writer", server.url)), Editor(server.url)
        builder = WorkflowBuilder(start_executor=writer, output_from="all")
        workflow = builder.add_edge(writer, editor).add_edge(editor, finish).build()
        request = AgentExecutorRequest([Message("user", ["go"])])
        await recorder.wrap(workflow).run(request)
    assert _who(log.turns) == ["writer", "helper", "editor", "closing"]
    assert [t.model for t in log.turns] == _who(log.turns)
    links = [t.depends_on for t in log.turns]
    assert links == [[], *([t.turn_id] for t in log.turns[:3])]


async def test_a_workflow_in_a_workflow() -> None:
    with recording(choosing) as (server, recorder, log):
        inner = sequential(server.url, "first", "second").as_agent(name="planner")
        builder = GroupChatBuilder(
            participants=[inner, agent("coder", server.url)],
            orchestrator_agent=agent("boss", server.url),
            max_rounds=2,
        )
        await recorder.wrap(builder.build()).run("go")
    assert _who(log.turns) == ["boss", "first", "second", "boss", "coder"]
    assert [t.selected_by for t in log.turns] == [
        None,
        log.turns[0].turn_id,
        None,
        None,
        log.turns[3].turn_id,
    ]
    assert len(log.of(EpisodeStarted)) == 1 and log.turns[2].turn_id in log.turns[4].depends_on


@pytest.mark.filterwarnings("ignore::FutureWarning")
async def test_a_workflow_that_is_a_function() -> None:
    """Experimental there: at first the decorator made the workflow, later a builder."""
    with recording() as (server, recorder, log):
        planner, coder = agents(server.url, "planner", "coder")

        @step
        async def plan(task: str) -> str:
            return (await planner.run(task)).text

        @workflow
        async def pipeline(task: str) -> str:
            return (await coder.run(await plan(task))).text

        made: Any = recorder.wrap(pipeline)
        await (made.build() if hasattr(made, "build") else made).run("go")
    assert _who(log.turns) == ["planner", "coder"]
    assert log.turns[1].depends_on == [log.turns[0].turn_id]
    assert len(log.of(EpisodeStarted)) == len(log.of(EpisodeEnded)) == 1


async def test_a_sub_workflow_is_an_executor() -> None:
    with recording() as (server, recorder, log):
        inner = WorkflowExecutor(sequential(server.url, "first", "second"), id="inner")
        workflow: Any = recorder.wrap(
            WorkflowBuilder(start_executor=inner, output_from="all").build()
        )
        await workflow.run([Message("user", ["go"])])
    assert _who(log.turns) == ["first", "second"]
    assert all(t.trainable for t in log.turns)


async def test_the_request_info_of_a_sequence_is_a_human_turn() -> None:
    with recording() as (server, recorder, log):
        builder = SequentialBuilder(participants=agents(server.url, "planner", "coder"))
        workflow: Any = recorder.wrap(builder.with_request_info(agents=["planner"]).build())
        with recorder.episode():
            (request,) = (await workflow.run("go")).get_request_info_events()
            answer = AgentRequestInfoResponse.from_strings(["make it shorter"])
            result = await workflow.run(responses={request.request_id: answer})
            (request,) = result.get_request_info_events()
            yes = AgentRequestInfoResponse.approve()
            await workflow.run(responses={request.request_id: yes})
    assert _who(log.turns) == ["planner", "planner", "coder"]
    assert [h.text for h in log.of(HumanEvent)] == ["make it shorter", ""]
    assert [t.step for t in log.turns] == [0, 1, 2]


async def test_a_second_run_of_a_built_workflow_reads_old_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with recording() as (server, recorder, log), caplog.at_level(logging.WARNING):
        workflow = recorder.wrap(group_chat(server.url, rounds=2))
        await workflow.run("one")
        assert "were not said in this episode" not in caplog.text
        await workflow.run("two")
        await workflow.run("three")
    said = [r for r in caplog.records if "were not said in this episode" in r.getMessage()]
    assert [r.getMessage().split("'")[1] for r in said] == ["planner", "coder"]
    assert len(log.of(EpisodeStarted)) == 3


@pytest.mark.parametrize("end", ["auto", "terminated"])
async def test_a_limit_of_rounds_truncates(end: str) -> None:
    with recording() as (server, recorder, log):
        await recorder.wrap(group_chat(server.url, rounds=2), end=end).run("go")
    words = "The group chat has reached the maximum number of rounds."
    assert _ends(log) == [("truncated" if end == "auto" else "terminated", words)]


async def test_a_run_goes_on_from_a_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    with recording() as (server, recorder, log), caplog.at_level(logging.WARNING):
        storage = InMemoryCheckpointStorage()
        members = agents(server.url, "planner", "coder")
        builder = GroupChatBuilder(
            participants=members, selection_func=by_turns, max_rounds=2, checkpoint_storage=storage
        )
        workflow = recorder.wrap(builder.build())
        await workflow.run("go")
        saved = await storage.list_checkpoints(workflow_name=workflow.name)
        assert recorder.flush()
        turns = len(log.turns)
        await workflow.run(checkpoint_id=sorted(saved, key=lambda c: c.timestamp)[1].checkpoint_id)
    assert turns == 2 and len(log.turns) > turns
    assert len(log.of(EpisodeStarted)) == 2 and "goes on from a checkpoint" in caplog.text


async def test_a_human_approves_a_call_inside_a_workflow() -> None:
    @tool(approval_mode="always_require")
    def delete(name: str) -> str:
        """Delete a file."""
        return f"{name} is gone"

    script = {"planner": [Reply(None, [("delete", {"name": "x"})]), "deleted"], "coder": "ok"}
    with recording(script) as (server, recorder, log):
        planner = agent("planner", server.url, tools=[delete])
        builder = SequentialBuilder(participants=[planner, agent("coder", server.url)])
        workflow: Any = recorder.wrap(builder.build())
        with recorder.episode():
            (request,) = (await workflow.run("go")).get_request_info_events()
            yes = request.data.to_function_approval_response(approved=True)
            await workflow.run(responses={request.request_id: yes})
    assert [h.text for h in log.of(HumanEvent)] == ["approved delete"]
    assert [(t.name, t.result) for t in log.of(ToolEvent)] == [("delete", "x is gone")]
    assert [(t.agent, t.step) for t in log.turns] == [("planner", 0), ("planner", 1), ("coder", 1)]


class Echo(Executor):
    """Sends everything back to itself, without a model."""

    @handler
    async def again(self, text: str, ctx: WorkflowContext[str, str]) -> None:
        await ctx.send_message(text)


async def test_too_many_supersteps_truncate_and_no_model_call_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, two = Echo(id="one"), Echo(id="two")
    builder = WorkflowBuilder(start_executor=one, max_iterations=3, output_from="all")
    workflow = builder.add_edge(one, two).add_edge(two, one).build()
    with recording() as (_, recorder, log), caplog.at_level(logging.WARNING):
        recorder.wrap(workflow)
        with pytest.raises(Exception, match="did not converge"):
            await workflow.run("go")
    ((reason, detail),) = _ends(log)
    assert reason == "truncated" and "did not converge" in str(detail)
    assert "no model call was recorded" in caplog.text
