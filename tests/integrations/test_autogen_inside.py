"""Inside AutoGen runs: tools, handoffs, nested teams, humans, caches and other clients."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from autogen_agentchat.agents import (
    AssistantAgent,
    BaseChatAgent,
    CodeExecutorAgent,
    MessageFilterAgent,
    SocietyOfMindAgent,
    UserProxyAgent,
)
from autogen_agentchat.agents._message_filter_agent import MessageFilterConfig
from autogen_agentchat.base import ChatAgent, Response, Team
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import StructuredMessage, TextMessage
from autogen_agentchat.teams import (
    DiGraphBuilder,
    GraphFlow,
    MagenticOneGroupChat,
    RoundRobinGroupChat,
    Swarm,
)
from autogen_agentchat.tools import AgentTool
from autogen_core import CancellationToken, InMemoryStore
from autogen_core.code_executor import CodeBlock, CodeExecutor, CodeResult
from autogen_core.models import CreateResult
from autogen_ext.models.cache import ChatCompletionCache
from autogen_ext.models.replay import ReplayChatCompletionClient
from pydantic import BaseModel

from marft_agents.schema import EpisodeEnded, EpisodeStarted, HumanEvent, ToolEvent
from marft_agents.testing import Reply
from tests.integrations.autogen_kit import INFO, agent, model, round_robin, said, texts
from tests.recording.kit import recording


class Answer(BaseModel):
    x: int


async def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def _team(*members: ChatAgent | Team, turns: int) -> RoundRobinGroupChat:
    return RoundRobinGroupChat(
        list(members), max_turns=turns, custom_message_types=[StructuredMessage[Answer]]
    )


CALL_ADD = Reply(None, [("add", {"a": 1, "b": 2})])


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_with_reflection(stream: bool) -> None:
    script = {"planner": [CALL_ADD, "the sum is three"], "coder": "I agree with that"}
    with recording(script) as (server, recorder, log):
        planner = agent("planner", server.url, stream=stream, tools=[add], reflect_on_tool_use=True)
        team = recorder.wrap(_team(planner, agent("coder", server.url, stream=stream), turns=2))
        result = await team.run(task="add")
    assert texts(result.messages) == ["add", "the sum is three", "I agree with that"]
    call, reflection, coder = log.turns
    (tool,) = log.of(ToolEvent)
    assert (tool.name, tool.agent, tool.result, tool.ok) == ("add", "planner", "3", True)
    assert tool.arguments == '{"a": 1, "b": 2}' and tool.index == 1
    assert call.tool_calls is not None and call.tool_calls[0]["id"] == tool.call_id
    assert (call.step, reflection.step, coder.step) == (0, 1, 1)
    assert reflection.depends_on == [call.turn_id] and coder.depends_on == [reflection.turn_id]
    assert all(t.kind == "act" and t.trainable for t in log.turns)


async def test_tools_without_reflection_link_their_summary() -> None:
    with recording({"planner": CALL_ADD, "coder": "I see a three"}) as (server, recorder, log):
        team = _team(agent("planner", server.url, tools=[add]), agent("coder", server.url), turns=2)
        await recorder.wrap(team).run(task="add")
    call, coder = log.turns
    assert coder.messages[-1]["content"] == "3"
    assert coder.depends_on == [call.turn_id] and coder.step == 1


async def test_a_handoff_is_a_tool_call_but_no_environment() -> None:
    script = {
        "planner": Reply(None, [("transfer_to_coder", {})]),
        "coder": Reply(None, [("transfer_to_planner", {})]),
    }
    with recording(script) as (server, recorder, log):
        members: list[ChatAgent | Team] = [
            agent("planner", server.url, handoffs=["coder"]),
            agent("coder", server.url, handoffs=["planner"]),
        ]
        team = Swarm(members, termination_condition=MaxMessageTermination(8))  # pyright: ignore[reportArgumentType] list of a union
        await recorder.wrap(team).run(task="go")
    assert [t.agent for t in log.turns[:2]] == ["planner", "coder"]
    assert [t.step for t in log.turns] == [0] * len(log.turns)
    assert log.of(ToolEvent)[0].name == "transfer_to_coder"
    assert log.turns[1].depends_on == [log.turns[0].turn_id]


async def test_an_agent_behind_a_tool_is_itself_and_no_environment() -> None:
    script = {
        "planner": [Reply(None, [("writer", {"task": "write"})]), "here is the poem"],
        "writer": "a poem about the sea",
    }
    with recording(script) as (server, recorder, log):
        client = model("planner", server.url, parallel_tool_calls=False)
        tools: list[Any] = [AgentTool(agent("writer", server.url))]
        planner = AssistantAgent("planner", client, tools=tools, reflect_on_tool_use=True)
        await recorder.wrap(planner).run(task="go")
    call, inner, reflection = log.turns
    assert [t.agent for t in log.turns] == ["planner", "writer", "planner"]
    assert len(log.of(EpisodeStarted)) == 1
    assert [t.step for t in log.turns] == [0, 0, 0]
    assert reflection.depends_on == [call.turn_id, inner.turn_id]
    assert [t.name for t in log.of(ToolEvent)] == ["writer"]


async def test_a_society_of_mind() -> None:
    script = {"planner": "an inner plan", "coder": "an inner code", "som": "the summary of both"}
    with recording(script) as (server, recorder, log):
        inner = round_robin(server.url, turns=3)
        som = SocietyOfMindAgent("som", inner, model("som", server.url))
        team = recorder.wrap(_team(som, turns=1))
        await team.run(task="go")
    assert [t.agent for t in log.turns] == ["planner", "coder", "som"]
    planner, coder, summary = log.turns
    assert summary.depends_on == [planner.turn_id, coder.turn_id]
    assert len(log.of(EpisodeStarted)) == len(log.of(EpisodeEnded)) == 1


async def test_an_inner_team_that_was_wrapped_itself_joins_the_outer_run() -> None:
    with recording() as (server, recorder, log):
        inner = recorder.wrap(round_robin(server.url, turns=2))
        team = recorder.wrap(_team(inner, agent("critic", server.url), turns=2))
        await team.run(task="go")
        await inner.reset()
        await inner.run(task="alone")
    started = log.of(EpisodeStarted)
    assert [e.task for e in started] == ["go", "alone"]
    assert {t.agent for t in log.turns if t.episode_id == started[0].episode_id} == {
        "planner",
        "critic",
    }


async def test_a_wrapped_team_inside_a_tool_joins_the_run() -> None:
    script = {
        "boss": Reply(None, [("consult", {"question": "how"})]),
        "planner": "consulted and planned",
    }
    with recording(script) as (server, recorder, log):
        experts = recorder.wrap(_team(agent("planner", server.url), turns=1))

        async def consult(question: str) -> str:
            """Ask the experts."""
            return texts((await experts.run(task=question)).messages)[-1]

        await recorder.wrap(agent("boss", server.url, tools=[consult])).run(task="go")
    assert [t.agent for t in log.turns] == ["boss", "planner"]
    assert len(log.of(EpisodeStarted)) == 1


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
    """Runs nothing."""

    def __init__(self) -> None: ...

    async def execute_code_blocks(
        self, code_blocks: list[CodeBlock], cancellation_token: CancellationToken
    ) -> CodeResult:
        return CodeResult(exit_code=0, output="42")

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def restart(self) -> None: ...


@pytest.mark.parametrize("own_model", [False, True])
async def test_code_execution_is_the_environment(own_model: bool) -> None:
    code = "```python\nprint(6 * 7)\n```"
    script = {"planner": code, "runner": [code, "the answer is 42"], "coder": "so it is 42"}
    with recording(script) as (server, recorder, log):
        client = model("runner", server.url) if own_model else None
        runner = CodeExecutorAgent(
            "runner", Executor(), model_client=client, approval_func=_approve
        )
        team = _team(agent("planner", server.url), runner, agent("coder", server.url), turns=3)
        await recorder.wrap(team).run(task="go")
    (tool,) = log.of(ToolEvent)
    assert (tool.name, tool.agent, tool.result) == ("code_execution", "runner", "42")
    assert log.turns[0].step == 0 and log.turns[-1].step == 1


def _approve(request: Any) -> Any:
    from autogen_agentchat.agents import ApprovalResponse

    return ApprovalResponse(approved=True, reason="a test")


@pytest.mark.parametrize("stream", [False, True])
async def test_case_04_a_cached_reply_is_marked_said_and_has_no_ids(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 04: no HTTP call happened, and after a swap the cache would go on answering so."""
    with (
        caplog.at_level(logging.WARNING, "marft_agents"),
        recording(["fresh"]) as (server, recorder, log),
    ):
        store: Any = InMemoryStore()
        for number in range(3):
            client = ChatCompletionCache(model("planner", server.url), store)
            planner = AssistantAgent("planner", client, model_client_stream=stream)
            result = await recorder.wrap(planner).run(task="same")
            assert texts(result.messages)[-1] == "fresh"
            assert len(caplog.records) == min(number, 1), "said once, at the first cached reply"
    fresh, cached, _ = log.turns
    assert "'planner' was answered from a cache" in caplog.text
    assert "after a swap" in caplog.text
    assert (fresh.cached, fresh.trainable) == (False, True)
    assert (cached.cached, cached.text) == (True, "fresh")
    assert cached.token_ids is None and cached.response_id is None
    assert [m["role"] for m in cached.messages] == ["system", "user"]
    assert len(server.requests) == 1


async def test_a_client_that_is_not_captured_is_said_and_untrainable(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with recording() as (_, recorder, log):
        client = ReplayChatCompletionClient(["one thing", "another"], model_info=INFO)
        client.set_cached_bool_value(False)
        members = [AssistantAgent(n, client) for n in ("planner", "coder")]
        with caplog.at_level(logging.WARNING, "marft_agents"):
            await recorder.wrap(_team(*members, turns=2)).run(task="go")
    first, second = log.turns
    assert (first.text, first.cached, first.trainable) == ("one thing", False, False)
    assert second.depends_on == [first.turn_id]
    assert caplog.text.count("cannot be trained on") == 1


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # AutoGen's own
async def test_structured_output_is_sampled_under_a_grammar() -> None:
    script = {"planner": '{"x": 1}', "coder": "one"}
    with recording(script) as (server, recorder, log):
        planner = agent("planner", server.url, output_content_type=Answer)
        team = _team(planner, agent("coder", server.url), turns=2)
        await recorder.wrap(team).run(task="go")
    first, second = log.turns
    assert first.sampling.grammar and not first.trainable
    assert second.depends_on == [first.turn_id] and second.trainable


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # AutoGen's own
async def test_an_orchestrator_plans_and_is_no_agent() -> None:
    ledger = (
        '{"is_request_satisfied": {"answer": %s, "reason": "r"},'
        ' "is_in_loop": {"answer": false, "reason": "r"},'
        ' "is_progress_being_made": {"answer": true, "reason": "r"},'
        ' "next_speaker": {"answer": "planner", "reason": "r"},'
        ' "instruction_or_question": {"answer": "plan it now", "reason": "r"}}'
    )
    boss = ["facts", "plan", ledger % "false", ledger % "true", "final"]
    with recording({"boss": boss, "planner": "planned"}) as (server, recorder, log):
        members: list[ChatAgent] = [agent("planner", server.url)]
        team = recorder.wrap(MagenticOneGroupChat(members, model("boss", server.url)))
        await team.run(task="go")
    kinds = [t.kind for t in log.turns]
    assert kinds == ["orchestrate"] * 3 + ["act"] + ["orchestrate"] * 2


async def test_a_filtered_agent_is_recorded_under_its_own_name() -> None:
    with recording() as (server, recorder, log):
        inner = agent("planner", server.url)
        filtered = MessageFilterAgent("outer", inner, MessageFilterConfig(per_source=[]))
        await recorder.wrap(filtered).run(task="go")
    assert [t.agent for t in log.turns] == ["planner"]


class Custom(BaseChatAgent):
    """An agent of the user's own: another attribute name, and no streaming."""

    def __init__(self, url: str) -> None:
        super().__init__("custom", "mine")
        self._llm = model("custom", url)

    @property
    def produced_message_types(self) -> Any:
        return (TextMessage,)

    async def on_messages(self, messages: Any, cancellation_token: Any) -> Response:
        asked = [m.to_model_message() for m in messages]
        result: CreateResult = await self._llm.create(asked)
        return Response(chat_message=TextMessage(content=str(result.content), source=self.name))

    async def on_reset(self, cancellation_token: Any) -> None: ...


async def test_an_agent_of_the_users_own() -> None:
    with recording({"custom": "mine is this", "coder": "ok"}) as (server, recorder, log):
        custom = Custom(server.url)
        await recorder.wrap(_team(custom, agent("coder", server.url), turns=2)).run(task="go")
        await recorder.wrap(Custom(server.url)).run(task="alone")
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


async def test_agents_of_a_graph_that_speak_at_once_do_not_depend_on_each_other() -> None:
    script = {
        "planner": "start with this",
        "a": "one half",
        "b": "other half",
        "end": "both halves",
    }
    with recording(script) as (server, recorder, log):
        planner, a, b, end = (agent(n, server.url) for n in ("planner", "a", "b", "end"))
        graph = DiGraphBuilder()
        for node in (planner, a, b, end):
            graph.add_node(node)
        graph.add_edge(planner, a).add_edge(planner, b).add_edge(a, end).add_edge(b, end)
        await recorder.wrap(GraphFlow(graph.get_participants(), graph.build())).run(task="go")
    turns = {t.agent: t for t in log.turns}
    assert turns["a"].depends_on == turns["b"].depends_on == [turns["planner"].turn_id]
    assert set(turns["end"].depends_on) == {turns[n].turn_id for n in ("planner", "a", "b")}


async def test_an_earlier_episode_is_no_dependency() -> None:
    with recording({"planner": "always the same words"}) as (server, recorder, log):
        planner = recorder.wrap(agent("planner", server.url))
        await planner.run(task="one")
        await planner.run(task="two")
    assert [m["role"] for m in log.turns[1].messages] == ["system", "user", "assistant", "user"]
    assert log.turns[1].depends_on == []
