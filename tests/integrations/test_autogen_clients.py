"""Model clients of every kind and in every place: each call is the turn of who asked."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_core import InMemoryStore
from autogen_core.models import ChatCompletionClient, UserMessage
from autogen_ext.models.cache import ChatCompletionCache
from autogen_ext.models.openai import AzureOpenAIChatCompletionClient
from autogen_ext.models.replay import ReplayChatCompletionClient

from marft_agents.schema import EpisodeStarted
from marft_agents.testing import Reply, ScriptedServer
from tests.integrations.autogen_kit import INFO, Custom, agent, model, script, team, texts
from tests.recording.kit import HELLO, async_sdk, recording


def _pair(*clients: Any, stream: bool = False) -> Any:
    names = ("planner", "coder", "critic")
    members = [
        AssistantAgent(name, client, model_client_stream=stream)
        for name, client in zip(names, clients, strict=False)
    ]
    return team(*members, turns=len(members))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cache_is_passed_by_and_stays_what_it_was(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "marft_agents"),
        recording(["fresh", "again", "the app's own"]) as (server, recorder, log),
    ):
        store: Any = InMemoryStore()
        cache = ChatCompletionCache(model("planner", server.url), store)
        before = dict(vars(cache))
        planner = recorder.wrap(AssistantAgent("planner", cache, model_client_stream=stream))
        for answer in ("fresh", "again"):
            result = await planner.run(task="same")
            await planner.on_reset(None)  # pyright: ignore[reportArgumentType] not looked at
            assert texts(result.messages)[-1] == answer
        assert (
            vars(cache) == before and not vars(store)["_store"] if hasattr(store, "_store") else 1
        )
        question = [UserMessage(content="mine", source="user")]
        own = [await cache.create(question) for _ in range(2)]
    assert [(r.content, r.cached) for r in own] == [("the app's own", True)] * 2
    assert [(t.cached, t.trainable) for t in log.turns] == [(False, True)] * 2
    assert len(server.requests) == 3
    assert [r.message.count("passed by") for r in caplog.records] == [1]


@pytest.mark.parametrize("stream", [False, True])
async def test_case_04_a_kept_cache_answers_and_its_replies_are_marked_and_said(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 04: no HTTP call happened, and after a swap the cache would go on answering so."""
    with (
        caplog.at_level(logging.WARNING, "marft_agents"),
        recording(["fresh"], keep_caches=True) as (server, recorder, log),
    ):
        store: Any = InMemoryStore()
        for number in range(3):
            client = ChatCompletionCache(model("planner", server.url), store)
            planner = AssistantAgent("planner", client, model_client_stream=stream)
            result = await recorder.wrap(planner).run(task="same")
            assert texts(result.messages)[-1] == "fresh"
            assert len(caplog.records) == min(number, 1), "said once, at the first cached reply"
    fresh, cached, _ = log.turns
    assert "'planner' was answered from a cache" in caplog.text and "after a swap" in caplog.text
    assert (fresh.cached, fresh.trainable) == (False, True)
    assert (cached.cached, cached.text) == (True, "fresh")
    assert cached.token_ids is None and cached.response_id is None
    assert [m["role"] for m in cached.messages] == ["system", "user"]
    assert len(server.requests) == 1


@pytest.mark.parametrize("calls_itself_cached", [False, True])
async def test_a_client_that_is_not_captured_is_said_and_untrainable(
    calls_itself_cached: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with recording() as (_, recorder, log):
        client = ReplayChatCompletionClient(["one thing", "another"], model_info=INFO)
        client.set_cached_bool_value(calls_itself_cached)
        with caplog.at_level(logging.WARNING, "marft_agents"):
            await recorder.wrap(_pair(client, client)).run(task="go")
    first, second = log.turns
    assert (first.text, first.cached, first.trainable) == ("one thing", False, False)
    assert second.depends_on == [first.turn_id]
    assert caplog.text.count("cannot be trained on") == 1


async def test_an_azure_client() -> None:
    with recording(script()) as (server, recorder, log):
        client = AzureOpenAIChatCompletionClient(
            azure_deployment="planner",
            azure_endpoint=server.url.removesuffix("/v1"),
            api_version="2024-06-01",
            api_key="sk-test",
            model="planner",
            model_info=INFO,
        )
        await recorder.wrap(AssistantAgent("planner", client)).run(task="go")
    (turn,) = log.turns
    assert turn.agent == "planner" and turn.text and turn.token_ids
    assert "/deployments/planner/chat/completions" in server.requests[0].path


class Fallback(ReplayChatCompletionClient):
    """A user's own client: the first of its clients that answers."""

    def __init__(self, *clients: ChatCompletionClient) -> None:
        super().__init__([], model_info=INFO)
        self.clients = list(clients)

    async def create(self, *args: Any, **kwargs: Any) -> Any:
        for client in self.clients[:-1]:
            try:
                return await client.create(*args, **kwargs)
            except openai.OpenAIError:
                continue
        return await self.clients[-1].create(*args, **kwargs)


async def test_a_wrapper_of_several_clients_is_one_call_of_its_agent() -> None:
    with recording(script(big=Reply(status=400))) as (server, recorder, log):
        client = Fallback(model("big", server.url), model("small", server.url))
        await recorder.wrap(_pair(client)).run(task="go")
    (turn,) = log.turns
    assert (turn.agent, turn.model, turn.trainable) == ("planner", "small", True)


class Chooser(Custom):
    """Asks every client that it holds, in whatever it holds them."""

    async def answer(self, messages: Any, cancellation_token: Any) -> str:
        held = vars(self)["clients"]
        clients = held.values() if isinstance(held, dict) else held
        asked: list[Any] = [self.ask(client, messages) for client in clients]
        return " ".join(await asyncio.gather(*asked))


@pytest.mark.parametrize("kind", [dict, list])
async def test_clients_in_a_container_that_agents_share_are_each_speakers_own(kind: Any) -> None:
    with recording() as (server, recorder, log):
        fast, slow = model("fast", server.url), model("slow", server.url)
        clients: Any = {"fast": fast, "slow": slow} if kind is dict else [fast, slow]
        names = ("planner", "coder")
        pair = team(*(Chooser(name, clients=clients) for name in names), turns=2)
        await recorder.wrap(pair).run(task="go")
    assert [t.agent for t in log.turns] == ["planner", "planner", "coder", "coder"]
    assert {t.model for t in log.turns} == {"fast", "slow"}
    held = list(clients.values()) if kind is dict else clients
    assert held[0] is fast and held[1] is slow


class Brain:
    """A user's own object around a client."""

    def __init__(self, client: ChatCompletionClient) -> None:
        self.client = client


class Thinking(Custom):
    """Asks the client of its brain, and one that its class has."""

    common: ChatCompletionClient

    async def answer(self, messages: Any, cancellation_token: Any) -> str:
        thought = await self.ask(vars(self)["brain"].client, messages)
        return thought + await self.ask(self.common, messages)


async def test_clients_of_a_helper_and_of_a_class_are_the_speakers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with recording() as (server, recorder, log):
        own, common = model("own", server.url), model("common", server.url)
        monkeypatch.setattr(Thinking, "common", common, raising=False)
        brain = Brain(own)
        pair = team(*(Thinking(name, brain=brain) for name in ("planner", "coder")), turns=2)
        await recorder.wrap(pair).run(task="go")
        async with recorder.episode(id="a judge's"):
            assert await brain.client.create([UserMessage(content="fair?", source="user")])
    assert [(t.agent, t.model) for t in log.turns] == [
        (name, client) for name in ("planner", "coder") for client in ("own", "common")
    ]
    assert brain.client is own and Thinking.common is common


@dataclass(frozen=True)
class Frozen:
    client: ChatCompletionClient


async def test_a_helper_that_cannot_be_touched_is_left_alone() -> None:
    with recording() as (server, recorder, log):
        thinker = Thinking("planner", brain=Frozen(model("own", server.url)))
        vars(thinker)["common"] = vars(thinker)["brain"].client
        before = dict(vars(vars(thinker)["brain"]))
        await recorder.wrap(team(thinker, turns=1)).run(task="go")
        assert vars(vars(thinker)["brain"]) == before
    assert [t.agent for t in log.turns] == ["planner"]


class Raw(Custom):
    """Speaks through an openai SDK object."""

    async def answer(self, messages: Any, cancellation_token: Any) -> str:
        held = vars(self)
        asked: Any = [*HELLO, {"role": "user", "content": str(messages[-1].content)}]
        reply = await held["sdk"].chat.completions.create(model=self.name, messages=asked)
        return str(reply.choices[0].message.content)


async def test_an_sdk_object_that_agents_share_speaks_for_the_speaker() -> None:
    with recording() as (server, recorder, log):
        async with async_sdk(server) as sdk:
            pair = team(Raw("planner", sdk=sdk), Raw("coder", sdk=sdk), turns=2)
            await recorder.wrap(pair).run(task="go")
    first, second = log.turns
    assert [(t.agent, t.model) for t in log.turns] == [("planner",) * 2, ("coder",) * 2]
    assert second.depends_on == [first.turn_id] and first.trainable


async def test_an_agent_whose_model_is_out_of_sight_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Hidden(Custom):
        async def answer(self, messages: Any, cancellation_token: Any) -> str:
            return await self.ask(hidden, messages)

    with recording() as (server, recorder, log), caplog.at_level(logging.WARNING, "marft_agents"):
        hidden = model("hidden", server.url)
        await recorder.wrap(team(Hidden("planner"), Hidden("coder"), turns=2)).run(task="go")
    assert log.turns == [] and len(log.of(EpisodeStarted)) == 1
    assert caplog.text.count("no model call of it was seen") == 1


async def test_an_agent_on_another_api_is_said_when_it_is_wrapped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agents = pytest.importorskip("autogen_ext.agents.openai", exc_type=ImportError)
    with recording() as (server, recorder, _), caplog.at_level(logging.WARNING, "marft_agents"):
        async with async_sdk(server) as sdk:
            assistant = agents.OpenAIAssistantAgent("helper", "helps", sdk, "m", "be brief")
            recorder.wrap(team(assistant, agent("coder", server.url)))
    assert (
        "'helper' is of the class OpenAIAssistantAgent" in caplog.text
        and "not recorded" in caplog.text
    )


async def test_what_is_wrapped_stays_its_clients_own_kind() -> None:
    with ScriptedServer() as server, recording() as (_, recorder, _log):
        client = model("planner", server.url)
        planner = recorder.wrap(AssistantAgent("planner", client))
        held: Any = vars(planner)["_model_client"]
        assert type(held) is not type(client) and isinstance(held, type(client))
        assert held.dump_component() == client.dump_component()
        assert held.model_info == client.model_info
        assert held.total_usage() == client.total_usage()
    assert vars(planner)["_model_client"] is client
