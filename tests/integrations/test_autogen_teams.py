"""Who chose whom: selections and their retries, handoffs, orchestrators, graphs, own teams."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from autogen_agentchat.base import TaskResult, Team
from autogen_agentchat.conditions import HandoffTermination
from autogen_agentchat.messages import HandoffMessage, TextMessage
from autogen_agentchat.teams import (
    BaseGroupChat,
    MagenticOneGroupChat,
    SelectorGroupChat,
    Swarm,
)
from autogen_agentchat.teams._group_chat._base_group_chat_manager import BaseGroupChatManager
from autogen_core import CancellationToken
from autogen_core.models import UserMessage

from marft_agents.schema import EpisodeEnded, EpisodeStarted, HumanEvent, ToolEvent, Turn
from marft_agents.testing import Reply
from tests.integrations.autogen_kit import agent, known, maybe, model, needs, script, takes
from tests.recording.kit import recording

GraphFlow, DiGraphBuilder = maybe("teams", "GraphFlow"), maybe("teams", "DiGraphBuilder")


AT_ONCE = hasattr(BaseGroupChatManager, "_transition_to_next_speakers")


def _who(turns: list[Turn]) -> list[tuple[str, str]]:
    return [(t.kind, t.agent) for t in turns]


STREAMED = needs(takes(SelectorGroupChat, "model_client_streaming"), "streamed selections")


@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=STREAMED)])
async def test_each_attempt_at_a_selection_is_a_turn_and_the_last_one_selects(stream: bool) -> None:
    replies: Any = {"boss": ["nobody", "planner and coder", "planner", "coder"]}
    with recording(script(**replies)) as (server, recorder, log):
        members: list[Any] = [agent(n, server.url) for n in ("planner", "coder", "critic")]
        options = known(SelectorGroupChat, model_client_streaming=stream, max_selector_attempts=3)
        group = SelectorGroupChat(members, model("boss", server.url), max_turns=2, **options)
        await recorder.wrap(group).run(task="go")
    select = ("select", "SelectorGroupChatManager")
    assert _who(log.turns) == [select] * 3 + [("act", "planner"), select, ("act", "coder")]
    first, second, chosen, planner, again, coder = log.turns
    assert (planner.selected_by, coder.selected_by) == (chosen.turn_id, again.turn_id)
    assert {t.selected_by for t in (first, second, chosen, again)} == {None}
    assert chosen.depends_on == [first.turn_id, second.turn_id]
    assert not any(t.trainable for t in log.turns if t.kind == "select")


def _by_code(thread: Any) -> str | None:
    """Everybody after the first speaker is chosen without a model."""
    return "coder" if len(thread) > 1 else None


def _candidates(thread: Any) -> list[str]:
    return ["coder"] if len(thread) > 1 else ["planner", "coder"]


CANDIDATES = needs(takes(SelectorGroupChat, "candidate_func"), "candidate functions")


@pytest.mark.parametrize(
    "option",
    [
        {"selector_func": _by_code},
        pytest.param({"candidate_func": _candidates}, marks=CANDIDATES),
    ],
)
async def test_a_speaker_chosen_by_code_was_selected_by_no_turn(option: dict[str, Any]) -> None:
    with recording(script(boss="planner")) as (server, recorder, log):
        members: list[Any] = [agent(n, server.url) for n in ("planner", "coder", "critic")]
        group = SelectorGroupChat(members, model("boss", server.url), max_turns=2, **option)
        await recorder.wrap(group).run(task="go")
    select, planner, coder = log.turns
    assert planner.selected_by == select.turn_id and coder.selected_by is None


async def test_a_selection_that_was_cut_off_selects_nobody_later() -> None:
    """The first speaker fails; the next run's speaker is not chosen by the old selection."""
    replies: Any = {"boss": ["planner", "coder"], "planner": Reply(status=400), "coder": "fine"}
    with recording(script(**replies)) as (server, recorder, log):
        members: list[Any] = [agent(n, server.url) for n in ("planner", "coder", "critic")]

        def by_code(thread: Any) -> str | None:
            return "coder" if any(getattr(m, "content", "") == "more" for m in thread) else None

        group = SelectorGroupChat(
            members, model("boss", server.url), max_turns=1, selector_func=by_code
        )
        with pytest.raises(Exception, match="scripted error"):
            await recorder.wrap(group).run(task="go")
        await group.reset()
        await group.run(task="more")
    assert log.turns[-1].agent == "coder" and log.turns[-1].selected_by is None


async def test_a_handoff_is_a_control_edge_and_no_environment() -> None:
    replies: Any = {
        "planner": [Reply(None, [("transfer_to_coder", {})]), "done"],
        "coder": ["one moment", Reply(None, [("transfer_to_planner", {})])],
    }
    with recording(script(**replies)) as (server, recorder, log):
        members: list[Any] = [
            agent("planner", server.url, handoffs=["coder"]),
            agent("coder", server.url, handoffs=["planner"]),
        ]
        await recorder.wrap(Swarm(members, max_turns=4)).run(task="go")
    first, moment, back, last = log.turns
    assert [t.agent for t in log.turns] == ["planner", "coder", "coder", "planner"]
    assert [t.selected_by for t in log.turns] == [None, first.turn_id, None, back.turn_id]
    assert moment.depends_on == [first.turn_id]
    assert {back.turn_id, first.turn_id} <= set(last.depends_on)
    assert [t.step for t in log.turns] == [0] * 4
    assert [t.name for t in log.of(ToolEvent)] == ["transfer_to_coder", "transfer_to_planner"]


async def test_input_for_a_swarm_that_waits_for_a_human_is_a_human_turn() -> None:
    """The documented way to ask a user: hand off to nobody, stop, run again with the answer."""
    replies: Any = {"planner": [Reply(None, [("transfer_to_user", {})]), "thank you"]}
    with recording(script(**replies)) as (server, recorder, log):
        members: list[Any] = [agent("planner", server.url, handoffs=["user"])]
        stop = HandoffTermination(target="user")
        swarm = recorder.wrap(Swarm(members, termination_condition=stop, max_turns=1))
        async with recorder.episode(task="go"):
            await swarm.run(task="go")
            reply = HandoffMessage(source="user", target="planner", content="the blue one")
            await swarm.run(task=reply)
    (human,) = log.of(HumanEvent)
    assert (human.name, human.text) == ("user", "the blue one")
    assert [(t.step, t.selected_by) for t in log.turns] == [(0, None), (1, None)]
    assert len(log.of(EpisodeEnded)) == 1


def _ledger(speaker: str, instruction: str, *, done: bool) -> str:
    answers: dict[str, Any] = {
        "is_request_satisfied": done,
        "is_in_loop": False,
        "is_progress_being_made": True,
        "next_speaker": speaker,
        "instruction_or_question": instruction,
    }
    return json.dumps({key: {"answer": value, "reason": "r"} for key, value in answers.items()})


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # AutoGen's own
async def test_an_orchestrator_plans_instructs_and_answers() -> None:
    boss = [
        "facts we know",
        "a plan to follow",
        _ledger("planner", "plan it", done=False),
        _ledger("coder", "code it", done=False),
        _ledger("coder", "stop", done=True),
        "the final answer",
    ]
    with recording(script(boss=boss, planner="planned", coder="coded")) as (
        server,
        recorder,
        log,
    ):
        members: list[Any] = [agent(n, server.url) for n in ("planner", "coder")]
        team = recorder.wrap(MagenticOneGroupChat(members, model("boss", server.url)))
        result = await team.run(task="go")
    boss_turn = ("orchestrate", "MagenticOneOrchestrator")
    assert _who(log.turns) == [
        *[boss_turn] * 3,
        ("act", "planner"),
        boss_turn,
        ("act", "coder"),
        *[boss_turn] * 2,
    ]
    facts, plan, first, planner, second, coder, last, final = log.turns
    assert final.text == "the final answer" and result.messages[-1].source == final.agent
    assert (planner.selected_by, coder.selected_by) == (first.turn_id, second.turn_id)
    assert set(planner.depends_on) == {facts.turn_id, plan.turn_id, first.turn_id}
    assert {planner.turn_id, second.turn_id} <= set(coder.depends_on)
    assert coder.turn_id in last.depends_on and last.selected_by is None


@needs(GraphFlow and AT_ONCE, "GraphFlow whose agents speak at once")
async def test_agents_of_a_graph_that_speak_at_once_do_not_depend_on_each_other() -> None:
    replies: Any = {
        "planner": "start with this",
        "a": "one half",
        "b": "other half",
        "end": "both halves",
    }
    with recording(script(**replies)) as (server, recorder, log):
        planner, a, b, end = (agent(n, server.url) for n in ("planner", "a", "b", "end"))
        graph = DiGraphBuilder()
        for node in (planner, a, b, end):
            graph.add_node(node)
        graph.add_edge(planner, a).add_edge(planner, b).add_edge(a, end).add_edge(b, end)
        await recorder.wrap(GraphFlow(graph.get_participants(), graph.build())).run(task="go")
    turns = {t.agent: t for t in log.turns}
    assert turns["a"].depends_on == turns["b"].depends_on == [turns["planner"].turn_id]
    assert set(turns["end"].depends_on) == {turns[n].turn_id for n in ("planner", "a", "b")}
    assert {t.selected_by for t in log.turns} == {t.parent_agent for t in log.turns} == {None}


class DebateManager(BaseGroupChatManager):
    """A user's own manager: its model names the next speakers, two at once at first."""

    client: Any

    async def validate_group_state(self, messages: Any) -> None: ...

    async def select_speaker(self, thread: Any) -> Any:
        result = await self.client.create([UserMessage(content="who?", source="user")])
        names = str(result.content).split()
        return names if AT_ONCE else names[0]

    async def reset(self) -> None: ...


class Debate(BaseGroupChat):
    """A user's own team."""

    component_config_schema = None  # pyright: ignore[reportAssignmentType] none of ours is loaded

    def __init__(self, members: list[Any], client: Any, **options: Any) -> None:
        super().__init__(
            **known(BaseGroupChat, name="debate", description="a debate"),
            participants=members,
            group_chat_manager_name="Moderator",
            group_chat_manager_class=DebateManager,
            **options,
        )
        self._make_client: Callable[[], Any] = lambda: client

    def _create_group_chat_manager_factory(self, *args: Any, **kwargs: Any) -> Any:
        def build() -> DebateManager:
            manager = DebateManager(*args, **kwargs)
            manager.client = self._make_client()
            return manager

        return build


async def test_a_team_of_the_users_own_whose_manager_makes_its_own_client() -> None:
    two = "planner coder" if AT_ONCE else "planner"
    with recording(script(boss=[two, "coder"])) as (server, recorder, log):
        members: list[Any] = [agent(n, server.url) for n in ("planner", "coder")]
        debate = Debate(members, model("boss", server.url), max_turns=2)
        await recorder.wrap(debate).run(task="go")
    chosen = log.turns[0]
    speakers = two.split()
    assert (chosen.kind, chosen.agent) == ("orchestrate", "Moderator")
    first = log.turns[1 : 1 + len(speakers)]
    assert sorted(t.agent for t in first) == sorted(speakers)
    assert {t.selected_by for t in first} == {chosen.turn_id}
    assert (log.turns[-1].agent, log.turns[-1].selected_by) == ("coder", log.turns[-2].turn_id)


class Relay(Team):
    """A team of a user's own that is no group chat: it asks its agents itself, in order."""

    @property
    def name(self) -> str:
        return "relay"

    @property
    def description(self) -> str:
        return "one after the other"

    def __init__(self, *members: Any) -> None:
        self.members = members

    async def run(self, *, task: Any = None, **options: Any) -> TaskResult:
        results = [item async for item in self.run_stream(task=task)]
        return results[-1]

    async def run_stream(self, *, task: Any = None, **options: Any) -> AsyncGenerator[Any, None]:
        said: list[Any] = [TextMessage(content=task, source="user")]
        for member in self.members:
            response = await member.on_messages(said[-1:], CancellationToken())
            said.append(response.chat_message)
            yield said[-1]
        yield TaskResult(messages=said)

    async def reset(self) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def save_state(self) -> Any:
        return {}

    async def load_state(self, state: Any) -> None: ...


async def test_a_team_of_the_users_own_that_is_no_group_chat() -> None:
    with recording() as (server, recorder, log):
        relay = recorder.wrap(Relay(agent("planner", server.url), agent("coder", server.url)))
        await relay.run(task="go")
        async for _ in relay.run_stream(task="again"):
            pass
    assert [t.agent for t in log.turns] == ["planner", "coder"] * 2
    assert [e.task for e in log.of(EpisodeStarted)] == ["go", "again"]
    assert log.turns[1].depends_on == [log.turns[0].turn_id]
    assert {t.parent_agent for t in log.turns} == {None}
