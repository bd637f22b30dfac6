"""Channels of AG2's network: episodes, handoffs, delegation, humans, hubs at once."""

from __future__ import annotations

import asyncio
from typing import Any

import ag2.network as net
import pytest
from ag2 import Agent

from marft_agents import MarftRecorder
from marft_agents.recording import EpisodeHandle
from marft_agents.schema import EpisodeEnded, EpisodeStarted, HumanEvent, ToolEvent
from marft_agents.testing import InMemoryLog, ScriptedServer
from tests.runtimes.ag2.kit import Ended, agent, on_channel, open_hub, relay
from tests.runtimes.kit import calls_once

NAMES = ("planner", "coder", "critic")


def team(url: str, *, stream: bool = False) -> list[Agent[Any]]:
    return [agent(name, url, stream=stream) for name in NAMES]


async def joined(hub: net.Hub, agents: list[Agent[Any]]) -> list[Any]:
    return [await hub.register(one, attach_plugin=False) for one in agents]


@pytest.mark.parametrize("before", [True, False], ids=["wrapped first", "registered first"])
async def test_a_channel_is_an_episode(
    recorder: MarftRecorder, log: InMemoryLog, stream: bool, before: bool
) -> None:
    ends: list[Any] = []

    def score(handle: EpisodeHandle, metadata: Any) -> None:
        ends.append(metadata.close_reason)
        handle.reward(1.0)

    with ScriptedServer() as server:
        hub = await open_hub()
        agents = team(server.url, stream=stream)
        if before:
            recorder.wrap(hub, on_end=score)
        members = await joined(hub, agents)
        if not before:
            recorder.wrap(hub, on_end=score)
        await on_channel(hub, members, "Paint the boat.", relay(members, 4))
        await hub.close()
    recorder.flush()
    (started,), (ended,) = log.of(EpisodeStarted), log.of(EpisodeEnded)
    assert "Paint the boat." in str(started.task)
    assert (ended.reason, ended.detail) == ("truncated", "max_turns") and ends == ["max_turns"]
    assert [t.agent for t in log.turns] == ["coder", "critic", "planner"]
    coder, critic, planner = log.turns
    assert critic.depends_on == [coder.turn_id]
    assert planner.depends_on == [coder.turn_id, critic.turn_id]
    assert all(t.token_ids and t.selected_by is None for t in log.turns)


async def test_agents_that_were_wrapped_one_by_one(
    recorder: MarftRecorder, log: InMemoryLog
) -> None:
    with ScriptedServer() as server:
        hub = await open_hub()
        members = await joined(hub, [recorder.wrap(one) for one in team(server.url)])
        for task in ("first", "second"):
            await on_channel(hub, members, task, relay(members, 3))
        await hub.close()
    recorder.flush()
    assert [e.reason for e in log.of(EpisodeEnded)] == ["truncated"] * 2
    for started in log.of(EpisodeStarted):
        turns = [t for t in log.turns if t.episode_id == started.episode_id]
        assert [t.agent for t in turns] == ["coder", "critic"]


async def test_the_apps_episode_has_the_channels_that_were_opened_in_it(
    recorder: MarftRecorder, log: InMemoryLog
) -> None:
    with ScriptedServer() as server:
        hub = recorder.wrap(await open_hub())
        members = await joined(hub, team(server.url))

        async def play(name: str) -> None:
            with recorder.episode(id=name):
                await on_channel(hub, members, f"Work on {name}.", relay(members, 4))

        await asyncio.gather(*(play(f"e{i}") for i in range(3)))
        await hub.close()
    recorder.flush()
    assert {e.episode_id for e in log.events} == {"e0", "e1", "e2"}
    for name in ("e0", "e1", "e2"):
        turns = [t for t in log.turns if t.episode_id == name]
        assert [t.agent for t in turns] == ["coder", "critic", "planner"]
        assert f"Work on {name}." in str(turns[0].messages)
    assert {e.reason for e in log.of(EpisodeEnded)} == {"truncated"}


async def test_hubs_at_once(recorder: MarftRecorder, log: InMemoryLog, stream: bool) -> None:
    async def play(url: str, task: str) -> None:
        hub = recorder.wrap(await open_hub(), end="terminated")
        members = await joined(hub, team(url, stream=stream))
        await on_channel(hub, members, task, relay(members, 4))
        await hub.close()

    with ScriptedServer() as server:
        await asyncio.gather(*(play(server.url, f"Task {i}.") for i in range(3)))
    recorder.flush()
    assert [e.reason for e in log.of(EpisodeEnded)] == ["terminated"] * 3
    assert len(log.turns) == 9
    for started in log.of(EpisodeStarted):
        turns = [t for t in log.turns if t.episode_id == started.episode_id]
        assert [t.agent for t in turns] == ["coder", "critic", "planner"]


async def test_a_handoff_is_what_chose_the_next_speaker(
    recorder: MarftRecorder, log: InMemoryLog
) -> None:
    def route() -> net.Handoff:
        """Let the critic go on."""
        return net.Handoff(target="critic", reason="expertise")

    with ScriptedServer(calls_once({"coder": ("route", {})})) as server:
        hub = recorder.wrap(await open_hub())
        agents = team(server.url)
        agents[1].add_tool(route)
        members = await joined(hub, agents)
        graph = net.TransitionGraph(
            initial_speaker=members[0].agent_id,
            transitions=[
                net.Transition(
                    when=net.FromSpeaker(members[0].agent_id),
                    then=net.AgentTarget(members[1].agent_id),
                )
            ],
            default_target=net.TerminateTarget(reason="done"),
            max_turns=6,
        )
        await on_channel(hub, members, "go", graph)
        await hub.close()
    recorder.flush()
    called, said, chosen = log.turns
    assert [t.agent for t in log.turns] == ["coder", "coder", "critic"]
    assert said.selected_by is None and chosen.selected_by == called.turn_id
    (tool,), (ended,) = log.of(ToolEvent), log.of(EpisodeEnded)
    assert tool.name == "route" and {t.step for t in log.turns} == {0}
    assert (ended.reason, ended.detail) == ("terminated", "done")


async def test_delegation_is_a_nested_chat(recorder: MarftRecorder, log: InMemoryLog) -> None:
    script = calls_once({"planner": ("delegate", {"target": "coder", "prompt": "Write it."})})
    with ScriptedServer(script) as server:
        hub = recorder.wrap(await open_hub())
        planner, coder, _ = team(server.url)
        for one in (planner, coder):
            await hub.register(one)
        await planner.ask("go")
        await hub.close()
    recorder.flush()
    asked, inner, answered = log.turns
    assert [t.agent for t in log.turns] == ["planner", "coder", "planner"]
    assert (inner.parent_agent, inner.parent_turn) == ("planner", asked.turn_id)
    assert inner.turn_id in answered.depends_on and {t.step for t in log.turns} == {0}
    assert len({e.episode_id for e in log.events}) == 1


async def test_a_human_on_a_channel(recorder: MarftRecorder, log: InMemoryLog) -> None:
    with ScriptedServer() as server:
        hub = recorder.wrap(await open_hub())
        coder = await hub.register(agent("coder", server.url), attach_plugin=False)
        people = net.HubClient(net.LocalLink(hub), hub=hub)
        human = await people.register_human(net.Passport(name="ann"))
        channel = await human.open(type="conversation", target="coder")
        for said in ("Hello.", "Shorter, please."):
            await human.send(channel.channel_id, said, audience=[coder.agent_id])
            while (await human.next_envelope(timeout=20)).sender_id != coder.agent_id:
                pass
        ended = Ended(hub)
        await human.close_channel(channel.channel_id)
        await ended.wait(channel.channel_id)
        await people.close()
        await hub.close()
    recorder.flush()
    assert [(e.name, e.text) for e in log.of(HumanEvent)] == [("ann", "Shorter, please.")]
    assert [t.agent for t in log.turns] == ["coder", "coder"]
    assert [t.step for t in log.turns] == [0, 1]
    assert [e.reason for e in log.of(EpisodeEnded)] == ["terminated"]


@pytest.mark.parametrize("first", ["hub", "recorder"])
async def test_a_channel_that_nobody_closes(log: InMemoryLog, first: str) -> None:
    recorder = MarftRecorder(log=log)
    with ScriptedServer() as server:
        hub = await open_hub()
        listeners = list(vars(hub)["_listeners"])
        recorder.wrap(hub)
        before = dict(vars(hub))
        planner, coder = await joined(hub, team(server.url)[:2])
        channel = await planner.open(type="consulting", target="coder")
        await channel.send("Well?")

        def answered(envelope: net.Envelope) -> bool:
            return envelope.sender_id == coder.agent_id

        await planner.wait_for_channel_event(
            channel_id=channel.channel_id, predicate=answered, timeout=20
        )
        if first == "hub":
            await hub.close()
        recorder.close()
        await hub.close()
    (ended,) = log.of(EpisodeEnded)
    assert ended.detail in ("the hub was closed", "consulting_complete") or first == "recorder"
    assert vars(hub)["_listeners"] == listeners
    assert "register" in before and "register" not in vars(hub) and "close" not in vars(hub)


async def test_a_failing_turn_does_not_end_the_channel(
    recorder: MarftRecorder, log: InMemoryLog
) -> None:
    with ScriptedServer({"critic": "fine"}) as server:  # no coder here
        hub = recorder.wrap(await open_hub())
        members = await joined(hub, team(server.url))
        with pytest.raises(Exception, match="no model 'coder'"):
            await on_channel(hub, members, "go", relay(members, 4))
        await hub.close()
    recorder.flush()
    (turn,), (ended,) = log.turns, log.of(EpisodeEnded)
    assert "no model 'coder'" in (turn.error or "")
    assert (ended.reason, ended.detail) == ("terminated", "the hub was closed")


async def test_short_words_on_a_channel_are_linked(
    recorder: MarftRecorder, log: InMemoryLog
) -> None:
    with ScriptedServer(lambda body: "yes") as server:
        hub = recorder.wrap(await open_hub())
        members = await joined(hub, team(server.url))
        await on_channel(hub, members, "Ready?", relay(members, 3))
        await hub.close()
    recorder.flush()
    coder, critic = log.turns
    assert critic.depends_on == [coder.turn_id]
