"""What the gateway records of a call, and that the client cannot tell."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.requests import Request

from marft_agents.log import LogReader, LogWriter
from marft_agents.recording import MarftRecorder
from marft_agents.serving.recording import Recording, watched
from marft_agents.testing import InMemoryLog
from tests.serving.conftest import furnished
from tests.serving.recording_kit import (
    CHAT,
    HELLO,
    RecordingStage,
    nameless,
    recording_stage,
    twin_ids,
)
from tests.serving.stage import House, running_stage


@pytest.fixture
def desk(house: House) -> Iterator[RecordingStage]:
    with recording_stage(house) as desk:
        yield desk


@pytest.fixture(scope="module")
def shared_desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordingStage]:
    with recording_stage(furnished(tmp_path_factory.mktemp("shared"))) as desk:
        yield desk


@pytest.fixture
def quiet_desk(shared_desk: RecordingStage) -> RecordingStage:
    """For tests that break nothing and count nothing but their own turns."""
    assert shared_desk.recording.recorder.flush()
    shared_desk.log.events.clear()
    return shared_desk


def test_a_turn_is_what_was_sent_and_sampled(desk: RecordingStage) -> None:
    answer = desk.ask(temperature=0.7, max_tokens=5, stop="x")
    assert answer.status_code == 200
    started, turn = desk.events
    assert (started.type, started.episode_id, started.task, started.runtime) == (
        "episode_started", "e1", None, "gateway",
    )  # fmt: skip
    assert (turn.agent, turn.kind, turn.model, turn.index, turn.attempt) == (
        "router", "act", "router", 0, 1,
    )  # fmt: skip
    assert turn.messages == HELLO
    assert turn.text == 'says "model":"router@v1"'
    assert turn.finish_reason == "stop"
    assert (turn.prompt_token_ids, turn.token_ids) == ([1, 2], [0, 1, 2])
    assert turn.logprobs == [-0.5, -0.51, -0.52]
    assert turn.logprob_mode == "processed"
    assert (turn.adapter_start, turn.adapter_end) == ("router@v1", "router@v1")
    assert (turn.sampling.temperature, turn.sampling.top_p) == (0.7, 1.0)
    assert (turn.sampling.max_tokens, turn.sampling.stop) == (5, ["x"])
    assert turn.response_id == answer.json()["id"]
    assert turn.trainable and turn.latency_s is not None
    assert answer.headers["X-Marft-Episode"] == "e1"
    assert answer.headers["X-Marft-Turn"] == turn.turn_id


FORMS: list[tuple[str, dict[str, str]]] = [
    (f"/episodes/e1/agents/planner{CHAT}", {}),
    (f"/episodes/e1{CHAT}", {"X-Marft-Agent": "planner"}),
    (f"/agents/planner{CHAT}", {"X-Marft-Episode": "e1"}),
    (f"/agents/planner{CHAT}", {"Authorization": "Bearer marft:episode=e1"}),
    (CHAT, {"Authorization": "Bearer marft:agent=planner,episode=e1"}),
    (CHAT, {"X-Marft-Agent": "planner", "X-Marft-Episode": "e1", "X-Marft-Record": "gateway"}),
]


@pytest.mark.parametrize(("path", "headers"), FORMS)
def test_every_form_of_identity(
    quiet_desk: RecordingStage, path: str, headers: dict[str, str]
) -> None:
    answer = quiet_desk.post(path, {"model": "writer", "messages": HELLO}, headers=headers)
    assert answer.status_code == 200
    assert answer.json()["model"] == "writer"
    (turn,) = quiet_desk.turns
    assert (turn.episode_id, turn.agent, turn.model) == ("e1", "planner", "writer")
    sent = quiet_desk.stage.engine.seen[-1]
    assert not [name for name in sent.headers if name.startswith("x-marft")]


@pytest.mark.parametrize(("model", "agent"), [("writer", "writer"), ("writer@v1", "writer")])
def test_the_model_is_the_agent_unless_one_is_named(
    quiet_desk: RecordingStage, model: str, agent: str
) -> None:
    assert (
        quiet_desk.post(f"/episodes/e1{CHAT}", {"model": model, "messages": []}).status_code == 200
    )
    assert quiet_desk.turns[0].agent == agent


def test_an_agent_is_its_own_model_unless_one_is_named(quiet_desk: RecordingStage) -> None:
    answer = quiet_desk.post(f"/episodes/e1/agents/Writer{CHAT}", {"messages": []})
    assert (answer.status_code, answer.json()["model"]) == (200, "Writer")
    assert (quiet_desk.turns[0].agent, quiet_desk.turns[0].adapter_end) == ("Writer", "writer@v1")


def test_apps_that_record_themselves_are_left_alone(quiet_desk: RecordingStage) -> None:
    own = {"X-Marft-Agent": "router", "X-Marft-Episode": "e1"}
    body: dict[str, Any] = {"model": "router", "messages": HELLO}
    assert quiet_desk.post(CHAT, body, headers=own).status_code == 200
    assert (
        quiet_desk.post(f"/episodes/e9/agents/router{CHAT}", body, headers=own).status_code == 200
    )
    assert quiet_desk.post(CHAT, body).status_code == 200
    assert quiet_desk.events == []


def test_a_turn_that_app_and_gateway_record_counts_once(house: House, tmp_path: Path) -> None:
    with recording_stage(house, record_all=True, log=LogWriter(tmp_path), idle_s=60) as desk:
        base_url = f"{desk.stage.url}/v1"
        with (
            MarftRecorder(tmp_path) as recorder,
            openai.OpenAI(base_url=base_url, api_key="none") as client,
        ):
            recorder.attach_client(client, "router")
            with recorder.episode(task="the app's") as episode:
                ask: Any = client.chat.completions.create
                ask(model="router", messages=HELLO)
                ask(model="router", messages=HELLO)
                episode.reward(1.0)
        desk.clock.now = 100.0
        desk.recording.episodes.sweep()
    reader = LogReader(tmp_path)
    (folded,) = reader.episodes()
    assert (len(folded.turns), reader.duplicates, len(folded.sources)) == (2, 2, 2)
    assert folded.task == "the app's"
    assert folded.ended is not None and folded.ended.reason == "terminated"


def test_record_all(house: House) -> None:
    own = {"X-Marft-Agent": "router", "X-Marft-Episode": "e1"}
    with recording_stage(house, record_all=True) as desk:
        body: dict[str, Any] = {"model": "router", "messages": HELLO}
        assert desk.post(CHAT, body, headers=own).status_code == 200
        assert [turn.episode_id for turn in desk.turns] == ["e1"]
        answer = desk.post(CHAT, body)
        assert answer.status_code == 400
        assert "names no episode" in answer.json()["error"]["message"]


# -- the client cannot tell --------------------------------------------------------------------

ASKED: list[dict[str, Any]] = [
    {},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 2},
    {"return_token_ids": True},
    {"logprobs": True, "return_token_ids": True},
    {"logprobs": False, "n": 2},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_replies_are_the_bytes_of_a_call_that_nobody_records(
    quiet_desk: RecordingStage, asked: dict[str, Any], stream: bool
) -> None:
    body: dict[str, Any] = {"model": "router", "messages": HELLO, "stream": stream} | asked
    one, other = twin_ids()
    plain = quiet_desk.post(CHAT, body, headers=one)
    recorded = quiet_desk.post(f"/episodes/e1/agents/router{CHAT}", body, headers=other)
    assert nameless(recorded) == nameless(plain)
    assert recorded.status_code == plain.status_code == 200
    mine, each = {"x-marft-episode", "x-marft-turn"}, {"date", "x-request-id"}
    assert {k: v for k, v in recorded.headers.items() if k not in {*mine, *each}} == {
        k: v for k, v in plain.headers.items() if k not in each
    }
    turns = quiet_desk.wait_for_turns(asked.get("n", 1) if not stream else 1)
    assert all(turn.trainable for turn in turns)
    if stream:
        assert turns[0].token_ids == [0, 100, 1, 2, 3]
        assert turns[0].text == "w0 w1 w2 w3 "
    else:
        assert [turn.choice_index for turn in turns] == list(range(asked.get("n", 1)))
        assert recorded.headers["X-Marft-Turn"] == ",".join(turn.turn_id for turn in turns)


def test_alternatives_without_logprobs_stay_the_clients_error(quiet_desk: RecordingStage) -> None:
    quiet_desk.ask(top_logprobs=3)
    assert "logprobs" not in quiet_desk.stage.engine.seen[-1].body
    assert quiet_desk.turns[0].untrainable_reason == "no log-probabilities"


def test_recorded_streams_arrive_chunk_by_chunk(desk: RecordingStage) -> None:
    gate = desk.stage.engine.gate = threading.Semaphore(1)
    url = f"{desk.stage.url}/episodes/e1/agents/router{CHAT}"
    seen: list[str] = []
    body: dict[str, Any] = {"model": "router", "messages": [], "stream": True}
    with desk.stage.http.stream("POST", url, json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
                seen.append(delta["content"])
                # The engine writes the next chunk only after this one was read here.
                if delta["content"]:
                    gate.release()
    assert seen == ["", "w0 ", "w1 ", "w2 ", "w3 "]
    assert desk.wait_for_turns(1)[0].complete


def test_a_streamed_turn_is_logged_before_the_client_has_its_last_chunk() -> None:
    recorder = MarftRecorder(log=InMemoryLog(), inject="always")
    recording = Recording(recorder)
    path = {"episode": "e1", "agent": "a"}
    scope = {"type": "http", "path": CHAT, "headers": [], "path_params": path}
    body: dict[str, Any] = {"model": "a", "messages": HELLO, "stream": True}
    _, watch = watched(recording, Request(scope), body, f"http://engine{CHAT}")
    watch.outgoing(body)
    watch.begin(200, {"content-type": "text/event-stream"})
    choice = {"index": 0, "delta": {"content": "data: [DONE]"}, "finish_reason": "stop"}
    watch.feed(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
    episode = recording.episodes.get("e1")
    assert episode is not None and not episode.turns
    watch.feed(b"data: [DONE]\n\n")
    assert len(episode.turns) == 1 and episode.in_flight == 0
    watch.over("too late")
    assert len(episode.turns) == 1 and episode.in_flight == 0


def test_prompts_are_linked_to_what_they_quote(desk: RecordingStage) -> None:
    desk.stage.engine.replies = [{"content": "first ship it on friday"}, {"content": "done now"}]
    said = desk.ask("router").json()["choices"][0]["message"]
    desk.ask("writer", messages=[*HELLO, {"role": "user", "content": said["content"]}])
    desk.ask("writer", episode="e2", messages=[{"role": "user", "content": said["content"]}])
    first, second, elsewhere = desk.turns
    assert second.depends_on == [first.turn_id]
    assert (first.depends_on, elsewhere.depends_on) == ([], [])
    assert [first.index, second.index, elsewhere.index] == [0, 1, 0]


CALL: dict[str, Any] = {
    "id": "call-1",
    "type": "function",
    "function": {"name": "search", "arguments": '{"q": "ships"}'},
}


def test_tool_results_are_events_and_begin_a_step(desk: RecordingStage) -> None:
    asked = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    desk.stage.engine.replies = [asked]
    desk.ask()
    result = {"role": "tool", "tool_call_id": "call-1", "content": "three ships"}
    foreign = {"role": "tool", "tool_call_id": "call-0", "content": "an example in the prompt"}
    prompt = [foreign, *HELLO, asked, result]
    desk.ask(messages=prompt)
    desk.ask(messages=[*prompt, {"role": "user", "content": "and?"}])
    (tool,) = desk.of("tool")
    assert (tool.name, tool.call_id, tool.arguments, tool.result, tool.agent, tool.index) == (
        "search", "call-1", '{"q": "ships"}', "three ships", "router", 1,
    )  # fmt: skip
    assert [turn.step for turn in desk.turns] == [0, 1, 1]
    assert desk.turns[0].tool_calls == [CALL]
    assert desk.turns[1].depends_on == [desk.turns[0].turn_id]


def test_the_same_request_id_twice_is_two_turns(desk: RecordingStage) -> None:
    for _ in range(2):
        desk.ask(headers={"X-Request-Id": "trace-7"})
    first, second = desk.turns
    assert first.response_id == "chatcmpl-trace-7"
    assert second.response_id not in (None, first.response_id)


DEEP: Any = json.loads("[" * 60 + "]" * 60)


@pytest.mark.parametrize(
    "odd",
    [
        {"messages": None},
        {"messages": "hello"},
        {"messages": [1, None, "x", [], {}]},
        {"messages": [{"role": 1, "content": {"a": DEEP}}]},
        {"messages": [{"role": "user", "content": "\ud800 half a pair"}]},
        {"messages": [{"role": "tool", "tool_call_id": 5, "content": None}, {"tool_calls": "x"}]},
        {"messages": [{"role": "assistant", "tool_calls": [1, {"id": 2}, {"function": 3}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}, None]}]},
        {"messages": HELLO, "n": 0},
        {"messages": HELLO, "n": True},
        {"messages": HELLO, "user": "marft:0123"},
        {"messages": HELLO, "stop": [None, 1], "temperature": "hot", "seed": 1e300},
        {"messages": HELLO, "logprobs": "yes", "return_token_ids": 0},
        {"messages": HELLO, "stream": "yes", "stream_options": 5},
    ],
    ids=range(14),
)
def test_odd_requests_pass_as_they_would(quiet_desk: RecordingStage, odd: dict[str, Any]) -> None:
    content = json.dumps({"model": "router"} | odd)
    answers = [
        quiet_desk.stage.http.post(f"{quiet_desk.stage.url}{path}", content=content, headers=own_id)
        for path, own_id in zip(
            (CHAT, f"/episodes/odd/agents/router{CHAT}"), twin_ids(), strict=True
        )
    ]
    assert nameless(answers[0]) == nameless(answers[1])
    assert answers[0].status_code == answers[1].status_code == 200
    plain, recorded = quiet_desk.stage.engine.seen[-2:]
    own = ("return_token_ids", "logprobs")
    kept = [{k: v for k, v in seen.body.items() if k not in own} for seen in (plain, recorded)]
    assert kept[0] == kept[1]
    assert len(quiet_desk.turns) == 1


# -- without --record --------------------------------------------------------------------------


def test_a_server_that_does_not_record_says_so(tmp_path: Path) -> None:
    with running_stage(furnished(tmp_path)) as stage:
        body = {"model": "router", "messages": []}
        for path in (f"/episodes/e1/agents/router{CHAT}", f"/agents/router{CHAT}", "/episodes"):
            answer = stage.http.post(f"{stage.url}{path}", json=body)
            assert answer.status_code == 404
            assert "start it with --record DIR" in answer.json()["error"]["message"]
        for headers in ({"X-Marft-Record": "gateway", "X-Marft-Episode": "e"}, FORMS[4][1]):
            answer = stage.http.post(f"{stage.url}{CHAT}", json=body, headers=headers)
            assert answer.status_code == 400
            assert "start it with --record DIR" in answer.json()["error"]["message"]


def test_text_completions_are_not_recorded(quiet_desk: RecordingStage) -> None:
    headers = {"Authorization": "Bearer marft:agent=a,episode=e1"}
    body = {"model": "router", "prompt": "x"}
    answer = quiet_desk.post("/v1/completions", body, headers=headers)
    assert answer.status_code == 400
    assert quiet_desk.post("/v1/completions", body).status_code == 200


def test_models_are_listed_below_every_address(quiet_desk: RecordingStage) -> None:
    for prefix in ("/episodes/e1/agents/router", "/episodes/e1", "/agents/router"):
        names = [m["id"] for m in quiet_desk.get(f"{prefix}/v1/models").json()["data"]]
        assert names == ["router", "writer"]
    assert quiet_desk.events == []
