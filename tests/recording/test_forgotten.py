"""What a user forgets is said once, with the cure; what is meant to be so is not said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from marft_agents.errors import ConfigError
from marft_agents.recording import MarftRecorder
from marft_agents.schema import EpisodeStarted
from marft_agents.testing import InMemoryLog
from tests.recording.kit import ask, recording, sdk
from tests.recording.wire_kit import HTTP


def test_nothing_was_wrapped(caplog: pytest.LogCaptureFixture) -> None:
    with MarftRecorder(log=InMemoryLog()) as recorder:
        for name in ("first", "second"):
            with recorder.episode(id=name) as episode:
                episode.reward(1.0)
    (said,) = (record.getMessage() for record in caplog.records)
    assert "no model call in episode 'first'" in said
    assert "recorder.wrap(...)" in said and "recorder.attach_client(" in said


def test_something_else_was_wrapped(caplog: pytest.LogCaptureFixture) -> None:
    with recording() as (server, recorder, _), sdk(server) as client, sdk(server) as another:
        recorder.attach_client(client, "planner")
        with recorder.episode(id="e"):
            ask(another)
    (said,) = (record.getMessage() for record in caplog.records)
    assert "in episode 'e'" in said and "not what was wrapped" in said


def _used(recorder: MarftRecorder, client: Any) -> None:
    with recorder.episode(), recorder.episode():
        ask(client)


def _failing(recorder: MarftRecorder, _: Any) -> None:
    with pytest.raises(KeyError), recorder.episode():
        raise KeyError("of the app")


def _closed(recorder: MarftRecorder, _: Any) -> None:
    with recorder.episode():
        recorder.close()


@pytest.mark.parametrize("case", [_used, _failing])
def test_episodes_that_need_no_word(case: Any, caplog: pytest.LogCaptureFixture) -> None:
    with recording() as (server, recorder, _), sdk(server) as client:
        recorder.attach_client(client, "planner")
        case(recorder, client)
    assert not caplog.records


def test_a_recorder_that_is_off_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with MarftRecorder(enabled=False) as recorder, recorder.episode():
        pass
    assert not caplog.records


def test_closed_too_early_says_when_to_close(caplog: pytest.LogCaptureFixture) -> None:
    _closed(MarftRecorder(log=InMemoryLog()), None)
    (said,) = (record.getMessage() for record in caplog.records)
    assert "is closed" in said and "after the last episode" in said


def test_the_address_lacks_v1(caplog: pytest.LogCaptureFixture) -> None:
    def nowhere(_: Any) -> Any:
        return HTTP.Response(404, json={})

    transport = HTTP.MockTransport(nowhere)
    client = openai.OpenAI(
        base_url="http://server", api_key="x", http_client=HTTP.Client(transport=transport)
    )
    recorder = MarftRecorder(log=InMemoryLog(), models="auto")
    with client, recorder, recorder.episode(), pytest.raises(openai.NotFoundError):
        recorder.attach_client(client, "planner")
        ask(client, "gpt-4o")
    assert "base_url of `marft-agents serve` ends in /v1" in caplog.text


@pytest.mark.parametrize("models", ["automatic", ["planner"], 3])
def test_models_of_another_kind(models: Any) -> None:
    with pytest.raises(ConfigError, match="'auto' or a mapping from agent to model name"):
        MarftRecorder(log=InMemoryLog(), models=models)


def test_an_empty_name_is_no_log_folder() -> None:
    with pytest.raises(ConfigError, match="log_dir is empty; name a folder"):
        MarftRecorder("")


def test_a_file_is_no_log_folder(tmp_path: Path) -> None:
    (file := tmp_path / "events.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"log_dir is a folder, and '.*jsonl' is a file"):
        MarftRecorder(file)
    MarftRecorder(file, enabled=False).close()


class _Binding:
    """What an integration puts onto an app's objects."""

    runtime = "framework 1.2"

    def release(self) -> None: ...


def test_an_explicit_episode_knows_the_runtime_that_was_wrapped() -> None:
    log, binding = InMemoryLog(), _Binding()
    with MarftRecorder(log=log) as recorder:
        with recorder.episode():
            recorder.keep(binding)
        with recorder.episode():
            pass
    assert [event.runtime for event in log.of(EpisodeStarted)] == [None, "framework 1.2"]
