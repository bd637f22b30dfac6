"""Patterns, handoffs, guardrails, and runs that AutoGen puts into threads of its own."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from marft_agents.schema import EpisodeStarted, ToolEvent
from marft_agents.testing import Reply
from tests.runtimes.classic.kit import (
    VERSION,
    ConversableAgent,
    assistant,
    config,
    endings,
    needs,
    recording,
    told,
    user,
)

patterns = needs("autogen.agentchat.group.patterns")
runs = pytest.mark.skipif(
    not hasattr(ConversableAgent, "run"), reason=f"autogen {VERSION} has no run()"
)
NAMES = ("planner", "coder")


def pattern(kind: str, url: str, **options: Any) -> Any:
    from autogen.agentchat.group import patterns as module

    planner, coder = (assistant(n, url) for n in NAMES)
    return getattr(module, kind)(
        initial_agent=planner, agents=[planner, coder], user_agent=user(), **options
    )


@patterns
def test_an_auto_pattern_is_known_by_any_of_its_agents() -> None:
    script = {"selector": "coder", "planner": "A plan.", "coder": "Code."}
    with recording(script) as (server, recorder, log):
        from autogen.agentchat import initiate_group_chat

        args = {"llm_config": config("selector", server.url)}
        auto = pattern("AutoPattern", server.url, group_manager_args=args)
        recorder.wrap(auto.agents[1])
        initiate_group_chat(pattern=auto, messages="Solve it.", max_rounds=3)
    assert told(log) == [("act", "planner"), ("select", "chat_manager"), ("act", "coder")]
    assert log.turns[2].selected_by == log.turns[1].turn_id
    assert log.turns[0].selected_by is None
    assert endings(log) == [("truncated", "max_round (3) reached")]


@patterns
@pytest.mark.parametrize("kind", ["DefaultPattern", "RoundRobinPattern", "RandomPattern"])
def test_patterns_without_a_selector_have_no_selections(kind: str) -> None:
    with recording() as (server, recorder, log):
        from autogen.agentchat import initiate_group_chat

        made = recorder.wrap(pattern(kind, server.url))
        initiate_group_chat(pattern=made, messages="Solve it.", max_rounds=4)
    assert log.turns and {t.kind for t in log.turns} == {"act"}
    (started,) = log.of(EpisodeStarted)
    assert started.task == "Solve it."


@patterns
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_handoff_is_named_by_whoever_it_was_made_to(mode: str) -> None:
    from autogen.agentchat import a_initiate_group_chat, initiate_group_chat
    from autogen.agentchat.group import AgentTarget, OnCondition, StringLLMCondition

    def script(body: Any) -> Reply | str:
        names = [t["function"]["name"] for t in body.get("tools") or ()]
        if body["model"] == "planner" and names:
            return Reply(tool_calls=[(names[0], {})])
        return "Done."

    with recording(script) as (server, recorder, log):
        made = pattern("DefaultPattern", server.url)
        planner, coder = made.agents
        planner.handoffs.add_llm_condition(
            OnCondition(target=AgentTarget(coder), condition=StringLLMCondition("Needs code."))
        )
        recorder.wrap(made)
        if mode == "sync":
            initiate_group_chat(pattern=made, messages="Solve it.", max_rounds=4)
        else:
            asyncio.run(a_initiate_group_chat(pattern=made, messages="Solve it.", max_rounds=4))
    plan, code = log.turns[:2]
    assert (plan.agent, code.agent, code.selected_by) == ("planner", "coder", plan.turn_id)
    (event,) = log.of(ToolEvent)
    assert event.agent == "planner" and event.call_id == (plan.tool_calls or [{}])[0]["id"]
    assert (plan.step, code.step) == (0, 0)  # a handoff is no answer of the environment


@patterns
def test_a_tool_of_a_pattern_sees_the_context_variables_and_counts() -> None:
    from autogen.agentchat import initiate_group_chat
    from autogen.agentchat.group import ContextVariables, ReplyResult

    def note(text: Any, context_variables: Any) -> Any:
        """Takes a note."""
        context_variables["note"] = text
        return ReplyResult(message=f"noted {text}", context_variables=context_variables)

    note.__annotations__ = {"text": str, "context_variables": ContextVariables}
    script = {"planner": [Reply(tool_calls=[("note", {"text": "hi"})]), "Done."]}
    with recording(script) as (server, recorder, log):
        planner = assistant("planner", server.url, functions=[note])
        from autogen.agentchat.group.patterns import DefaultPattern

        made = DefaultPattern(initial_agent=planner, agents=[planner], user_agent=user())
        recorder.wrap(made)
        _, variables, _ = initiate_group_chat(pattern=made, messages="Note hi.", max_rounds=4)
    assert variables["note"] == "hi"
    (event,) = log.of(ToolEvent)
    assert (event.name, event.agent, event.ok) == ("note", "planner", True)
    assert [t.step for t in log.turns] == [0, 1]


@needs("autogen.agentchat.group.guardrails")
def test_a_guardrail_that_asks_a_model_is_a_guard() -> None:
    from autogen import LLMConfig
    from autogen.agentchat import initiate_group_chat
    from autogen.agentchat.group import AgentTarget
    from autogen.agentchat.group.guardrails import LLMGuardrail

    verdict = json.dumps({"activated": True, "justification": "It is rude."})
    script = {"guard": verdict, "planner": "A plan.", "coder": "Sorry."}
    with recording(script) as (server, recorder, log):
        made = pattern("RoundRobinPattern", server.url)
        planner, coder = made.agents
        entry = config("guard", server.url)["config_list"][0]
        guardrail = LLMGuardrail("polite", "Rude?", AgentTarget(coder), LLMConfig(entry))
        planner.register_output_guardrail(guardrail)
        recorder.wrap(made)
        initiate_group_chat(pattern=made, messages="Solve it.", max_rounds=3)
    assert told(log) == [("act", "planner"), ("guard", "planner"), ("act", "coder")]
    assert not log.turns[1].trainable and log.turns[1].parent_agent is None


@patterns
@pytest.mark.parametrize("kind", ["pattern", "async pattern"])
def test_a_group_that_runs_in_a_thread_is_in_the_episode_it_was_started_in(kind: str) -> None:
    from autogen import agentchat

    if not hasattr(agentchat, "a_run_group_chat"):
        pytest.skip(f"autogen {VERSION} has no a_run_group_chat()")
    a_run_group_chat, run_group_chat = agentchat.a_run_group_chat, agentchat.run_group_chat

    async def play(made: Any) -> None:
        response = await a_run_group_chat(pattern=made, messages="Solve it.", max_rounds=4)
        await response.process()

    with recording() as (server, recorder, log):
        for name in ("mine", None):
            made = recorder.wrap(pattern("RoundRobinPattern", server.url))

            def start(made: Any = made) -> None:
                if kind == "pattern":
                    run_group_chat(pattern=made, messages="Solve it.", max_rounds=4).process()
                else:
                    asyncio.run(play(made))

            if name is None:
                start()
            else:
                with recorder.episode(id=name):
                    start()
        assert recorder.flush()
    ids = [e.episode_id for e in log.of(EpisodeStarted)]
    assert ids[0] == "mine" and len(ids) == 2
    for episode in ids:
        assert [t.agent for t in log.turns if t.episode_id == episode] == list(NAMES)


def _run_alone(coder: Any) -> None:
    coder.run(message="Hm?", max_turns=1, user_input=False).process()


def _run_with(coder: Any) -> None:
    coder.run(recipient=user(), message="Hm?", max_turns=2).process()


def _run_from(coder: Any) -> None:
    user().run(recipient=coder, message="Hm?", max_turns=1).process()


def _a_run(coder: Any) -> None:
    async def play() -> None:
        response = await coder.a_run(message="Hm?", max_turns=1, user_input=False)
        await response.process()

    asyncio.run(play())


def _run_iter(coder: Any) -> None:
    if not hasattr(coder, "run_iter"):
        pytest.skip(f"autogen {VERSION} has no run_iter()")
    for _ in coder.run_iter(message="Hm?", max_turns=1, user_input=False):
        pass


@runs
@pytest.mark.parametrize("start", [_run_alone, _run_with, _run_from, _a_run, _run_iter])
def test_a_run_is_recorded_wherever_its_thread_is(start: Callable[[Any], None]) -> None:
    with recording({"coder": "Yes. TERMINATE"}) as (server, recorder, log):
        coder = recorder.wrap(assistant("coder", server.url))
        with recorder.episode(id="mine"):
            start(coder)
        start(coder)
        assert recorder.flush()
    ids = [e.episode_id for e in log.of(EpisodeStarted)]
    assert ids[0] == "mine" and len(ids) == 2
    assert [t.episode_id for t in log.turns] == ids and {t.agent for t in log.turns} == {"coder"}


@patterns
def test_a_nested_chat_of_a_handoff_names_its_parent() -> None:
    from autogen.agentchat import initiate_group_chat
    from autogen.agentchat.group import NestedChatTarget, OnCondition, StringLLMCondition

    def script(body: Any) -> Reply | str:
        names = [t["function"]["name"] for t in body.get("tools") or ()]
        return Reply(tool_calls=[(names[0], {})]) if names else f"{body['model']} is done."

    with recording(script) as (server, recorder, log):
        made = pattern("DefaultPattern", server.url)
        planner, _ = made.agents
        writer = assistant("writer", server.url)
        queue = {"chat_queue": [{"recipient": writer, "message": "Write.", "max_turns": 1}]}
        planner.handoffs.add_llm_condition(
            OnCondition(
                target=NestedChatTarget(nested_chat_config={**queue, "use_async": False}),
                condition=StringLLMCondition("Needs text."),
            )
        )
        recorder.wrap(made)
        initiate_group_chat(pattern=made, messages="Solve it.", max_rounds=4)
    plan, text = log.turns[:2]
    assert (plan.agent, text.agent) == ("planner", "writer")
    assert "planner" in str(text.parent_agent) and text.episode_id == plan.episode_id


@needs("autogen.agentchat.contrib.swarm_agent")
def test_a_swarm_hands_over_as_a_pattern_does() -> None:
    swarm: Any = importlib.import_module("autogen.agentchat.contrib.swarm_agent")

    def script(body: Any) -> Reply | str:
        names = [t["function"]["name"] for t in body.get("tools") or ()]
        return Reply(tool_calls=[(names[0], {})]) if names else "Done."

    with recording(script) as (server, recorder, log):
        planner, coder = (assistant(n, server.url) for n in NAMES)
        swarm.register_hand_off(planner, swarm.OnCondition(coder, "Needs code."))
        recorder.wrap([planner, coder])
        swarm.initiate_swarm_chat(
            initial_agent=planner, messages="Solve it.", agents=[planner, coder], max_rounds=4
        )
    plan, code = log.turns[:2]
    assert (plan.agent, code.agent, code.selected_by) == ("planner", "coder", plan.turn_id)
    assert len({t.episode_id for t in log.turns}) == 1
