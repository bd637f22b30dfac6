"""What is added to a request, to which server, and what is read from a reply."""

from __future__ import annotations

import logging
from typing import Any

import openai
import pytest

from marft_agents.recording import server as server_module
from marft_agents.schema import EpisodeStarted
from marft_agents.testing import Reply, ScriptedServer
from tests.recording.kit import HELLO, ask, async_sdk, recording, sdk

ADDED = {"return_token_ids", "logprobs"}


def _plain(script: Any, **request: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """The request that the server gets without a recorder."""
    with ScriptedServer(script) as server:
        ask(sdk(server), **request)
    return server.requests[0].body, server.requests[0].headers


def test_two_fields_and_two_headers_are_all_that_is_added() -> None:
    request: dict[str, Any] = {"temperature": 1e-05, "metadata": {"ü": "é"}, "extra_body": {"z": 1}}
    plain, plain_headers = _plain(["a"], **request)
    with recording(["a"]) as (server, recorder, _):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode(id="e 1"):
            ask(client, **request)
    sent = server.requests[0]
    assert {k: v for k, v in sent.body.items() if k not in ADDED} == plain
    assert sent.body["return_token_ids"] is True and sent.body["logprobs"] is True
    added = {k: v for k, v in sent.headers.items() if k not in plain_headers}
    assert added == {"x-marft-episode": "e%201", "x-marft-agent": "planner"}
    changing = {"content-length", "host", *added}
    assert {k: v for k, v in sent.headers.items() if k not in changing} == {
        k: v for k, v in plain_headers.items() if k not in changing
    }


def test_what_the_app_set_is_respected() -> None:
    with recording(["a"]) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode():
            ask(client, logprobs=False, extra_body={"return_token_ids": True})
    assert server.requests[0].body["logprobs"] is False
    assert log.turns[0].untrainable_reason == "no log-probabilities"


def test_a_server_of_another_kind_gets_the_request_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, plain_headers = _plain(["a"])
    with recording(["a", "b"], owned_by="openai") as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode(), caplog.at_level(logging.WARNING):
            ask(client)
            ask(client)
    assert server.requests[0].body == plain
    assert server.requests[0].headers.keys() == plain_headers.keys()
    assert server.listings == 1
    (record,) = caplog.records
    assert "owners ['openai']" in record.getMessage() and 'inject="always"' in record.getMessage()
    assert not log.turns[0].trainable and log.turns[0].text == "a"


@pytest.mark.parametrize("owner", ["vllm", "marft-agents"])
def test_a_server_is_asked_once(owner: str) -> None:
    with recording(["a"] * 3, owned_by=owner) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode():
            for _ in range(3):
                ask(client)
    assert server.listings == 1
    assert all(t.trainable for t in log.turns)


@pytest.mark.parametrize(("inject", "added"), [("always", ADDED), ("never", set[str]())])
def test_inject_can_be_decided_by_the_user(inject: Any, added: set[str]) -> None:
    with recording(["a"], owned_by="openai", inject=inject) as (server, recorder, _):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode():
            ask(client)
    assert server.requests[0].body.keys() & ADDED == added
    assert server.listings == 0


class NoListing(ScriptedServer):
    """Too busy to list its models."""

    asked = 0

    @property
    def listings(self) -> int:
        self.asked += 1
        self.stopping.wait()
        return 0

    @listings.setter
    def listings(self, value: int) -> None: ...


async def test_a_server_too_busy_to_be_asked_is_asked_once_and_taken_at_its_deeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "TIMEOUT_S", 0.05)
    with NoListing(["a", "b"]) as busy, recording([]) as (_, recorder, log):
        async with async_sdk(busy) as client, recorder.episode():
            recorder.attach_client(client, "planner")
            for _ in range(2):
                await client.chat.completions.create(model="planner", messages=HELLO)
    assert busy.asked == 1
    assert [(t.text, t.trainable) for t in log.turns] == [("a", True), ("b", True)]


def _picky(body: dict[str, Any]) -> Reply | str:
    """As OpenAI answers unknown fields."""
    if "return_token_ids" in body:
        return Reply(status=400, error="Unrecognized request argument supplied")
    return Reply(status=400, error="too long") if body["model"] == "long" else "fine"


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_added_fields_never_reaches_the_app(
    stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "TIMEOUT_S", 0.05)
    with NoListing(_picky) as busy, recording([]) as (_, recorder, log):
        recorder.attach_client(client := sdk(busy), "planner")
        with recorder.episode(), caplog.at_level(logging.WARNING):
            with pytest.raises(openai.BadRequestError, match="too long"):
                ask(client, "long", stream=stream)
            for _ in range(2):
                reply = ask(client, stream=stream)
                if stream:
                    list(reply)
    assert [("return_token_ids" in r.body) for r in busy.requests] == [True, False] * 2 + [False]
    assert [(t.text, t.attempt) for t in log.turns] == [(None, 1), ("fine", 1), ("fine", 1)]
    assert "refused them and took the request without them" in caplog.text


def test_models_reroutes_one_agent_and_the_app_sees_the_name_it_asked_for() -> None:
    with recording(["a", "b"], models={"planner": "planner-lora"}) as (server, recorder, log):
        recorder.attach_client(first := sdk(server), "planner")
        recorder.attach_client(second := sdk(server), "coder")
        with recorder.episode():
            assert ask(first, "gpt-4o").model == "gpt-4o"
            assert ask(second, "gpt-4o").model == "gpt-4o"
    assert [r.body["model"] for r in server.requests] == ["planner-lora", "gpt-4o"]
    assert [(t.model, t.adapter_start) for t in log.turns] == [
        ("gpt-4o", "planner-lora"),
        ("gpt-4o", "gpt-4o"),
    ]


def test_models_works_without_token_fields() -> None:
    models = {"planner": "planner-lora"}
    with recording(["a"], models=models, inject="never") as (server, recorder, _):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode():
            ask(client)
    assert server.requests[0].body["model"] == "planner-lora"
    assert "x-marft-agent" not in server.requests[0].headers


HEADERS = {
    "X-Marft-Adapter": "planner@v3",
    "X-Marft-Logprobs-Mode": "processed_logprobs",
    "X-Marft-Sampling-Defaults": '{"temperature": 1.0, "top_p": 0.9, "seed": null}',
}


@pytest.mark.parametrize("stream", [False, True])
def test_the_servers_headers_say_version_mode_and_defaults(stream: bool) -> None:
    with recording([Reply("a", headers=HEADERS)]) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode():
            reply = ask(client, temperature=0.5, max_completion_tokens=7, stream=stream)
            if stream:
                list(reply)
    (turn,) = log.turns
    assert (turn.adapter_start, turn.adapter_end) == ("planner@v3", "planner@v3")
    assert turn.logprob_mode == "processed"
    assert (turn.sampling.temperature, turn.sampling.top_p) == (0.5, 0.9)
    assert (turn.sampling.max_tokens, turn.sampling.seed) == (7, None)


def test_a_stream_that_changes_model_says_both_versions() -> None:
    def chunk(model: str, finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": finish}
        return {"id": "chatcmpl-1", "model": model, "choices": [choice]}

    chunks = [chunk("planner@v3"), chunk("planner@v4", "stop")]
    with recording([Reply(chunks=chunks)]) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode():
            list(ask(client, stream=True))
    assert (log.turns[0].adapter_start, log.turns[0].adapter_end) == ("planner@v3", "planner@v4")


def test_an_error_in_the_middle_of_a_stream_is_the_turns_error() -> None:
    broken: list[dict[str, Any]] = [
        {"id": "c", "model": "m", "choices": [{"index": 0, "delta": {"content": "a"}}]},
        {"error": {"message": "engine died", "code": 500}},
    ]
    with recording([Reply(chunks=broken)]) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode(), pytest.raises(openai.APIError, match="engine died"):
            list(ask(client, stream=True))
    assert log.turns[0].error == "engine died" and not log.turns[0].complete


def test_no_api_key_reaches_the_log() -> None:
    refused = Reply(status=401, error="Incorrect API key provided: sk-test")
    with recording([refused, "ok"]) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        config = {"llm_config": {"api_key": "sk-test", "model": "planner"}}
        with recorder.episode(task=config, metadata=config):
            with pytest.raises(openai.AuthenticationError, match="sk-test"):
                ask(client)
            ask(client)
    assert log.turns[0].error == "HTTP 401: Incorrect API key provided: ***"
    assert "sk-test" not in "".join(e.model_dump_json() for e in log.events)
    started = log.of(EpisodeStarted)[0]
    assert started.metadata == {"llm_config": {"api_key": "[redacted:api-key]", "model": "planner"}}


def test_a_key_that_is_no_secret_does_not_spoil_the_error() -> None:
    with recording([Reply(status=400, error="maximum context")]) as (server, recorder, log):
        recorder.attach_client(client := sdk(server, api_key="x"), "planner")
        with recorder.episode(), pytest.raises(openai.BadRequestError):
            ask(client)
    assert log.turns[0].error == "HTTP 400: maximum context"


def test_a_reply_that_is_no_completion_is_a_failed_turn() -> None:
    odd = Reply(body={"choices": "none", "usage": [], "id": 5})
    with recording([odd]) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode():
            ask(client)
    assert not log.turns[0].trainable
