"""The recorder's own failures stay its own."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from marft_agents.recording import drafts, events, exchange, reply
from marft_agents.recording.safety import Safety
from marft_agents.recording.server import KnownServers
from tests.recording.kit import ask, recording, sdk


def _bug(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a bug in the recorder")


BREAKABLE: list[tuple[Any, str]] = [
    (exchange, "stored_messages"),
    (exchange.Exchange, "outgoing"),
    (exchange.Exchange, "received"),
    (exchange.Exchange, "close"),
    (exchange.Exchange, "feed"),
    (exchange.Restorer, "_wanted"),
    (drafts, "say_if_ids_are_missing"),
    (events.StreamReader, "take"),
    (reply.Reply, "read_common"),
]


@pytest.mark.parametrize(("owner", "name"), BREAKABLE)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_anywhere_never_reaches_the_app(
    owner: Any,
    name: str,
    stream: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with recording(["a b"] * 3, raise_errors=False) as (server, recorder, _):
        recorder.attach_client(client := sdk(server), "planner")
        monkeypatch.setattr(owner, name, _bug)
        with caplog.at_level(logging.WARNING), recorder.episode():
            for _ in range(3):
                if stream:
                    chunks = ask(client, stream=True)
                    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "a b"
                else:
                    assert ask(client).choices[0].message.content == "a b"
    assert len({(r.getMessage(), r.levelno) for r in caplog.records}) == len(caplog.records) <= 3


def test_a_bug_is_raised_under_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange.Exchange, "received", _bug)
    with recording(["a"]) as (server, recorder, _):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode(), pytest.raises(Exception) as raised:
            ask(client)
    # Before 3.0 the SDK reports whatever its HTTP client raises as a connection error.
    reached = raised.value if isinstance(raised.value, RuntimeError) else raised.value.__cause__
    assert isinstance(reached, RuntimeError) and str(reached) == "a bug in the recorder"


def test_a_source_of_ids_that_fails_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    with recording(["a"], ids=_bug, raise_errors=False) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode() as episode:
            ask(client)
    assert episode.id and log.turns[0].episode_id == episode.id
    assert "could not make an id" in caplog.text


def test_strict_is_decided_when_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    safety = Safety()
    assert safety.strict and not Safety(False).strict
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    assert not safety.strict and Safety(True).strict


def test_a_failure_is_logged_once_with_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    safety = Safety(False)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert safety.attempt("do it", _bug) is None
    (record,) = caplog.records
    assert "could not do it" in record.getMessage()
    assert "RuntimeError: a bug in the recorder" in record.getMessage()
    assert "Traceback" in record.getMessage() and "_bug" in record.getMessage()


def test_a_listing_that_makes_no_sense_is_a_no() -> None:
    class Request:
        class headers:
            raw = ((b"authorization", b"Bearer x"),)

        def __init__(self, method: str, url: str, **_: Any) -> None:
            self.url = url

    class Response:
        status_code = 200

        def json(self) -> Any:
            return {"data": ["odd"]}

    servers = KnownServers()
    request: Any = Request("POST", "http://x/v1/chat/completions")
    verdict = servers.ask("http://x/v1", request, lambda _: Response())
    assert not verdict.accepts and "lists no model" in verdict.reason
    assert servers.known("http://x/v1") is verdict
