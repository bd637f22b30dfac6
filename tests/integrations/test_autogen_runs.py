"""Episodes of AutoGen teams: automatic, explicit, parallel, broken off; the app stays as it was."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import weakref
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import ChatAgent, TaskResult, Team
from autogen_agentchat.conditions import MaxMessageTermination, TextMentionTermination
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat, SelectorGroupChat
from autogen_core import CancellationToken, SingleThreadedAgentRuntime
from autogen_ext.models.openai import OpenAIChatCompletionClient

from marft_agents.errors import ConfigError, IntegrationError, MissingExtraError
from marft_agents.recording import EpisodeHandle, MarftRecorder
from marft_agents.schema import EpisodeEnded, EpisodeStarted, RewardEvent, Turn
from marft_agents.testing import InMemoryLog, Reply, ScriptedServer
from marft_agents_autogen.runs import ending
from tests.integrations.autogen_kit import agent, model, round_robin, said
from tests.recording.kit import recording


def _ends(log: InMemoryLog) -> list[tuple[str, str | None]]:
    return [(e.reason, e.detail) for e in log.of(EpisodeEnded)]


def _agents(turns: list[Turn]) -> list[str]:
    return [t.agent for t in turns]


async def test_each_run_is_an_episode_and_a_limit_truncates_it() -> None:
    with recording() as (server, recorder, log):
        team = recorder.wrap(round_robin(server.url, turns=3))
        await team.run(task="One")
        await team.reset()
        await team.run(task=[TextMessage(content="Two", source="boss")])
    assert [e.task for e in log.of(EpisodeStarted)] == [
        "One",
        [{"source": "boss", "content": "Two"}],
    ]
    assert {str(e.runtime).split()[0] for e in log.of(EpisodeStarted)} == {"autogen-agentchat"}
    assert [reason for reason, _ in _ends(log)] == ["truncated"] * 2
    assert str(_ends(log)[0][1]).startswith("Maximum number of messages 3 reached")
    assert len({t.episode_id for t in log.turns}) == 2


async def test_a_limit_can_be_the_designed_end() -> None:
    with recording() as (server, recorder, log):
        by_wrap = recorder.wrap(round_robin(server.url, turns=2), end="terminated")
        await by_wrap.run(task="x")
        team = recorder.wrap(round_robin(server.url, turns=2))
        async with recorder.episode() as episode:
            episode.end("terminated")
            await team.run(task="x")
        async with recorder.episode():
            await by_wrap.run(task="x")
    assert [reason for reason, _ in _ends(log)] == ["terminated"] * 3


@pytest.mark.parametrize(
    ("stop_reason", "want"),
    [
        ("Maximum number of messages 3 reached, current message count: 3", "truncated"),
        ("Maximum number of turns 2 reached.", "truncated"),
        ("Timeout of 0.5 seconds reached", "truncated"),
        ("Max rounds reached.", "truncated"),
        (
            "Token usage limit reached, total token count: 9, prompt token count: 5,"
            " completion token count: 4., Timeout of 3 seconds reached",
            "truncated",
        ),
        ("Text 'TERMINATE' mentioned", "terminated"),
        (
            "Text 'TERMINATE' mentioned, Maximum number of messages 3 reached,"
            " current message count: 3",
            "terminated",
        ),
        (None, "terminated"),
    ],
)
def test_stop_reasons(stop_reason: str | None, want: str) -> None:
    assert ending(stop_reason) == want


async def test_the_real_conditions_say_what_the_mapping_expects() -> None:
    with recording(["TERMINATE", "a", "b"]) as (server, recorder, log):
        stop = TextMentionTermination("TERMINATE") | MaxMessageTermination(3)
        members: list[ChatAgent | Team] = [agent("planner", server.url)]
        team = recorder.wrap(RoundRobinGroupChat(members, termination_condition=stop))
        await team.run(task="x")
        limited: list[ChatAgent | Team] = [agent("coder", server.url)]
        await recorder.wrap(RoundRobinGroupChat(limited, max_turns=2)).run(task="x")
    assert [reason for reason, _ in _ends(log)] == ["terminated", "truncated"]


async def test_an_explicit_episode_holds_several_runs_and_a_late_reward() -> None:
    with recording() as (server, recorder, log):
        team = recorder.wrap(round_robin(server.url, turns=2))
        async with recorder.episode(task="t", metadata={"split": "train"}) as episode:
            await team.run(task="x")
            await team.run(task="y")
        recorder.reward(episode.id, 0.7, agent="coder", source="review")
    assert len({e.episode_id for e in log.events}) == 1
    assert _ends(log)[0][0] == "truncated" and len(log.turns) == 2
    assert log.of(RewardEvent)[0].agent == "coder"


async def test_on_end_may_reward_an_automatic_episode() -> None:
    def score(episode: EpisodeHandle, result: TaskResult) -> None:
        episode.reward(float(len(result.messages)))
        episode.end("terminated", "scored")

    with recording() as (server, recorder, log):
        await recorder.wrap(round_robin(server.url, turns=3), on_end=score).run(task="x")
    assert log.of(RewardEvent)[0].value == 3.0
    assert _ends(log) == [("terminated", "scored")]


async def test_a_failing_on_end_is_not_the_apps_problem(caplog: pytest.LogCaptureFixture) -> None:
    def bad(*_: Any) -> None:
        raise RuntimeError("no score")

    with recording(raise_errors=False) as (server, recorder, log):
        team = recorder.wrap(round_robin(server.url, turns=2), on_end=bad)
        assert (await team.run(task="x")).stop_reason
    assert "could not call on_end" in caplog.text and len(_ends(log)) == 1


async def test_parallel_teams_do_not_mix() -> None:
    with recording() as (server, recorder, log):

        async def one(i: int) -> None:
            team = recorder.wrap(round_robin(server.url, turns=4))
            if i % 2:
                async with recorder.episode(id=f"explicit-{i}"):
                    await team.run(task=f"task {i}")
            else:
                await team.run(task=f"task {i}")

        await asyncio.gather(*(one(i) for i in range(4)))
    by_episode: dict[str, list[Turn]] = {}
    for turn in log.turns:
        by_episode.setdefault(turn.episode_id, []).append(turn)
    assert len(by_episode) == 4
    for turns in by_episode.values():
        assert _agents(turns) == ["planner", "coder", "planner"]
        assert [t.index for t in turns] == [0, 1, 2]
        assert len({t.messages[1]["content"] for t in turns}) == 1
        assert turns[2].depends_on == [turns[0].turn_id, turns[1].turn_id]


async def test_a_runtime_started_elsewhere_does_not_mix_episodes() -> None:
    with recording() as (server, recorder, log):
        runtime = SingleThreadedAgentRuntime()
        async with recorder.episode(id="around the runtime"):
            runtime.start()

        async def one(i: int) -> None:
            members: list[ChatAgent | Team] = [agent("planner", server.url)]
            stop = MaxMessageTermination(3)
            team = RoundRobinGroupChat(members, termination_condition=stop, runtime=runtime)
            async with recorder.episode(id=f"e{i}"):
                await recorder.wrap(team).run(task=f"task {i}")

        await asyncio.gather(*(one(i) for i in range(3)))
        await runtime.stop()
    assert sorted({t.episode_id for t in log.turns}) == ["e0", "e1", "e2"]
    assert all(t.messages[1]["content"] == f"task {t.episode_id[1:]}" for t in log.turns)


@pytest.mark.parametrize("stream", [False, True])
async def test_one_client_shared_by_all_agents(stream: bool) -> None:
    with recording() as (server, recorder, log):
        client = model("base", server.url)
        names = ("planner", "coder", "critic")
        members: list[ChatAgent | Team] = [
            AssistantAgent(n, client, model_client_stream=stream) for n in names
        ]
        stop = MaxMessageTermination(4)
        team = SelectorGroupChat(members, client, termination_condition=stop)
        result = await recorder.wrap(team).run(task="x")
    acts = [t for t in log.turns if t.kind == "act"]
    assert _agents(acts) == [m.source for m in result.messages[1:]]
    selections = [t for t in log.turns if t.kind == "select"]
    assert [t.selected_by for t in acts] == [t.turn_id for t in selections]
    assert {t.agent for t in selections} == {"SelectorGroupChatManager"}
    assert [t.text for t in selections] == _agents(acts)
    assert all(not t.trainable for t in selections) and all(t.trainable for t in acts)


async def test_models_sends_one_agent_to_its_adapter() -> None:
    with recording(models={"planner": "planner-lora"}) as (server, recorder, log):
        client = model("base", server.url)
        members: list[ChatAgent | Team] = [AssistantAgent(n, client) for n in ("planner", "coder")]
        team = RoundRobinGroupChat(members, termination_condition=MaxMessageTermination(3))
        await recorder.wrap(team).run(task="x")
    assert [r.body["model"] for r in server.requests] == ["planner-lora", "base"]
    assert [t.adapter_start for t in log.turns] == ["planner-lora", "base"]


async def test_wrap_after_a_first_run() -> None:
    with recording() as (server, recorder, log):
        names = ("planner", "coder", "critic")
        members: list[ChatAgent | Team] = [agent(n, server.url) for n in names]
        team = SelectorGroupChat(
            members, model("base", server.url), termination_condition=MaxMessageTermination(3)
        )
        await team.run(task="x")
        await team.reset()
        recorder.wrap(team)
        await team.run(task="y")
    assert [t.kind for t in log.turns] == ["select", "act", "select", "act"]


async def test_the_team_stays_usable_as_before() -> None:
    with recording() as (server, recorder, log):
        plain = round_robin(server.url)
        team = recorder.wrap(round_robin(server.url))
        assert type(team) is type(plain)
        assert team.dump_component() == plain.dump_component()
        client: Any = vars(team._participants[0])["_model_client"]  # pyright: ignore[reportPrivateUsage]
        assert isinstance(client, OpenAIChatCompletionClient)
        assert type(copy.copy(client)) is OpenAIChatCompletionClient
        await team.run(task="x")
        state = await team.save_state()
        loaded = RoundRobinGroupChat.load_component(team.dump_component())
        await loaded.load_state(state)
        setattr(client, "mark", 1)  # noqa: B010 no attribute of its class
        assert vars(vars(client)["_marft_inner"])["mark"] == 1
    assert len(log.turns) == 3


async def test_close_takes_everything_off_and_another_recorder_may_come() -> None:
    with ScriptedServer() as server:
        names = ("planner", "coder", "critic")
        members: list[ChatAgent | Team] = [agent(n, server.url) for n in names]
        team = SelectorGroupChat(
            members, model("base", server.url), termination_condition=MaxMessageTermination(3)
        )
        before = [dict(vars(m)) for m in (team, *members)]
        first, second = InMemoryLog(), InMemoryLog()
        with MarftRecorder(log=first) as recorder:
            recorder.wrap(team)
            await team.run(task="x")
            with MarftRecorder(log=second) as other, pytest.raises(IntegrationError, match="close"):
                other.wrap(team)
        after = [vars(m) for m in (team, *members)]
        assert [b.keys() for b in before] == [a.keys() for a in after]
        assert all(
            a[k] is b[k] for b, a in zip(before, after, strict=True) for k in b if "client" in k
        )
        managers = vars(vars(team)["_runtime"])["_instantiated_agents"].values()
        held = [vars(m)["_model_client"] for m in managers if "_model_client" in vars(m)]
        assert [type(c) for c in held] == [OpenAIChatCompletionClient]
        await team.run(task="not recorded")
        with MarftRecorder(log=second) as recorder:
            recorder.wrap(team)
            await team.run(task="y")
    assert [len(log.turns) for log in (first, second)] == [4, 4]
    assert [e.task for e in second.of(EpisodeStarted)] == ["y"]


async def test_recording_keeps_no_team_alive() -> None:
    with recording() as (server, recorder, _):
        team: Any = recorder.wrap(round_robin(server.url, turns=2))
        await team.run(task="x")
        alive = weakref.ref(team)
        clients = [weakref.ref(p._model_client._client) for p in team._participants]
        del team
        gc.collect()
        assert alive() is None and all(c() is None for c in clients)


async def test_a_failing_model_call_fails_the_run_and_the_app_sees_its_error() -> None:
    script = ["fine", Reply(status=400, error="maximum context length is 512 tokens")]
    with recording(script) as (server, recorder, log):
        team = recorder.wrap(round_robin(server.url))
        with pytest.raises(Exception, match="maximum context length"):
            await team.run(task="x")
    assert [t.error is None for t in log.turns] == [True, False]
    assert log.turns[0].trainable
    ((reason, detail),) = _ends(log)
    assert reason == "failed" and "maximum context length" in str(detail)


@pytest.mark.parametrize("stream", [False, True])
async def test_cancellation_is_a_failed_turn_and_a_failed_end(stream: bool) -> None:
    with recording([Reply("never", hang=True)]) as (server, recorder, log):
        team = recorder.wrap(round_robin(server.url, stream=stream))
        token = CancellationToken()
        run = asyncio.create_task(team.run(task="x", cancellation_token=token))
        while not server.requests:
            await asyncio.sleep(0.01)
        token.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        while not log.turns:
            await asyncio.sleep(0.01)
    (turn,) = log.turns
    assert turn.error is not None and "CancelledError" in turn.error and not turn.token_ids
    assert _ends(log) == [("failed", "CancelledError")]


async def test_a_run_that_nobody_reads_to_its_end_has_failed() -> None:
    with recording() as (server, recorder, log):
        team = recorder.wrap(round_robin(server.url))
        stream = team.run_stream(task="x")
        async for _ in stream:
            break
        await stream.aclose()
        assert recorder.current() is None
    assert _ends(log) == [("failed", "the run was left before its result")]


async def test_an_agent_alone_is_a_run_too() -> None:
    with recording() as (server, recorder, log):
        alone = recorder.wrap(agent("planner", server.url))
        result = await alone.run(task="x")
        assert said(result)[1][1] == "planner"
        async for _ in alone.run_stream(task="y"):
            pass
    assert [e.task for e in log.of(EpisodeStarted)] == ["x", "y"]
    assert _agents(log.turns) == ["planner", "planner"]
    assert _ends(log) == [("terminated", None)] * 2


async def test_a_call_outside_any_run_passes_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with recording() as (server, recorder, log):
        alone = recorder.wrap(agent("planner", server.url))
        message = TextMessage(content="x", source="user")
        with caplog.at_level(logging.WARNING):
            assert (await alone.on_messages([message], CancellationToken())).chat_message
        async with recorder.episode():
            await alone.on_messages([message], CancellationToken())
    assert len(log.turns) == 1
    assert "outside a recorded run" in caplog.text


def test_a_wrap_that_is_refused_leaves_nothing_behind() -> None:
    with recording() as (server, one, _), recording() as (_, two, _):
        taken, free = agent("planner", server.url), agent("coder", server.url)
        one.wrap(taken)
        team = RoundRobinGroupChat([free, taken])
        before = [set(vars(o)) for o in (team, free)]
        with pytest.raises(IntegrationError, match="'planner' is still recorded"):
            two.wrap(team)
        assert [set(vars(o)) for o in (team, free)] == before


def test_only_teams_and_agents_are_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    with recording() as (server, recorder, _):
        with pytest.raises(IntegrationError, match="OpenAIChatCompletionClient; of AutoGen"):
            recorder.wrap(model("x", server.url))
        with pytest.raises(IntegrationError, match=r"type builtins\.dict; supported.*autogen"):
            recorder.wrap({})
        monkeypatch.setitem(__import__("sys").modules, "marft_agents_autogen.walk", None)
        with pytest.raises(MissingExtraError, match=r"pip install 'marft-agents\[agentchat\]'"):
            recorder.wrap(round_robin(server.url))


def test_mistakes_in_wrapping_name_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with recording() as (server, recorder, _):
        team = round_robin(server.url)
        before = set(vars(team))
        with pytest.raises(ConfigError, match=r"unknown option; .* end, on_end"):
            recorder.wrap(team, ending="terminated")
        with pytest.raises(ConfigError, match="one of auto, terminated"):
            recorder.wrap(team, end="truncated")
        monkeypatch.setattr("importlib.metadata.version", lambda name: "0.8.1")  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType] a fake
        with pytest.raises(IntegrationError, match=r"0\.8\.1 is installed.*>=0\.4\.9,<0\.8"):
            recorder.wrap(team)
        assert set(vars(team)) == before
