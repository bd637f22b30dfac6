"""Chats inside chats: who asked for them, in which turn, and what came back."""

from __future__ import annotations

from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent, SocietyOfMindAgent
from autogen_agentchat.conditions import MaxMessageTermination, TextMentionTermination
from autogen_agentchat.teams import RoundRobinGroupChat, SelectorGroupChat

from marft_agents.schema import EpisodeEnded, EpisodeStarted, ToolEvent, Turn
from marft_agents.testing import InMemoryLog, Reply
from tests.integrations.autogen_kit import (
    TEAM_IN_TEAM,
    VERSION,
    Custom,
    agent,
    maybe,
    model,
    needs,
    round_robin,
    script,
    takes,
    team,
    texts,
)
from tests.recording.kit import recording

AgentTool, TeamTool = maybe("tools", "AgentTool"), maybe("tools", "TeamTool")
MessageFilterAgent = maybe("agents", "MessageFilterAgent")
MessageFilterConfig = maybe("agents._message_filter_agent", "MessageFilterConfig")
AGENT_TOOL = needs(AgentTool, "AgentTool")


def _families(turns: list[Turn]) -> list[tuple[str, str | None, str | None]]:
    return [(t.agent, t.parent_agent, t.parent_turn) for t in turns]


def _one_episode(log: InMemoryLog) -> bool:
    return len(log.of(EpisodeStarted)) == len(log.of(EpisodeEnded)) == 1


@AGENT_TOOL
@pytest.mark.parametrize("kind", ["agent", "team"])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_tool_runs_belongs_to_the_turn_that_called_it(kind: str, stream: bool) -> None:
    replies: Any = {
        "planner": [Reply(None, [("writer", {"task": "write"})]), "here it is"],
        "writer": "a sea",
        "critic": "so so",
    }
    with recording(script(**replies)) as (server, recorder, log):
        client = model("planner", server.url, parallel_tool_calls=False)
        writer = agent("writer", server.url, stream=stream)
        inner = team(writer, agent("critic", server.url), turns=2)
        tool = AgentTool(writer) if kind == "agent" else TeamTool(inner, "writer", "writes")
        planner = AssistantAgent(
            "planner", client, tools=[tool], reflect_on_tool_use=True, model_client_stream=stream
        )
        await recorder.wrap(team(planner, turns=1)).run(task="go")
    call, *nested, reflection = log.turns
    names = ["writer"] if kind == "agent" else ["writer", "critic"]
    assert _families(nested) == [(name, "planner", call.turn_id) for name in names]
    assert _families([call, reflection]) == [("planner", None, None)] * 2
    assert call.turn_id in reflection.depends_on and nested[-1].turn_id in reflection.depends_on
    assert [t.step for t in log.turns] == [0] * len(log.turns)
    assert [t.name for t in log.of(ToolEvent)] == ["writer"] and _one_episode(log)


@AGENT_TOOL
async def test_a_tool_that_a_workbench_shows_under_another_name() -> None:
    workbenches = pytest.importorskip("autogen_core.tools")
    if not takes(workbenches.StaticWorkbench, "tool_overrides"):
        pytest.skip(f"autogen-agentchat {VERSION} has no tool overrides")
    replies: Any = {
        "planner": [Reply(None, [("poet", {"task": "write"})]), "here it is"],
        "writer": "a sea",
    }
    with recording(script(**replies)) as (server, recorder, log):
        bench = workbenches.StaticWorkbench(
            [AgentTool(agent("writer", server.url))],
            {"writer": workbenches.ToolOverride(name="poet")},
        )
        planner = agent("planner", server.url, workbench=bench, reflect_on_tool_use=True)
        await recorder.wrap(planner).run(task="go")
    call, writer, reflection = log.turns
    assert _families([writer]) == [("writer", "planner", call.turn_id)]
    assert reflection.depends_on == [call.turn_id, writer.turn_id]
    assert [(t.name, t.agent) for t in log.of(ToolEvent)] == [("poet", "planner")]


@AGENT_TOOL
async def test_two_agents_behind_tools_called_at_once() -> None:
    calls = [("writer", {"task": "write it"}), ("critic", {"task": "judge it"})]
    replies: Any = {
        "planner": [Reply(None, calls), "done"],
        "writer": "written",
        "critic": "judged",
    }
    with recording(script(**replies)) as (server, recorder, log):
        tools = [AgentTool(agent(n, server.url)) for n in ("writer", "critic")]
        planner = agent("planner", server.url, tools=tools, reflect_on_tool_use=True)
        await recorder.wrap(planner).run(task="go")
    call, *nested, reflection = log.turns
    assert {(t.parent_agent, t.parent_turn) for t in nested} == {("planner", call.turn_id)}
    assert all(t.depends_on == [] for t in nested)
    assert set(reflection.depends_on) == {t.turn_id for t in log.turns[:3]}


@AGENT_TOOL
async def test_a_tool_within_a_tool() -> None:
    replies: Any = {
        "boss": Reply(None, [("planner", {"task": "plan"})]),
        "planner": Reply(None, [("writer", {"task": "write"})]),
        "writer": "a poem about the sea",
    }
    with recording(script(**replies)) as (server, recorder, log):
        planner = agent("planner", server.url, tools=[AgentTool(agent("writer", server.url))])
        await recorder.wrap(agent("boss", server.url, tools=[AgentTool(planner)])).run(task="go")
    boss, plan, _ = log.turns
    assert _families(log.turns) == [
        ("boss", None, None),
        ("planner", "boss", boss.turn_id),
        ("writer", "planner", plan.turn_id),
    ]


async def test_a_society_of_mind_runs_its_team_and_sums_up() -> None:
    replies: Any = {
        "planner": "an inner plan",
        "coder": "an inner code",
        "som": "the summary of both",
    }
    with recording(script(**replies)) as (server, recorder, log):
        som = SocietyOfMindAgent("som", round_robin(server.url, turns=3), model("som", server.url))
        await recorder.wrap(team(som, agent("critic", server.url), turns=2)).run(task="go")
    planner, coder, summary, critic = log.turns
    assert [t.kind for t in log.turns] == ["act", "act", "summary", "act"]
    assert _families([planner, coder]) == [("planner", "som", None), ("coder", "som", None)]
    assert _families([summary, critic]) == [("som", None, None), ("critic", None, None)]
    assert summary.depends_on == [planner.turn_id, coder.turn_id]
    assert summary.turn_id in critic.depends_on
    assert _one_episode(log)


@TEAM_IN_TEAM
async def test_a_team_in_a_team_passes_a_selection_on() -> None:
    replies: Any = {
        "outer": ["inner", "critic"],
        "inside": ["planner", "coder"],
        "planner": "an inner plan",
        "coder": "an inner code",
    }
    with recording(script(**replies)) as (server, recorder, log):
        names = ("planner", "coder", "tester")
        members: list[Any] = [agent(n, server.url) for n in names]
        inner = SelectorGroupChat(members, model("inside", server.url), name="inner", max_turns=2)
        outer: list[Any] = [inner, agent("critic", server.url), agent("judge", server.url)]
        group = SelectorGroupChat(outer, model("outer", server.url), max_turns=2)
        await recorder.wrap(group).run(task="go")
    first, inside, planner, again, coder, second, critic = log.turns
    assert [t.selected_by for t in log.turns] == [
        None,
        first.turn_id,
        inside.turn_id,
        None,
        again.turn_id,
        None,
        second.turn_id,
    ]
    assert {t.parent_agent for t in (inside, planner, again, coder)} == {"inner"}
    assert {t.parent_agent for t in (first, second, critic)} == {None}
    assert {planner.turn_id, coder.turn_id} <= set(critic.depends_on)


def _critic_next(thread: Any) -> str | None:
    return "critic" if len(thread) > 1 else None


@TEAM_IN_TEAM
async def test_a_selection_of_a_team_ends_with_its_run() -> None:
    with recording(script(boss="inner")) as (server, recorder, log):
        inner = team(
            agent("planner", server.url), agent("coder", server.url), turns=2, name="inner"
        )
        outer: list[Any] = [inner, agent("critic", server.url)]
        boss = model("boss", server.url)
        group = SelectorGroupChat(outer, boss, max_turns=2, selector_func=_critic_next)
        await recorder.wrap(group).run(task="go")
    select, *others = log.turns
    assert [(t.agent, t.selected_by) for t in others] == [
        ("planner", select.turn_id),
        ("coder", None),
        ("critic", None),
    ]


async def test_a_limit_of_an_inner_team_is_no_cut_of_the_episode() -> None:
    with recording(script(som="all of it, TERMINATE")) as (server, recorder, log):
        som = SocietyOfMindAgent("som", round_robin(server.url, turns=3), model("som", server.url))
        stop = TextMentionTermination("TERMINATE")
        await recorder.wrap(team(som, termination_condition=stop)).run(task="go")
    (end,) = log.of(EpisodeEnded)
    assert (end.reason, end.detail) == ("terminated", "Text 'TERMINATE' mentioned")


@TEAM_IN_TEAM
async def test_an_inner_team_that_was_wrapped_itself_joins_the_outer_run() -> None:
    with recording() as (server, recorder, log):
        inner = recorder.wrap(round_robin(server.url, turns=2))
        outer = recorder.wrap(team(inner, agent("critic", server.url), turns=2))
        await outer.run(task="go")
        await inner.reset()
        await inner.run(task="alone")
    started = log.of(EpisodeStarted)
    assert [e.task for e in started] == ["go", "alone"]
    together = [t for t in log.turns if t.episode_id == started[0].episode_id]
    assert {t.agent for t in together} == {"planner", "critic"}


async def test_a_wrapped_team_inside_a_tool_is_nested_in_the_calling_turn() -> None:
    replies: Any = {
        "boss": Reply(None, [("consult", {"question": "how"})]),
        "planner": "consulted and planned",
    }
    with recording(script(**replies)) as (server, recorder, log):
        experts = recorder.wrap(team(agent("planner", server.url), turns=1))

        async def consult(question: str) -> str:
            """Ask the experts."""
            return texts((await experts.run(task=question)).messages)[-1]

        await recorder.wrap(agent("boss", server.url, tools=[consult])).run(task="go")
    call, planner = log.turns
    assert _families([planner]) == [("planner", "boss", call.turn_id)]
    assert _one_episode(log)


@needs(MessageFilterAgent, "MessageFilterAgent")
async def test_a_filter_around_an_agent_is_no_chat_of_its_own() -> None:
    with recording(script(boss="outer")) as (server, recorder, log):
        inner = agent("planner", server.url)
        filtered = MessageFilterAgent("outer", inner, MessageFilterConfig(per_source=[]))
        members: list[Any] = [filtered, agent("coder", server.url), agent("critic", server.url)]
        group = SelectorGroupChat(members, model("boss", server.url), max_turns=1)
        await recorder.wrap(group).run(task="go")
    select, act = log.turns
    assert _families([act]) == [("planner", None, None)] and act.selected_by == select.turn_id


class Guarded(Custom):
    """Asks a guard of its own first, then the agent behind it."""

    async def answer(self, messages: Any, cancellation_token: Any) -> str:
        held = vars(self)
        await self.ask(held["guard"], messages)
        response = await held["inner"].on_messages(messages, cancellation_token)
        return str(response.chat_message.content).upper()


async def test_an_agent_that_delegates_is_the_parent_and_its_message_the_delegates() -> None:
    replies: Any = {"guard": "allowed", "planner": "an inner plan", "coder": "fine by me"}
    with recording(script(**replies)) as (server, recorder, log):
        guarded = Guarded("safe", guard=model("guard", server.url))
        vars(guarded)["inner"] = agent("planner", server.url)
        await recorder.wrap(team(guarded, agent("coder", server.url), turns=2)).run(task="go")
    guard, planner, coder = log.turns
    assert _families([guard, planner]) == [("safe", None, None), ("planner", "safe", None)]
    assert coder.messages[-1]["content"] == "AN INNER PLAN"
    assert planner.turn_id in coder.depends_on or guard.turn_id in coder.depends_on


async def test_an_agent_put_in_after_wrapping_is_recorded_at_the_next_run() -> None:
    with recording() as (server, recorder, log):
        planner = Custom("planner", llm=model("planner", server.url))
        alone = recorder.wrap(RoundRobinGroupChat([planner], max_turns=1))
        await alone.run(task="go")
        vars(planner)["llm"] = model("other", server.url)
        await alone.run(task="again")
    assert [(t.agent, t.model) for t in log.turns] == [("planner", "planner"), ("planner", "other")]


async def test_an_episode_opened_inside_a_tool_is_a_child_and_holds_its_own_runs() -> None:
    with recording(script(boss=Reply(None, [("try_out", {})]))) as (server, recorder, log):
        experts = recorder.wrap(round_robin(server.url, turns=2))

        async def try_out() -> str:
            """Try it."""
            async with recorder.episode(id="child"):
                await experts.run(task="how")
            return "tried"

        stop = MaxMessageTermination(4)
        members: list[Any] = [agent("boss", server.url, tools=[try_out])]
        group = recorder.wrap(RoundRobinGroupChat(members, termination_condition=stop, max_turns=1))
        await group.run(task="go")
    parent, child = log.of(EpisodeStarted)
    assert (child.episode_id, child.parent_id) == ("child", parent.episode_id)
    assert [(t.agent, t.episode_id) for t in log.turns] == [
        ("boss", parent.episode_id),
        ("planner", "child"),
    ]
