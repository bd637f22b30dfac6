"""Model calls: caches, clients of every kind, failures, and what others ask inside a reply."""

from __future__ import annotations

import importlib
import json
import logging
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from marft_agents.testing import Reply, ScriptedServer
from tests.runtimes.classic.kit import (
    OLD,
    VERSION,
    ConversableAgent,
    assistant,
    config,
    endings,
    group,
    needs,
    recording,
    told,
    user,
)


def ask(agent: Any, message: str = "Hm?", **options: Any) -> Any:
    return user().initiate_chat(agent, message=message, max_turns=1, silent=True, **options)


def cached(url: str, **options: Any) -> Any:
    """An agent on 0.2's default disk cache, or on the seed that later versions want said."""
    llm_config = config("coder", url, cache_seed=41)
    if OLD:
        del llm_config["cache_seed"]
    return assistant("coder", url, llm_config=llm_config, **options)


def _disk_cache() -> pytest.MarkDecorator:
    return needs("diskcache")


@_disk_cache()
def test_a_cache_is_passed_by_while_recording_and_stays_as_it_was() -> None:
    with recording() as (server, recorder, log):
        coder = cached(server.url)
        before = repr(coder.llm_config)
        entries = [dict(e) for e in coder.client._config_list]
        recorder.wrap(coder)
        for _ in range(2):
            ask(coder)
        assert len(server.requests) == 2 and not Path(".cache").exists()
        assert all(t.trainable and not t.cached for t in log.turns)
        recorder.close()
        assert coder.client._config_list == entries
        assert repr(coder.llm_config) == before
        for _ in range(2):
            ask(coder)
        assert len(server.requests) == 3 and Path(".cache").exists()


@_disk_cache()
def test_a_cache_that_is_kept_answers_with_marked_turns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with recording(keep_caches=True) as (server, recorder, log):
        coder = recorder.wrap(cached(server.url))
        with caplog.at_level(logging.WARNING, "marft_agents"):
            for _ in range(3):
                ask(coder)
        assert len(server.requests) == 1
    assert [t.cached for t in log.turns] == [False, True, True]
    assert log.turns[1].text == log.turns[0].text and not log.turns[1].trainable
    said = [r.getMessage() for r in caplog.records if r.name.startswith("marft_agents")]
    assert len([text for text in said if "answered from a cache" in text]) == 1


@_disk_cache()
def test_a_cache_object_is_passed_by_too() -> None:
    from autogen import Cache

    with recording() as (server, recorder, _log):
        coder = recorder.wrap(assistant("coder", server.url))
        with Cache.disk(cache_seed=7) as cache:
            for _ in range(2):
                ask(coder, cache=cache)
        assert len(server.requests) == 2


class Echo:
    """A model client of the app's own."""

    def __init__(self, config: Any, **_options: Any) -> None:
        self.model = config["model"]

    def create(self, params: Any) -> Any:
        message = SimpleNamespace(content="Echo.", function_call=None, tool_calls=None)
        return SimpleNamespace(choices=[SimpleNamespace(message=message)], model=self.model)

    def message_retrieval(self, response: Any) -> list[str]:
        return [choice.message.content for choice in response.choices]

    def cost(self, response: Any) -> float:
        response.cost = 0
        return 0

    @staticmethod
    def get_usage(response: Any) -> dict[str, Any]:
        return {}


def test_a_client_of_the_apps_own_is_logged_without_tokens_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with recording() as (server, recorder, log), caplog.at_level(logging.WARNING, "marft_agents"):
        llm_config = config("coder", server.url, entry={"model_client_cls": "Echo"})
        del llm_config["config_list"][0]["price"]
        coder: Any = assistant("coder", server.url, llm_config=llm_config)
        coder.register_model_client(model_client_cls=Echo)
        recorder.wrap(coder)
        for _ in range(2):
            ask(coder)
    assert [(t.text, t.token_ids, t.cached) for t in log.turns] == [("Echo.", None, False)] * 2
    assert json.dumps(log.turns[0].messages).count("Hm?") == 1
    said = [r.getMessage() for r in caplog.records if "Echo" in r.getMessage()]
    assert len([text for text in said if "asked for no chat completion" in text]) == 1


@needs("autogen.llm_clients")
def test_the_second_generation_of_clients_is_captured() -> None:
    with recording() as (server, recorder, log):
        llm_config = config("coder", server.url, entry={"api_type": "openai_v2"})
        del llm_config["config_list"][0]["price"]
        coder = recorder.wrap(assistant("coder", server.url, llm_config=llm_config))
        ask(coder)
    (turn,) = log.turns
    assert turn.trainable and turn.agent == "coder"


@needs("autogen.oai.openai_responses")
def test_another_api_of_the_same_client_is_uncaptured_and_not_cached(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from autogen.oai.openai_responses import OpenAIResponsesClient

    def answer(self: Any, params: Any) -> Any:
        return Echo({"model": "coder"}).create(params)

    for name in ("message_retrieval", "cost"):
        monkeypatch.setattr(OpenAIResponsesClient, name, vars(Echo)[name])
    monkeypatch.setattr(OpenAIResponsesClient, "create", answer)
    monkeypatch.setattr(OpenAIResponsesClient, "get_usage", staticmethod(Echo.get_usage))
    with recording(keep_caches=True) as (server, recorder, log), caplog.at_level(logging.WARNING):
        llm_config = config("coder", server.url, entry={"api_type": "responses"})
        del llm_config["config_list"][0]["price"]
        ask(recorder.wrap(assistant("coder", server.url, llm_config=llm_config)))
    assert [(t.text, t.cached, t.token_ids) for t in log.turns] == [("Echo.", False, None)]
    assert any("OpenAIResponsesClient" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_multimodal_agent_is_recorded_with_its_image_cut_short(mode: str) -> None:
    pytest.importorskip("PIL", reason=f"the images of autogen {VERSION} need pillow")
    from autogen.agentchat.contrib.multimodal_conversable_agent import MultimodalConversableAgent
    from PIL import Image

    Image.new("RGB", (64, 64)).save("picture.png")
    with recording({"seer": "A black square."}) as (server, recorder, log):
        seer = MultimodalConversableAgent(
            "seer", llm_config=config("seer", server.url), max_consecutive_auto_reply=3
        )
        recorder.wrap(seer)
        if mode == "sync":
            ask(seer, f"What is this? <img {os.path.abspath('picture.png')}>")
        else:
            await user().a_initiate_chat(seer, message="Blind?", max_turns=1, silent=True)
    assert told(log) == [("act", "seer")] and log.turns[0].token_ids


def test_a_second_entry_answers_where_the_first_fails() -> None:
    def script(body: Any) -> Reply | str:
        return Reply(status=400, error="down") if body["model"] == "first" else "Here."

    with recording(script) as (server, recorder, log):
        entries = [config(m, server.url)["config_list"][0] for m in ("first", "second")]
        llm_config = {"config_list": entries, "cache_seed": None}
        ask(recorder.wrap(assistant("coder", server.url, llm_config=llm_config)))
    (turn,) = log.turns
    assert (turn.model, turn.text, turn.attempt, turn.error) == ("second", "Here.", 2, None)


def test_a_server_that_recovers_is_one_turn() -> None:
    script = [Reply(status=500, headers={"retry-after-ms": "1"}), "Here."]
    with recording(script) as (server, recorder, log):
        ask(recorder.wrap(assistant("coder", server.url)))
        assert len(server.requests) == 2
    (turn,) = log.turns
    assert (turn.text, turn.attempt, turn.trainable) == ("Here.", 2, True)


def test_a_failure_is_the_apps_and_a_failed_turn() -> None:
    with recording(lambda _body: Reply(status=400, error="too long")) as (server, recorder, log):
        coder = recorder.wrap(assistant("coder", server.url))
        with pytest.raises(Exception, match="too long"):
            ask(coder)
    assert "too long" in str(log.turns[0].error) and endings(log)[0][0] == "failed"


def test_a_changed_client_is_recorded_as_the_old_one_was() -> None:
    with recording() as (server, recorder, log):
        coder = recorder.wrap(assistant("coder", server.url))
        coder.client = assistant("other", server.url).client
        ask(coder)
    assert [(t.agent, t.model) for t in log.turns] == [("coder", "other")]


def test_agents_may_share_a_client() -> None:
    with recording() as (server, recorder, log):
        planner, coder = (assistant(n, server.url) for n in ("planner", "coder"))
        coder.client = planner.client
        recorder.wrap([planner, coder])
        planner.initiate_chat(coder, message="Hm?", max_turns=2, silent=True)
    assert told(log) == [("act", "coder"), ("act", "planner"), ("act", "coder")]


def test_transforms_change_what_is_read_and_links_follow() -> None:
    from autogen.agentchat.contrib.capabilities import transform_messages, transforms

    with recording({"planner": "A plan with many words.", "coder": "Code."}) as (
        server,
        recorder,
        log,
    ):
        planner, coder = (assistant(n, server.url) for n in ("planner", "coder"))
        named: Any = getattr(transforms, "TextMessageContentName", None)
        if named is None:
            pytest.skip(f"autogen {VERSION} has no TextMessageContentName")
        limit = transforms.MessageHistoryLimiter(max_messages=3)
        both = transform_messages.TransformMessages(
            transforms=[limit, named(position="start")], verbose=False
        )
        both.add_to_agent(coder)
        recorder.wrap([planner, coder])
        coder.initiate_chat(planner, message="Plan it.", max_turns=2, silent=True)
    plan, code = log.turns[:2]
    assert code.agent == "coder" and code.depends_on == [plan.turn_id]
    assert "planner" in str(code.messages[-1]["content"])


def test_a_helper_inside_a_reply_acts_on_its_behalf() -> None:
    script = {"coder": "Code.", "helper": "Think first.", "eye": "A cat."}
    with recording(script) as (server, recorder, log):
        coder, helper = (assistant(n, server.url) for n in ("coder", "helper"))
        eye: Any = assistant("eye", server.url).client

        def think(agent: Any, messages: Any = None, sender: Any = None, config: Any = None) -> Any:
            helper.generate_oai_reply([{"role": "user", "content": "How?"}])
            eye.create(messages=[{"role": "user", "content": "What is on it?"}])
            return False, None

        coder.register_reply([ConversableAgent, None], think, position=0)
        recorder.wrap(coder)
        ask(coder)
    assert told(log) == [("act", "helper"), ("summary", "coder"), ("act", "coder")]
    assert [t.parent_agent for t in log.turns] == ["coder", None, None]
    assert [t.trainable for t in log.turns] == [True, False, True]


@needs("autogen.agentchat.contrib.society_of_mind_agent")
def test_a_society_of_mind_is_a_chat_inside_its_reply() -> None:
    module: Any = importlib.import_module("autogen.agentchat.contrib.society_of_mind_agent")
    script = {"selector": "planner", "planner": "A plan.", "society": "The answer."}
    with recording(script) as (server, recorder, log):
        planner, coder = (assistant(n, server.url) for n in ("planner", "coder"))
        inner = group([planner, coder], server.url, rounds=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            society = module.SocietyOfMindAgent(
                "society", chat_manager=inner, llm_config=config("society", server.url)
            )
        recorder.wrap(society)
        ask(society)
    assert told(log)[0] == ("select", "chat_manager") and told(log)[-1] == ("act", "society")
    inside = [t for t in log.turns if t.agent != "society"]
    assert {t.parent_agent for t in inside} == {"society"}
    assert log.turns[-1].parent_agent is None


@needs("autogen.agentchat.contrib.gpt_assistant_agent")
def test_an_agent_of_the_assistants_api_is_said_to_be_uncaptured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class GPTAssistantAgent(ConversableAgent):
        """Stands for AutoGen's own of that name, which asks another API when it is made."""

    with recording() as (_server, recorder, log), caplog.at_level(logging.WARNING):
        agent: Any = GPTAssistantAgent("helper", llm_config=False, human_input_mode="NEVER")

        def invoke(_agent: Any, **_options: Any) -> Any:
            return True, "From elsewhere."

        agent.register_reply([ConversableAgent, None], invoke, position=0)
        recorder.wrap(agent)
        ask(agent)
    assert [(t.text, t.trainable) for t in log.turns] == [("From elsewhere.", False)]
    said = [r.getMessage() for r in caplog.records if "Assistants API" in r.getMessage()]
    assert len(said) == 1


def test_a_call_outside_of_any_chat_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with recording() as (server, recorder, log), caplog.at_level(logging.WARNING, "marft_agents"):
        coder: Any = recorder.wrap(assistant("coder", server.url))
        for _ in range(2):
            coder.client.create(messages=[{"role": "user", "content": "Hm?"}], agent=coder)
    assert not log.turns
    said = [r.getMessage() for r in caplog.records if "outside of any recorded" in r.getMessage()]
    assert len(said) == 1 and "'coder'" in said[0]


def test_a_server_that_takes_no_fields_gets_none() -> None:
    with ScriptedServer(owned_by="openai") as plain:
        with recording() as (_server, recorder, log):
            ask(recorder.wrap(assistant("coder", plain.url)))
        assert "return_token_ids" not in plain.requests[0].body
    assert told(log) == [("act", "coder")] and not log.turns[0].trainable
