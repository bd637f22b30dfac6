"""The app's keys are in no event, no warning and no trace, wherever the app put them."""

from __future__ import annotations

import logging
from collections.abc import Generator
from pathlib import Path
from typing import Any

import openai
import pytest

from marft_agents.log import LogReader
from marft_agents.recording import MarftRecorder, Redaction, exchange
from marft_agents.schema import Event, Turn
from marft_agents.testing import InMemoryLog, Reply, ScriptedServer
from tests.recording.kit import ask, recording, sdk

KEYS = {
    "openai": "sk-test-aB3dE5gH7jK9",
    "of no known shape": "corporate.gateway.2026",
}


@pytest.fixture(params=list(KEYS.values()), ids=list(KEYS))
def key(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Generator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.DEBUG, logger="marft_agents"):
        yield caplog


def _everything(log: InMemoryLog, said: pytest.LogCaptureFixture) -> str:
    ours = [r.getMessage() for r in said.records if r.name.startswith("marft_agents")]
    return "\n".join([e.model_dump_json() for e in log.events] + ours)


def test_a_key_in_every_place_that_an_app_has(key: str, said: pytest.LogCaptureFixture) -> None:
    refused = Reply(status=401, error=f"Incorrect API key provided: {key}")
    with recording([refused, f"the key is {key}", "fine"], raise_errors=False) as (
        server,
        rec,
        log,
    ):
        rec.attach_client(client := sdk(server, api_key=key), "planner")
        config: Any = {
            "llm_config": {"config_list": [{"api_key": key, "base_url": f"http://u:{key}@h/v1"}]},
            "default_headers": {"Authorization": f"Bearer {key}", "X-Api-Key": key},
        }
        with pytest.raises(openai.AuthenticationError), rec.episode(task=config, metadata=config):
            ask(client)
        with rec.episode(id="e") as episode:
            live = rec.current()
            assert live is not None
            live.tool("env", arguments={"code": "env"}, result=f"OPENAI_API_KEY={key}\nHOME=/")
            live.human("ann", f"use {key}")
            said_by_model = ask(client).choices[0].message
            again: Any = [{"role": "assistant", "content": said_by_model.content}]
            ask(client, messages=again)
            episode.end("failed", f"RuntimeError: bad key {key}")
    assert (
        key in said_by_model.content and key in server.requests[-1].body["messages"][0]["content"]
    )
    text = _everything(log, said)
    assert key not in text and "[redacted:" in text
    _, quoted, repeated = log.turns
    assert quoted.token_ids is None and quoted.prompt_token_ids is not None
    assert repeated.prompt_token_ids is None and repeated.token_ids is not None
    assert all("redacted" in (t.untrainable_reason or "") for t in (quoted, repeated))


@pytest.mark.parametrize("header", ["api-key", "X-Api-Key"])
def test_keys_in_other_headers_are_known_too(header: str, said: pytest.LogCaptureFixture) -> None:
    key = KEYS["of no known shape"]
    with recording([f"it is {key}"]) as (server, recorder, log):
        recorder.attach_client(client := sdk(server, default_headers={header: key}), "planner")
        with recorder.episode():
            ask(client)
    assert key not in _everything(log, said)


def test_a_password_in_the_address_is_in_no_warning(said: pytest.LogCaptureFixture) -> None:
    log = InMemoryLog()
    with (
        ScriptedServer(["a", "b"], owned_by="openai") as server,
        MarftRecorder(log=log) as recorder,
    ):
        address = server.url.replace("//", "//bob:hunter2hunter2@")
        client = openai.OpenAI(base_url=address, api_key="sk-test", max_retries=0)
        recorder.attach_client(client, "planner")
        with recorder.episode():
            ask(client)
    text = _everything(log, said)
    assert "carry no token ids" in text and "hunter2" not in text


def test_a_bug_of_the_recorder_shows_no_key(
    key: str, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    def bug(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"cannot read the request with {key}")

    monkeypatch.setattr(exchange.Exchange, "received", bug)
    with recording(["a"], raise_errors=False) as (server, recorder, log):
        recorder.attach_client(client := sdk(server, api_key=key), "planner")
        with recorder.episode():
            ask(client)
    text = _everything(log, said)
    assert "cannot read the request" in text and key not in text


@pytest.mark.parametrize("placeholder", ["EMPTY", "ollama", "sk-no-key-required", "x"])
def test_a_placeholder_for_a_key_is_an_ordinary_word(placeholder: str) -> None:
    with recording([f"{placeholder} it is"]) as (server, recorder, log):
        recorder.attach_client(client := sdk(server, api_key=placeholder), "planner")
        with recorder.episode():
            ask(client)
    assert log.turns[0].text == f"{placeholder} it is" and log.turns[0].trainable


def test_no_file_holds_a_key(key: str, tmp_path: Path) -> None:
    with (
        ScriptedServer([f"psst: {key}"]) as server,
        MarftRecorder(tmp_path, redact=Redaction(hash_fields=["user"], salt="s")) as recorder,
    ):
        recorder.attach_client(client := sdk(server, api_key=key), "planner")
        with recorder.episode(metadata={"user": "ann@example.invalid", "api_key": key}):
            ask(client)
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert key.encode() not in written and b"ann@" not in written
    (episode,) = LogReader(tmp_path).episodes()
    assert episode.metadata["api_key"] == "[redacted:api-key]"
    assert episode.turns[0].text == "psst: [redacted:api-key]"


def test_events_hold_no_key_before_they_are_written_either(tmp_path: Path) -> None:
    """A log that keeps what it gets, whatever it is, gets it redacted."""
    seen: list[Event] = []

    class Keeps:
        def write(self, event: Event) -> None:
            seen.append(event)

        def close(self) -> None: ...

    key = KEYS["openai"]
    with ScriptedServer([key]) as server, MarftRecorder(log=Keeps()) as recorder:
        recorder.attach_client(client := sdk(server, api_key=key), "planner")
        with recorder.episode():
            ask(client)
    assert any(isinstance(e, Turn) for e in seen) and key not in str(seen)
