"""Inside AutoGen runs: tools, code, humans, structured output, agents of a user's own."""

from __future__ import annotations

from typing import Any

import pytest
from autogen_agentchat.agents import CodeExecutorAgent, UserProxyAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import CancellationToken
from autogen_core.code_executor import CodeBlock, CodeExecutor, CodeResult
from pydantic import BaseModel

from marft_agents.schema import HumanEvent, ToolEvent
from marft_agents.testing import Reply
from tests.integrations.autogen_kit import (
    Custom,
    agent,
    known,
    maybe,
    model,
    needs,
    said,
    takes,
    team,
    texts,
)
from tests.recording.kit import recording

ApprovalResponse = maybe("agents", "ApprovalResponse")
StructuredMessage = maybe("messages", "StructuredMessage")


class Answer(BaseModel):
    x: int


async def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def _team(*members: Any, turns: int) -> RoundRobinGroupChat:
    answers = [StructuredMessage[Answer]] if StructuredMessage else []
    options = known(RoundRobinGroupChat, custom_message_types=answers)
    return team(*members, turns=turns, **options)


CALL_ADD = Reply(None, [("add", {"a": 1, "b": 2})])


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_with_reflection(stream: bool) -> None:
    script = {"planner": [CALL_ADD, "the sum is three"], "coder": "I agree with that"}
    with recording(script) as (server, recorder, log):
        planner = agent("planner", server.url, stream=stream, tools=[add], reflect_on_tool_use=True)
        pair = recorder.wrap(_team(planner, agent("coder", server.url, stream=stream), turns=2))
        result = await pair.run(task="add")
    assert texts(result.messages) == ["add", "the sum is three", "I agree with that"]
    call, reflection, coder = log.turns
    (tool,) = log.of(ToolEvent)
    assert (tool.name, tool.agent, tool.result, tool.ok) == ("add", "planner", "3", True)
    assert tool.arguments == '{"a": 1, "b": 2}' and tool.index == 1
    assert call.tool_calls is not None and call.tool_calls[0]["id"] == tool.call_id
    assert (call.step, reflection.step, coder.step) == (0, 1, 1)
    assert reflection.depends_on == [call.turn_id] and coder.depends_on == [reflection.turn_id]
    assert [t.kind for t in log.turns] == ["act", "reflect", "act"]
    assert all(t.complete and t.token_ids for t in log.turns)


async def test_tools_without_reflection_link_their_summary() -> None:
    with recording({"planner": CALL_ADD, "coder": "I see a three"}) as (server, recorder, log):
        planner, coder = agent("planner", server.url, tools=[add]), agent("coder", server.url)
        await recorder.wrap(_team(planner, coder, turns=2)).run(task="add")
    call, answer = log.turns
    assert answer.messages[-1]["content"] == "3"
    assert answer.depends_on == [call.turn_id] and answer.step == 1


async def test_a_human_in_the_team_is_the_environment() -> None:
    with recording({"planner": "what shall I do", "coder": "ok"}) as (server, recorder, log):
        human = UserProxyAgent("human", input_func=lambda prompt: "be brief please")
        planner, coder = agent("planner", server.url), agent("coder", server.url)
        await recorder.wrap(_team(planner, human, coder, turns=3)).run(task="go")
    (said_by_human,) = log.of(HumanEvent)
    assert (said_by_human.name, said_by_human.text) == ("human", "be brief please")
    assert [(t.agent, t.step) for t in log.turns] == [("planner", 0), ("coder", 1)]
    assert log.turns[1].messages[-1]["name"] == "human"


class Executor(CodeExecutor):
    """Runs nothing; the ``results`` come first."""

    def __init__(self, *results: CodeResult) -> None:
        self._results = list(results)

    async def execute_code_blocks(
        self, code_blocks: list[CodeBlock], cancellation_token: CancellationToken
    ) -> CodeResult:
        return self._results.pop(0) if self._results else CodeResult(exit_code=0, output="42")

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def restart(self) -> None: ...


def _runner(url: str, *, own_model: bool, **options: Any) -> CodeExecutorAgent:
    if ApprovalResponse is not None:
        options.setdefault("approval_func", _approve)
    if own_model:
        options["model_client"] = model("runner", url)
    return CodeExecutorAgent("runner", Executor(), **options)


def _approve(request: Any) -> Any:
    return ApprovalResponse(approved=True, reason="a test")


OWN_MODEL = needs(takes(CodeExecutorAgent, "model_client"), "code executors with a model")
CODE = "```python\nprint(6 * 7)\n```"


@pytest.mark.parametrize("own_model", [False, pytest.param(True, marks=OWN_MODEL)])
async def test_code_execution_is_the_environment(own_model: bool) -> None:
    script = {"planner": CODE, "runner": [CODE, "the answer is 42"], "coder": "so it is 42"}
    with recording(script) as (server, recorder, log):
        runner = _runner(server.url, own_model=own_model)
        group = _team(agent("planner", server.url), runner, agent("coder", server.url), turns=3)
        await recorder.wrap(group).run(task="go")
    (tool,) = log.of(ToolEvent)
    assert (tool.name, tool.agent, tool.result, tool.ok) == ("code_execution", "runner", "42", True)
    assert tool.arguments == [{"language": "python", "code": "print(6 * 7)\n"}]
    assert log.turns[0].step == 0 and log.turns[-1].step == 1
    kinds = [(t.agent, t.kind) for t in log.turns]
    own = [("runner", "act"), ("runner", "reflect")] if own_model else []
    assert kinds == [("planner", "act"), *own, ("coder", "act")]


@OWN_MODEL
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # AutoGen's own
async def test_code_that_fails_is_tried_again() -> None:
    """Whether to try again is asked under a grammar, as AutoGen asks it, and is no action."""
    retry = '{"reason": "a typo", "retry": true}'
    script = {"runner": [f"first {CODE}", retry, f"second {CODE}", "the answer is 42"]}
    with recording(script) as (server, recorder, log):
        runner = _runner(server.url, own_model=True, max_retries_on_error=1)
        executor = Executor(CodeResult(exit_code=1, output="a typo"))
        vars(runner)["_code_executor"] = executor
        await recorder.wrap(runner).run(task="go")
    assert [t.kind for t in log.turns] == ["act", "reflect", "act", "reflect"]
    assert [t.ok for t in log.of(ToolEvent)] == [False, True]
    assert [t.step for t in log.turns] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("text", "result", "ok"),
    [(CODE, CodeResult(exit_code=3, output="no"), False), ("no code at all", None, False)],
)
async def test_code_that_did_not_run_well_is_no_success(
    text: str, result: CodeResult | None, ok: bool
) -> None:
    with recording({"planner": text}) as (server, recorder, log):
        runner = _runner(server.url, own_model=False)
        vars(runner)["_code_executor"] = Executor(*([result] if result else []))
        await recorder.wrap(_team(agent("planner", server.url), runner, turns=2)).run(task="go")
    (tool,) = log.of(ToolEvent)
    assert tool.ok is ok and (tool.arguments is None) is (result is None)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # AutoGen's own
@needs(StructuredMessage, "structured messages")
async def test_structured_output_is_sampled_under_a_grammar() -> None:
    script = {"planner": '{"x": 1}', "coder": "one"}
    with recording(script) as (server, recorder, log):
        planner = agent("planner", server.url, output_content_type=Answer)
        await recorder.wrap(_team(planner, agent("coder", server.url), turns=2)).run(task="go")
    first, second = log.turns
    assert first.sampling.grammar and not first.trainable
    assert second.depends_on == [first.turn_id] and second.trainable


async def test_an_agent_of_the_users_own() -> None:
    with recording({"custom": "mine is this", "coder": "ok"}) as (server, recorder, log):
        client = model("custom", server.url)
        custom = Custom("custom", my_client=client, llm=client)
        await recorder.wrap(_team(custom, agent("coder", server.url), turns=2)).run(task="go")
        await recorder.wrap(Custom("custom", llm=client)).run(task="alone")
    first, second, alone = log.turns
    assert (first.agent, alone.agent) == ("custom", "custom")
    assert second.depends_on == [first.turn_id]


async def test_an_sdk_client_used_inside_a_tool_belongs_to_the_run() -> None:
    from tests.recording.kit import HELLO, async_sdk

    script = {"planner": Reply(None, [("look_up", {})]), "helper": "found it"}
    with recording(script) as (server, recorder, log):
        async with async_sdk(server) as client:
            recorder.attach_client(client, "helper")

            async def look_up() -> str:
                """Look it up."""
                reply = await client.chat.completions.create(model="helper", messages=HELLO)
                return str(reply.choices[0].message.content)

            planner = recorder.wrap(agent("planner", server.url, tools=[look_up]))
            result = await planner.run(task="go")
    assert said(result)[-2][2] == "found it"
    assert [t.agent for t in log.turns] == ["planner", "helper"]
    assert len({t.episode_id for t in log.turns}) == 1


async def test_an_earlier_episode_is_no_dependency() -> None:
    with recording({"planner": "always the same words"}) as (server, recorder, log):
        planner = recorder.wrap(agent("planner", server.url))
        await planner.run(task="one")
        await planner.run(task="two")
    assert [m["role"] for m in log.turns[1].messages] == ["system", "user", "assistant", "user"]
    assert log.turns[1].depends_on == []
