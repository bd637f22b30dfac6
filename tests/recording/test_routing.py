"""Which model an agent's calls go to, and which routes are recorded at all."""

from __future__ import annotations

import json
import logging
from typing import Any

import openai
import pytest

from marft_agents.recording import Call, MarftRecorder
from marft_agents.testing import InMemoryLog
from tests.recording.kit import ask
from tests.recording.wire_kit import Answer, Wire, streamed, whole


def _sent(wire: Wire) -> list[str]:
    return [json.loads(request.content)["model"] for request in wire.requests]


def _listing(*names: str) -> Any:
    return {"data": [{"id": name, "owned_by": "marft-agents"} for name in names]}


@pytest.mark.parametrize("inject", ["auto", "always", "never"])
def test_auto_sends_each_agent_to_the_model_of_its_own_name(inject: Any) -> None:
    wire = Wire(*[whole("a")] * 3, listing=_listing("code-writer", "planner"))
    with MarftRecorder(log=InMemoryLog(), models="auto", inject=inject) as recorder:
        recorder.capture(client := wire.sdk())
        with recorder.episode():
            live = recorder.current()
            assert live is not None
            for agent in ("Code Writer", "planner"):
                call = Call(live, agent)
                with call.current():
                    assert ask(client, "gpt-4o").model == "gpt-4o"
                call.finish()
            ask(client, "gpt-4o")
    assert _sent(wire) == ["code-writer", "planner", "gpt-4o"]
    assert len(wire.others) == 1


def test_auto_streams_under_the_name_that_was_asked_for() -> None:
    wire = Wire(streamed("a b"), listing=_listing("planner"))
    with wire.recorded(models="auto") as (client, log):
        assert {chunk.model for chunk in ask(client, "gpt-4o", stream=True)} == {"gpt-4o"}
    assert (log.turns[0].model, log.turns[0].adapter_start) == ("gpt-4o", "planner")
    assert log.turns[0].trainable


@pytest.mark.parametrize(
    ("agent", "listed", "why"),
    [
        ("critic", ["planner"], "lists no model 'critic'"),
        ("critic", [], "are not known"),
        ("base", ["base"], "reserved"),
        ("...", ["planner"], "no usable adapter name"),
    ],
)
def test_an_agent_without_a_model_stays_where_it_is_and_that_is_said_once(
    agent: str, listed: list[str], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    wire = Wire(whole("a"), whole("b"), listing=_listing(*listed))
    with MarftRecorder(log=InMemoryLog(), models="auto") as recorder:
        recorder.attach_client(client := wire.sdk(), agent)
        with recorder.episode(), caplog.at_level(logging.WARNING):
            ask(client, "gpt-4o")
            ask(client, "gpt-4o")
    assert _sent(wire) == ["gpt-4o", "gpt-4o"]
    (said,) = [r.getMessage() for r in caplog.records if "stays with the model" in r.getMessage()]
    assert repr(agent) in said and why in said


def test_an_agent_that_asks_for_its_own_model_is_left_alone() -> None:
    wire = Wire(whole("a"), listing=_listing("planner"))
    with wire.recorded(models="auto", inject="never") as (client, _):
        ask(client, "planner")
    with Wire(other := whole("a")).recorded(inject="never") as (client, _):
        ask(client, "planner")
    assert other and _sent(wire) == ["planner"]
    assert wire.requests[0].headers.get("x-marft-agent") is None


def test_a_failed_call_of_a_rerouted_agent_shows_the_servers_own_words() -> None:
    error = b'{"error": {"message": "lora is full"}, "model": "lora"}'
    with (
        Wire(Answer((error,), 400)).recorded(models={"planner": "lora"}) as (client, _),
        pytest.raises(openai.BadRequestError, match="lora is full") as raised,
    ):
        ask(client, "gpt-4o")
    assert raised.value.response.content == error


def _responses(client: Any) -> None:
    client.post("/responses", cast_to=object, body={"model": "m", "input": "hi"})


def _completions(client: Any) -> None:
    client.post("/completions", cast_to=object, body={"model": "m", "prompt": "hi"})


def _embeddings(client: Any) -> None:
    client.post("/embeddings", cast_to=object, body={"model": "m", "input": "hi"})


ROUTES = {
    "/responses": (_responses, "Responses API returns no token ids"),
    "/completions": (_completions, "only chat completions are recorded"),
    "/embeddings": (_embeddings, None),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("announced", [False, True])
def test_other_routes_pass_untouched_and_are_said_once(
    route: str, announced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    act, why = ROUTES[route]
    plain, wire = Wire(*[Answer((b"{}",))] * 2), Wire(*[Answer((b"{}",))] * 3)
    act(plain.sdk())
    log = InMemoryLog()
    with MarftRecorder(log=log) as recorder, caplog.at_level(logging.WARNING):
        recorder.capture(client := wire.sdk(), None if announced else "planner")
        act(client)  # outside an episode nothing is expected
        assert not caplog.records
        with recorder.episode():
            live = recorder.current()
            assert live is not None
            call = Call(live, "planner")
            for _ in range(2):
                with call.current() if announced else live.active():
                    act(client)
    assert [r.content for r in wire.requests] == [plain.requests[0].content] * 3
    assert not log.turns and not wire.others
    said = [record.getMessage() for record in caplog.records]
    if why is None:
        assert "recorded no model call" in said.pop()
    assert len(said) == (0 if why is None else 1)
    for message in said:
        assert str(why) in message and "'planner'" in message and f"/v1{route}" in message


def test_the_real_resources_of_the_sdk_are_those_routes(caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire(Answer((b"{}",)), Answer((b"{}",)))
    with wire.recorded() as (client, log), caplog.at_level(logging.WARNING):
        client.responses.create(model="m", input="hi")
        client.completions.create(model="m", prompt="hi")
    assert [request.url.path for request in wire.requests] == ["/v1/responses", "/v1/completions"]
    assert len(caplog.records) == 2 and not log.turns
