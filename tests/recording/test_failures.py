"""Calls that fail, are tried again, or are answered with something else than a reply."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from marft_agents.recording import Call, MarftRecorder
from marft_agents.testing import InMemoryLog, Reply
from tests.recording.kit import HELLO, ask
from tests.recording.wire_kit import EVENTS, HTTP, Answer, Wire, events_of, stream, streamed, whole

HTML = b"<html><title>502 Bad Gateway</title></html>"


def _error(message: str = "no", **fields: Any) -> bytes:
    return json.dumps({"error": {"message": message, **fields}}).encode()


REFUSED = {
    400: (Answer((_error("too long"),), 400), "HTTP 400: too long"),
    401: (Answer((_error("bad key sk-test"),), 401), "HTTP 401: bad key ***"),
    404: (Answer((b'{"detail": "Not Found"}',), 404), "HTTP 404: Not Found"),
    422: (Answer((_error("unprocessable"),), 422), "HTTP 422: unprocessable"),
    500: (Answer((_error("engine died"),), 500), "HTTP 500: engine died"),
    502: (Answer((HTML,), 502, "text/html"), f"HTTP 502: {HTML.decode()}"),
    503: (Answer((), 503), "HTTP 503: "),
}


@pytest.mark.parametrize("status", REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_the_apps_own_error_and_a_failed_turn(status: int, stream: bool) -> None:
    answer, error = REFUSED[status]
    with Wire(answer).recorded() as (client, log):
        with pytest.raises(openai.APIStatusError) as raised:
            ask(client, stream=stream)
        assert raised.value.status_code == status
    (turn,) = log.turns
    assert turn.error == error and turn.messages == HELLO
    assert (turn.token_ids, turn.text, turn.untrainable_reason) == (None, None, "the call failed")


ODD = {
    "error in a 200": (Answer((_error("overloaded"),)), "overloaded"),
    "html": (Answer((HTML,), kind="text/html"), "the reply is not JSON"),
    "no json": (Answer((b'{"choices": [',)), "the reply is not JSON"),
    "empty": (Answer(()), "the reply is not JSON"),
    "list": (Answer((b"[]",)), "the reply is not JSON"),
    "no choices": (Answer((b'{"id": "x", "choices": []}',)), "the reply has no choices"),
    "deep": (Answer((b"[" * 100_000,)), "the reply is not JSON"),
    "a stream": (
        Answer((stream(events_of("hi")),), kind=EVENTS),
        "the app asked for a reply in one piece and the server answered otherwise",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_no_reply_is_a_failed_turn(name: str) -> None:
    answer, error = ODD[name]
    with Wire(answer).recorded() as (client, log):
        create = client.chat.completions.with_streaming_response.create
        with create(model="planner", messages=HELLO) as response:
            response.read()
    assert [(t.error, t.trainable) for t in log.turns] == [(error, False)]


def test_a_whole_reply_to_a_streamed_request_never_reached_the_app() -> None:
    with Wire(whole("hi")).recorded() as (client, log):
        assert list(ask(client, stream=True)) == []
    assert log.turns[0].error is not None and "asked for a stream" in log.turns[0].error
    assert log.turns[0].text == "hi"


@pytest.mark.parametrize("named", [False, True])
def test_an_error_event_is_the_turns_error(named: bool) -> None:
    events = stream(events_of("one two")[:2], done=False)
    error = b"event: error\n" if named else b""
    error += b"data: " + _error("engine died", code=500) + b"\n\ndata: [DONE]\n\n"
    with (
        Wire(Answer((events + error,), kind=EVENTS)).recorded() as (client, log),
        pytest.raises(openai.APIError, match="engine died"),
    ):
        list(ask(client, stream=True))
    assert (log.turns[0].error, log.turns[0].text) == ("engine died", "one")


@pytest.mark.parametrize("stream", [False, True])
def test_a_redirect_is_part_of_the_attempt(stream: bool) -> None:
    moved = Answer(status=307, headers={"location": "/v1/elsewhere/chat/completions"})
    wire = Wire(moved, streamed("hi") if stream else whole("hi"))
    with wire.recorded() as (client, log):
        reply = ask(client, stream=stream)
        assert list(reply) if stream else reply.choices[0].message.content == "hi"
    first, second = wire.requests
    assert second.content == first.content and second.url.path.startswith("/v1/elsewhere")
    assert [(t.text, t.attempt, t.trainable) for t in log.turns] == [("hi", 1, True)]


def test_a_redirect_that_loses_the_request_is_a_failed_turn() -> None:
    moved = Answer(status=302, headers={"location": "/v1/models"})
    with Wire(moved).recorded() as (client, log):
        ask(client)
    assert log.turns[0].error == "the reply has no choices"


def _refusing(kind: str) -> Answer:
    return Answer(refused=lambda request: getattr(HTTP, kind)(kind, request=request))


def _breaking(kind: str) -> Answer:
    return Answer((b'{"id"',), error=lambda request: getattr(HTTP, kind)(kind, request=request))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_wait(*_: Any, **__: Any) -> float:
        return 0.0

    monkeypatch.setattr(openai.OpenAI, "_calculate_retry_timeout", no_wait)


LOST: dict[str, Callable[[], Answer]] = {
    "ConnectError": lambda: _refusing("ConnectError"),
    "ConnectTimeout": lambda: _refusing("ConnectTimeout"),
    "ReadTimeout": lambda: _refusing("ReadTimeout"),
    "ReadError": lambda: _breaking("ReadError"),
    "RemoteProtocolError": lambda: _breaking("RemoteProtocolError"),
    "HTTP 503": lambda: Answer(status=503),
    "HTTP 429": lambda: Answer((_error("slow down"),), 429),
}


@pytest.mark.parametrize("kind", LOST)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.usefixtures("at_once")
def test_retries_are_attempts_of_one_turn(kind: str, stream: bool) -> None:
    good = streamed("done") if stream else whole("done")
    lost = [LOST[kind](), LOST[kind]()]
    if stream and kind in ("ReadError", "RemoteProtocolError"):
        lost = []  # the SDK does not try a stream again that has begun
    wire = Wire(*lost, good, *[LOST[kind]() for _ in range(3)])
    with wire.recorded(sdk={"max_retries": 2}) as (client, log):
        reply = ask(client, stream=stream)
        assert list(reply) if stream else reply
        if lost:
            with pytest.raises(openai.APIError):
                ask(client, stream=stream)
    turns = [(t.text, t.attempt, t.trainable) for t in log.turns]
    assert turns == [("done", len(lost) + 1, True), *([(None, 3, False)] if lost else [])]
    if lost:
        assert kind in (log.turns[1].error or "")


@pytest.mark.usefixtures("at_once")
def test_the_servers_advice_on_retries_is_heard() -> None:
    advice = {"x-should-retry": "true"}
    once = {"x-should-retry": "false"}
    wire = Wire(
        Answer((_error(),), 400, headers=advice),
        whole("a"),
        Answer((_error(),), 500, headers=once),
        whole("b"),
    )
    with wire.recorded(sdk={"max_retries": 3}) as (client, log):
        ask(client)
        with pytest.raises(openai.InternalServerError):
            ask(client)
        ask(client)
    assert [(t.text, t.attempt) for t in log.turns] == [("a", 2), (None, 1), ("b", 1)]


@pytest.mark.usefixtures("at_once")
def test_case_23_retries_around_the_sdks_own_are_turns_of_their_own() -> None:
    failing = [Answer(status=500) for _ in range(4)]
    with Wire(*failing, whole("done")).recorded(sdk={"max_retries": 1}) as (client, log):
        for _ in range(3):
            try:
                ask(client)
                break
            except openai.InternalServerError:
                continue
    assert [(t.attempt, t.error is None) for t in log.turns] == [(2, False), (2, False), (1, True)]


def _announced(wire: Wire, act: Callable[[openai.OpenAI, Call], None]) -> Any:
    """Turns of one call that a runtime announced."""
    log = InMemoryLog()
    with MarftRecorder(log=log) as recorder, recorder.episode():
        recorder.capture(client := wire.sdk(max_retries=1))
        live = recorder.current()
        assert live is not None
        call = Call(live, "planner")
        with call.current():
            act(client, call)
        call.finish()
    return log.turns


@pytest.mark.usefixtures("at_once")
def test_two_retry_layers_inside_one_announced_call_are_one_turn() -> None:
    def act(client: openai.OpenAI, _: Call) -> None:
        with pytest.raises(openai.InternalServerError):
            ask(client)
        ask(client)

    failing = [Answer(status=500) for _ in range(3)]
    (turn,) = _announced(Wire(*failing, whole("done")), act)
    assert (turn.attempt, turn.text, turn.error) == (4, "done", None)


def test_an_answer_that_the_app_never_got_is_kept_beside_the_one_it_got() -> None:
    """Case 23: A undelivered, B delivered."""
    cut = Answer(
        (stream(events_of("lost words"), done=False),),
        kind=EVENTS,
        error=lambda request: HTTP.ReadTimeout("slow", request=request),
    )

    def act(client: openai.OpenAI, _: Call) -> None:
        with pytest.raises(Exception):  # noqa: B017 the SDK's or its HTTP client's own
            list(ask(client, stream=True))
        ask(client)

    lost, got = _announced(Wire(cut, whole("got")), act)
    assert (lost.text, lost.attempt, lost.trainable) == ("lost words", 1, False)
    assert (got.text, got.attempt, got.trainable) == ("got", 1, True)


def test_a_second_request_of_one_call_is_linked_to_the_first() -> None:
    """A runtime that asks its model to mend its own reply."""

    def act(client: openai.OpenAI, _: Call) -> None:
        ask(client)
        said = {"role": "assistant", "content": "a first draft"}
        ask(client, messages=[*HELLO, said, {"role": "user", "content": "Mend it."}])

    first, second = _announced(Wire(whole("a first draft"), whole(Reply("better"))), act)
    assert first.depends_on == [] and second.depends_on == [first.turn_id]
    assert second.messages[1]["content"] == "a first draft"
