"""What the gateway records when something fails, and that a failing recorder fails no request."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from marft_agents.recording import MarftRecorder
from marft_agents.serving import recording
from marft_agents.serving.recording import Recording
from marft_agents.testing import BrokenLog
from tests.serving.recording_kit import CHAT, HELLO, RecordingStage, recording_stage
from tests.serving.stage import House


@pytest.fixture
def desk(house: House) -> Iterator[RecordingStage]:
    with recording_stage(house) as desk:
        yield desk


# -- errors, retries, clients that leave -------------------------------------------------------


def test_errors_are_turns(desk: RecordingStage) -> None:
    desk.stage.engine.faults.generate_status = 400
    assert desk.ask().status_code == 400
    assert desk.ask("nobody").status_code == 404
    desk.stage.dead.append("exit code -9")
    assert desk.ask().status_code == 503
    refused, unknown, dead = desk.turns
    assert refused.error == "HTTP 400: EngineCore encountered an issue"
    assert refused.adapter_end == "router@v1"
    assert (unknown.agent, unknown.model) == ("nobody", "nobody")
    assert "HTTP 404: no agent 'nobody' is served here" in str(unknown.error)
    assert "exit code -9" in str(dead.error)
    assert not any(turn.trainable for turn in desk.turns)


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ({"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "1"}),
        ({"Idempotency-Key": "k1"}, {"Idempotency-Key": "k1"}),
        ({"X-Marft-Call": "c1"}, {"X-Marft-Call": "c1"}),
    ],
    ids=["openai sdk", "idempotency key", "own header"],
)
def test_attempts_of_one_call_are_one_turn(
    desk: RecordingStage, first: dict[str, str], again: dict[str, str]
) -> None:
    desk.stage.engine.faults.generate_status = 503
    assert desk.ask(headers=first).status_code == 503
    assert desk.turns == []
    desk.stage.engine.faults.generate_status = 200
    answer = desk.ask(headers=again)
    (turn,) = desk.turns
    assert (turn.attempt, turn.error, turn.trainable) == (2, None, True)
    assert answer.headers["X-Marft-Turn"] == turn.turn_id


def test_attempts_are_told_apart_by_what_they_ask(desk: RecordingStage) -> None:
    desk.stage.engine.faults.generate_status = 503
    for seed in (1, 2):
        desk.ask(headers={"x-stainless-retry-count": "0"}, seed=seed)
    desk.stage.engine.faults.generate_status = 200
    for seed in (2, 3):
        desk.ask(headers={"x-stainless-retry-count": "1"}, seed=seed)
    assert [(turn.sampling.seed, turn.attempt) for turn in desk.turns] == [(2, 2), (3, 1)]
    desk.post("/episodes/e1/end", {})
    assert [(turn.sampling.seed, turn.attempt) for turn in desk.turns[2:]] == [(1, 1)]


def test_a_body_is_digested_only_where_a_call_has_failed(
    desk: RecordingStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    digested: list[bytes] = []

    def counted(data: bytes) -> Any:
        digested.append(data)
        return hashlib.sha256(data)

    monkeypatch.setattr(recording, "hashlib", SimpleNamespace(sha256=counted))
    for _ in range(2):
        assert desk.ask(headers={"x-stainless-retry-count": "0"}).status_code == 200
    assert digested == []
    desk.stage.engine.faults.generate_status = 503
    desk.ask(headers={"x-stainless-retry-count": "0"})
    assert len(digested) == 1


def test_a_failed_call_that_is_not_tried_again_is_logged(desk: RecordingStage) -> None:
    desk.stage.engine.faults.generate_status = 503
    desk.ask(headers={"x-stainless-retry-count": "0"})
    desk.ask(headers={"x-stainless-retry-count": "0"})  # the same words, but a new call
    assert [turn.attempt for turn in desk.turns] == [1]
    desk.clock.now = 200.0
    desk.recording.episodes.sweep()
    assert [turn.error for turn in desk.turns] == ["HTTP 503: EngineCore encountered an issue"] * 2
    desk.ask()  # no sign of retries: nothing is held back
    assert len(desk.turns) == 3


def test_a_client_that_leaves_before_the_reply(desk: RecordingStage) -> None:
    desk.stage.engine.gate = threading.Semaphore(0)
    with pytest.raises(httpx.ReadTimeout):
        desk.ask_impatiently()
    assert desk.stage.engine.gone.wait(5)
    (turn,) = desk.wait_for_turns(1)
    assert turn.error == "the client left before the reply"


def test_a_client_that_gives_up_and_tries_again(desk: RecordingStage) -> None:
    desk.stage.engine.gate = threading.Semaphore(0)
    with pytest.raises(httpx.ReadTimeout):
        desk.ask_impatiently({"x-stainless-retry-count": "0"})
    assert desk.stage.engine.gone.wait(5)
    desk.stage.wait(lambda: desk.get("/episodes/e1").json()["calls_under_way"] == 0)
    desk.stage.engine.gate = None
    desk.ask(headers={"x-stainless-retry-count": "1"})
    (turn,) = desk.turns
    assert (turn.attempt, turn.trainable) == (2, True)


def test_a_client_that_leaves_in_the_middle_of_a_stream(desk: RecordingStage) -> None:
    desk.stage.engine.gate = threading.Semaphore(1)
    url = f"{desk.stage.url}/episodes/e1/agents/router{CHAT}"
    body: dict[str, Any] = {"model": "router", "messages": [], "stream": True}
    with desk.stage.http.stream("POST", url, json=body) as answer:
        next(answer.iter_lines())
    (turn,) = desk.wait_for_turns(1)
    assert (turn.complete, turn.token_ids, turn.text) == (False, [0], "w0 ")
    assert turn.untrainable_reason == "not all of its tokens arrived"


def test_a_stream_that_the_engine_breaks(desk: RecordingStage) -> None:
    desk.stage.engine.faults.break_stream_after = 2
    assert "[DONE]" not in desk.ask(stream=True).text
    (turn,) = desk.wait_for_turns(1)
    assert not turn.complete and "cannot be reached" in str(turn.error)


def test_parallel_calls_of_one_episode(desk: RecordingStage) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(desk.ask, ["router", "writer"] * 20))
    assert {answer.status_code for answer in answers} == {200}
    assert sorted(turn.index for turn in desk.turns) == list(range(40))
    assert len({turn.turn_id for turn in desk.turns}) == 40


# -- the host is sacred ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_log_that_cannot_be_written_fails_no_request(house: House, stream: bool) -> None:
    quiet = {"raise_errors": False}
    with recording_stage(house, log=BrokenLog(), recorder=quiet) as desk:
        assert desk.ask(stream=stream).status_code == 200


@pytest.mark.parametrize("part", ["sends", "register", "finish", "new_turn_id"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_recorder_that_fails_fails_no_request(
    house: House, monkeypatch: pytest.MonkeyPatch, part: str, stream: bool
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug in the recorder")

    monkeypatch.setattr(f"marft_agents.serving.watch.HttpCall.{part}", broken)
    with recording_stage(house, recorder={"raise_errors": False}) as desk:
        plain = desk.post(CHAT, {"model": "router", "messages": HELLO, "stream": stream})
        answer = desk.ask(stream=stream)
        assert answer.status_code == 200
        assert answer.text.count("w3 ") == plain.text.count("w3 ")
        assert 'token_ids": [' not in answer.text
        aliases = desk.stage.gateway.aliases
        desk.stage.wait(lambda: not aliases.in_flight(aliases.routes()[0]))


def test_no_key_is_in_the_log(house: House) -> None:
    with recording_stage(house, api_key="sk-secret-1") as desk:
        key = {"Authorization": "Bearer sk-secret-1:marft:agent=router,episode=e1"}
        assert desk.post(CHAT, {"model": "router", "messages": HELLO}).status_code == 401
        answer = desk.post(CHAT, {"model": "router", "messages": HELLO}, headers=key)
        assert answer.status_code == 200
        desk.stage.dead.append("the key sk-secret-1 was wrong")
        desk.post(CHAT, {"model": "router", "messages": HELLO}, headers=key)
        assert len(desk.turns) == 2
        assert "sk-secret" not in "".join(event.model_dump_json() for event in desk.events)


def test_secrets_in_prompts_are_masked_in_the_log_only(desk: RecordingStage) -> None:
    said = "the key is api_key=sk-abcdefghijklmnopqrstuvwxyz012345"
    desk.ask(messages=[{"role": "user", "content": said}])
    assert desk.stage.engine.seen[-1].body["messages"][0]["content"] == said
    (turn,) = desk.turns
    assert "abcdefghijkl" not in turn.model_dump_json()
    assert turn.redacted and not turn.trainable


async def test_a_log_that_is_slow_to_write_keeps_no_client_waiting_and_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recording = Recording(MarftRecorder(tmp_path, inject="always", raise_errors=False))
    await recording.written()
    assert "not on disk" not in caplog.text

    def late(_timeout: float) -> bool:
        return False

    monkeypatch.setattr(recording.recorder, "flush", late)
    await recording.written()
    assert "the log was not on disk after 2 s" in caplog.text
