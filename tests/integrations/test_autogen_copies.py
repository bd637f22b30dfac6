"""Copies and pickles of a wrapped team: the app's own objects, as if nobody recorded them."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat, SelectorGroupChat
from autogen_ext.models.replay import ReplayChatCompletionClient

from marft_agents import MarftRecorder
from marft_agents.testing import InMemoryLog
from tests.integrations.autogen_kit import said


def duo(kind: type[Any]) -> Any:
    client = ReplayChatCompletionClient(["planner", "one", "coder", "two", "planner", "three"] * 3)
    agents: list[Any] = [AssistantAgent(name, client) for name in ("planner", "coder")]
    options: dict[str, Any] = {"model_client": client} if kind is SelectorGroupChat else {}
    return kind(agents, termination_condition=MaxMessageTermination(3), **options)


def pickled(team: Any) -> Any:
    return pickle.loads(pickle.dumps(team))


@pytest.mark.parametrize("kind", [RoundRobinGroupChat, SelectorGroupChat])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
async def test_a_copy_of_a_wrapped_team_is_a_team_of_its_own(
    copied: Callable[[Any], Any], kind: type[Any], caplog: pytest.LogCaptureFixture
) -> None:
    plain = said(await copied(duo(kind)).run(task="go"))
    log = InMemoryLog()
    with MarftRecorder(log=log) as recorder, caplog.at_level(logging.WARNING):
        team = recorder.wrap(duo(kind))
        twin = copied(team)
        assert said(await twin.run(task="go")) == plain
        assert recorder.flush() and log.events == []
        (warning,) = caplog.records
        assert f"a copy of a recorded {kind.__name__} is not recorded" in warning.getMessage()
        assert said(await recorder.wrap(twin).run()) and said(await team.run(task="go")) == plain
    assert {turn.agent for turn in log.turns if turn.kind == "act"} == {"planner", "coder"}


def test_close_leaves_nothing_of_it_behind() -> None:
    team = duo(RoundRobinGroupChat)
    before = set(vars(team))
    with MarftRecorder(log=InMemoryLog()) as recorder:
        recorder.wrap(team)
    assert set(vars(team)) == before
    assert set(vars(copy.deepcopy(team))) == before


async def test_a_copy_of_an_agent_acts_for_itself() -> None:
    agent = AssistantAgent("planner", ReplayChatCompletionClient(["one"]))
    with MarftRecorder(log=InMemoryLog()) as recorder:
        twin = copy.deepcopy(recorder.wrap(agent))
        await twin.run(task="go")
    contexts: list[Any] = [vars(a)["_model_context"] for a in (twin, agent)]
    assert [len(await c.get_messages()) for c in contexts] == [2, 0]
