"""Inside a reply: tools, agents behind tools, structured output, summaries, approvals, caches."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from agent_framework import (
    ChatContext,
    ChatMiddleware,
    ChatResponse,
    Content,
    ContextProvider,
    Message,
    SummarizationStrategy,
    chat_middleware,
    tool,
)
from agent_framework.openai import OpenAIChatCompletionClient
from agent_framework.orchestrations import SequentialBuilder
from pydantic import BaseModel

from marft_agents.schema import EpisodeStarted, HumanEvent, ToolEvent
from marft_agents.testing import Reply
from tests.recording.kit import recording
from tests.runtimes.agent_framework.kit import agent, client, events, sequential


@tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@tool
def divide(a: int, b: int) -> str:
    """Divide two numbers."""
    return str(a // b)


@tool(approval_mode="always_require")
def delete(name: str) -> str:
    """Delete a file."""
    return f"{name} is gone"


CALL_ADD = Reply(None, [("add", {"a": 1, "b": 2})])


async def ask(asked: Any, task: Any, *, stream: bool = False, **options: Any) -> Any:
    if not stream:
        return await asked.run(task, **options)
    return await asked.run(task, stream=True, **options).get_final_response()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_the_environment(stream: bool) -> None:
    script = {"planner": [CALL_ADD, "the sum is three"], "coder": "I agree with that"}
    with recording(script) as (server, recorder, log):
        members = [agent("planner", server.url, tools=[add]), agent("coder", server.url)]
        workflow = recorder.wrap(SequentialBuilder(participants=members).build())
        await events(workflow, "add", stream=stream)
    call, answer, coder = log.turns
    (done,) = log.of(ToolEvent)
    assert (done.name, done.agent, done.result, done.ok) == ("add", "planner", "3", True)
    assert json.loads(done.arguments) == {"a": 1, "b": 2} and done.index == 1
    assert call.tool_calls is not None and call.tool_calls[0]["id"] == done.call_id
    assert (call.step, answer.step, coder.step) == (0, 1, 1)
    assert answer.depends_on == [call.turn_id] and answer.turn_id in coder.depends_on
    assert all(t.kind == "act" and t.trainable for t in log.turns)


async def test_tools_of_earlier_episodes_are_not_recorded_again() -> None:
    script = {"planner": [CALL_ADD, "three", "three again"]}
    with recording(script) as (server, recorder, log):
        planner = recorder.wrap(agent("planner", server.url, tools=[add]))
        session = planner.create_session()
        await ask(planner, "add", session=session)
        await ask(planner, "what was it?", session=session)
    assert any(m["role"] == "tool" for m in log.turns[2].messages)
    assert len(log.of(ToolEvent)) == 1 and log.turns[2].step == 0


async def test_a_tool_that_fails_and_two_at_once() -> None:
    both = Reply(None, [("divide", {"a": 1, "b": 0}), ("add", {"a": 1, "b": 2})])
    with recording({"planner": [both, "oh"]}) as (server, recorder, log):
        planner = recorder.wrap(agent("planner", server.url, tools=[add, divide]))
        await ask(planner, "go")
    assert [(t.name, t.ok) for t in log.of(ToolEvent)] == [("divide", False), ("add", True)]
    assert [t.step for t in log.turns] == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_behind_a_tool_speaks_for_its_caller(stream: bool) -> None:
    script = {
        "planner": [Reply(None, [("writer", {"task": "write"})]), "here is the poem"],
        "writer": [CALL_ADD, "a poem about the sea"],
    }
    with recording(script) as (server, recorder, log):
        writer = agent("writer", server.url, tools=[add])
        planner = recorder.wrap(agent("planner", server.url, tools=[writer.as_tool()]))
        await ask(planner, "go", stream=stream)
    call, inner, inner_answer, answer = log.turns
    assert [t.agent for t in log.turns] == ["planner", "writer", "writer", "planner"]
    assert len(log.of(EpisodeStarted)) == 1
    assert [(t.name, t.agent) for t in log.of(ToolEvent)] == [
        ("add", "writer"),
        ("writer", "planner"),
    ]
    assert [t.step for t in log.turns] == [0, 0, 1, 1]
    assert answer.depends_on == [call.turn_id, inner_answer.turn_id]
    for turn in (inner, inner_answer):
        assert (turn.parent_agent, turn.parent_turn) == ("planner", call.turn_id)
    assert (call.parent_agent, answer.parent_agent) == (None, None)


async def test_a_workflow_inside_a_tool_joins_the_run() -> None:
    script = {
        "boss": [Reply(None, [("consult", {"question": "how"})]), "so be it"],
        "planner": "consulted and planned",
        "coder": "consulted and coded",
    }
    with recording(script) as (server, recorder, log):
        experts = sequential(server.url)

        async def consult(question: str) -> str:
            """Ask the experts."""
            return str((await experts.run(question)).get_outputs()[-1].text)

        boss = recorder.wrap(agent("boss", server.url, tools=[consult]))
        await ask(boss, "go")
    assert [t.agent for t in log.turns] == ["boss", "planner", "coder", "boss"]
    assert len(log.of(EpisodeStarted)) == 1
    assert {t.parent_agent for t in log.turns[1:3]} == {"boss"}
    assert {t.parent_turn for t in log.turns[1:3]} == {log.turns[0].turn_id}


async def test_an_episode_inside_a_tool_has_no_part_in_the_outer_one() -> None:
    """Of the same recorder or of another: the caller's turn is in neither."""
    script = {
        "boss": [Reply(None, [("consult", {"question": "how"})]), "so be it"],
        "planner": "planned",
        "coder": "coded",
    }
    with recording(script) as (server, recorder, log), recording() as (_, other, apart):
        planner, coder = agent("planner", server.url), agent("coder", server.url)
        other.wrap(coder)
        reply = coder.client.get_response

        async def consult(question: str) -> str:
            """Ask the experts."""
            with recorder.episode():
                await planner.run(question)
            return (await reply([Message("user", [question])])).text

        await ask(recorder.wrap(agent("boss", server.url, tools=[consult])), "go")
    assert [(t.agent, t.parent_agent) for t in log.turns] == [
        ("boss", None),
        ("planner", None),
        ("boss", None),
    ]
    assert len({t.episode_id for t in log.turns}) == 2 and not apart.turns


class Answer(BaseModel):
    x: int


@pytest.mark.parametrize("stream", [False, True])
async def test_structured_output(stream: bool) -> None:
    with recording({"planner": '{"x": 3}'}) as (server, recorder, log):
        planner = recorder.wrap(agent("planner", server.url))
        response = await ask(planner, "go", stream=stream, options={"response_format": Answer})
    assert response.value == Answer(x=3)
    (turn,) = log.turns
    assert turn.token_ids and turn.sampling.grammar and turn.text == '{"x": 3}'


async def test_a_summary_is_of_the_agent_that_needs_it() -> None:
    with recording() as (server, recorder, log):
        shorten: Any = SummarizationStrategy(
            client=client("short", server.url), target_count=1, threshold=0
        )
        for name in ("planner", "coder"):  # they share it
            speaker = recorder.wrap(agent(name, server.url, compaction_strategy=shorten))
            session = speaker.create_session()
            with recorder.episode():
                await ask(speaker, "hello", session=session)
                await ask(speaker, "and now?", session=session)
    for name in ("planner", "coder"):
        kinds = [(t.kind, t.model) for t in log.turns if t.agent == name]
        assert sorted(set(kinds)) == [("act", name), ("summary", "short")]
        assert kinds.count(("act", name)) == 2
    assert all(t.parent_agent is None for t in log.turns)


async def test_a_human_approves_a_tool_call() -> None:
    script = {"planner": [Reply(None, [("delete", {"name": "x"})]), "deleted"]}
    with recording(script) as (server, recorder, log):
        planner = recorder.wrap(agent("planner", server.url, tools=[delete]))
        session = planner.create_session()
        with recorder.episode():
            first = await ask(planner, "delete x", session=session)
            (request,) = first.user_input_requests
            yes = request.to_function_approval_response(approved=True)
            await ask(planner, Message("user", [yes]), session=session)
    assert [h.text for h in log.of(HumanEvent)] == ["approved delete"]
    assert [(t.name, t.result) for t in log.of(ToolEvent)] == [("delete", "x is gone")]
    assert [t.step for t in log.turns] == [0, 1]


async def test_a_reply_of_a_middleware_is_no_sample(caplog: pytest.LogCaptureFixture) -> None:
    @chat_middleware
    async def cache(context: ChatContext, call_next: Any) -> None:
        context.result = ChatResponse(messages=[Message("assistant", ["from the cache"])])

    with recording() as (server, recorder, log), caplog.at_level(logging.WARNING):
        planner = recorder.wrap(agent("planner", server.url, middleware=[cache]))
        assert (await ask(planner, "go")).text == "from the cache"
    (turn,) = log.turns
    assert turn.cached and turn.text == "from the cache" and not turn.trainable
    assert turn.messages[-1] == {"role": "user", "content": "go"} and not server.requests
    assert "answered by a middleware" in caplog.text


async def test_a_middleware_that_asks_again_makes_two_turns() -> None:
    @chat_middleware
    async def twice(context: ChatContext, call_next: Any) -> None:
        await call_next()
        await call_next()

    with recording({"planner": ["first try", "second try"]}) as (server, recorder, log):
        planner = recorder.wrap(agent("planner", server.url, middleware=[twice]))
        assert (await ask(planner, "go")).text == "second try"
    assert [t.text for t in log.turns] == ["first try", "second try"]
    assert all(t.trainable for t in log.turns)


async def test_pictures_and_other_contents_pass() -> None:
    with recording() as (server, recorder, log):
        planner = recorder.wrap(agent("planner", server.url))
        picture = Content.from_uri("data:image/png;base64,iVBORw0KGgo=", media_type="image/png")
        await ask(planner, Message("user", ["what is this?", picture]))
    assert log.turns[0].token_ids and "iVBORw0KGgo" not in json.dumps(log.turns[0].messages)


async def test_a_structured_output_that_fails_keeps_its_tokens() -> None:
    with recording({"planner": "no JSON"}) as (server, recorder, log):
        planner = recorder.wrap(agent("planner", server.url))
        options: Any = {"response_format": Answer}
        with pytest.raises(Exception, match=r"JSON|json"):
            print((await ask(planner, "go", stream=True, options=options)).value)
    (turn,) = log.turns
    assert turn.token_ids and turn.text == "no JSON" and turn.error is None


class Unfinished(OpenAIChatCompletionClient):
    """Fails at making a response of what it has streamed."""

    def _finalize_response_updates(self, *args: Any, **options: Any) -> Any:
        raise ValueError("not what I wanted")


async def test_a_stream_that_was_read_is_a_whole_turn_whatever_is_made_of_it() -> None:
    with recording({"planner": "all of it"}) as (server, recorder, log):
        chat = Unfinished(model="planner", base_url=server.url, api_key="sk-test")
        planner = recorder.wrap(agent("planner", server.url, client=chat))
        with pytest.raises(ValueError, match="not what I wanted"):
            await ask(planner, "go", stream=True)
    (turn,) = log.turns
    assert turn.trainable and turn.text == "all of it"


class Memory(ContextProvider):
    """Asks a model what to keep."""

    def __init__(self, url: str) -> None:
        super().__init__("memory")
        self.chat = client("memory", url)

    async def after_run(self, **given: Any) -> None:
        await self.chat.get_response([Message("user", ["what is worth keeping?"])])


class Guard(ChatMiddleware):
    """Asks a model whether to let a prompt through."""

    def __init__(self, url: str) -> None:
        self.chat = client("guard", url)

    async def process(self, context: ChatContext, call_next: Any) -> None:
        await self.chat.get_response([Message("user", ["is this fine?"])])
        await call_next()


@pytest.mark.parametrize("stream", [False, True])
async def test_what_stands_around_an_agent_has_kinds_of_its_own(stream: bool) -> None:
    with recording() as (server, recorder, log):
        around: Any = {
            "context_providers": [Memory(server.url)],
            "middleware": [Guard(server.url)],
        }
        await ask(recorder.wrap(agent("planner", server.url, **around)), "go", stream=stream)
    kinds = [(t.agent, t.kind, t.model) for t in log.turns]
    assert kinds == [
        ("planner", "guard", "guard"),
        ("planner", "act", "planner"),
        ("planner", "reflect", "memory"),
    ]


async def test_a_client_that_the_app_puts_in_later_is_found_at_the_next_run() -> None:
    with recording() as (server, recorder, log):
        planner: Any = recorder.wrap(agent("planner", server.url))
        await planner.run("x")
        mine = planner.client = client("planner", server.url)
        await planner.run("y")
    assert [t.trainable for t in log.turns] == [True, True]
    assert planner.client is mine
