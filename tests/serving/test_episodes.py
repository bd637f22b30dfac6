"""Episodes and rewards over HTTP: begin, score, end, idle, and a restart in between."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from marft_agents.log import LogReader, LogWriter
from marft_agents.recording import MarftRecorder
from marft_agents.recording.core import random_id
from marft_agents.schema import Episode
from marft_agents.serving.episodes import Episodes
from marft_agents.serving.refusals import Refusal
from marft_agents.serving.resume import recent_episodes
from marft_agents.serving.watch import HttpCall
from marft_agents.testing import InMemoryLog
from tests.serving.recording_kit import CHAT, HELLO, Clock, RecordingStage, recording_stage
from tests.serving.stage import House


@pytest.fixture
def desk(house: House) -> Iterator[RecordingStage]:
    with recording_stage(house) as desk:
        yield desk


def test_an_episode_from_begin_to_end(desk: RecordingStage) -> None:
    task = {"question": "2+2?"}
    begun = desk.post("/episodes", {"id": "e1", "task": task, "metadata": {"split": "train"}})
    assert begun.status_code == 201
    told = begun.json()
    assert told["base_url"] == f"{desk.stage.url}/episodes/e1/v1"
    assert told["base_urls"] == {
        agent: f"{desk.stage.url}/episodes/e1/agents/{agent}/v1" for agent in ("router", "writer")
    }
    url = f"{told['base_urls']['writer']}/chat/completions"
    desk.stage.http.post(url, json={"model": "writer", "messages": HELLO})
    reward = desk.post("/episodes/e1/rewards", {"value": 0.5, "agent": "writer", "source": "x"})
    assert reward.json() == {"episode": "e1", "value": 0.5, "known": True}
    ended = desk.post("/episodes/e1/end", {"reason": "truncated", "detail": "ten turns"})
    assert ended.status_code == 200
    started, turn, reward, end = desk.events
    assert (started.task, started.metadata) == (task, {"split": "train"})
    assert (reward.value, reward.agent, reward.turn_id, reward.source) == (0.5, "writer", None, "x")
    assert (end.type, end.reason, end.detail) == ("episode_ended", "truncated", "ten turns")
    assert desk.get("/episodes/e1").json() == {
        "id": "e1",
        "ended": "truncated",
        "detail": "ten turns",
        "calls_under_way": 0,
        "turns": [{"turn_id": turn.turn_id, "agent": "writer", "response_id": turn.response_id}],
        "earlier_turns": 0,
    }


def test_ids_are_made_and_agents_can_be_named(desk: RecordingStage) -> None:
    told = desk.post("/episodes", {"agents": ["Der Planer", "router"]}).json()
    assert told["id"]
    assert told["base_urls"]["Der Planer"].endswith(f"/{told['id']}/agents/Der%20Planer/v1")
    url = f"{told['base_urls']['Der Planer']}/chat/completions"
    assert desk.stage.http.post(url, json={"model": "router", "messages": []}).status_code == 200
    assert desk.turns[0].agent == "Der Planer"
    assert desk.post("/episodes").status_code == 201  # no body at all


def test_beginning_again(desk: RecordingStage) -> None:
    body = {"id": "e1", "task": "a"}
    assert desk.post("/episodes", body).status_code == 201
    assert desk.post("/episodes", body).status_code == 201  # a client that lost the answer
    for late in ({"id": "e1", "task": "b"}, {"id": "e1"}):
        refused = desk.post("/episodes", late)
        assert refused.status_code == 409
        assert "exists already" in refused.json()["error"]["message"]
    desk.ask(episode="e2")
    assert desk.post("/episodes", {"id": "e2", "task": "a"}).status_code == 409
    assert [event.episode_id for event in desk.of("episode_started")] == ["e1", "e2"]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/episodes", {"id": "../e"}, 400, "is no episode id"),
        ("/episodes", {"id": 7}, 422, "id is a text"),
        ("/episodes", {"metadata": [1]}, 422, "metadata is a JSON object"),
        ("/episodes", {"meta": {}}, 422, "unknown field 'meta'; the fields are agents, id"),
        ("/episodes", {"agents": [1]}, 422, "agents is a list of names"),
        ("/episodes", [1], 400, "no JSON object"),
        ("/episodes/e1/end", {"reason": "done"}, 422, "one of terminated, truncated, failed"),
        ("/episodes/e1/end", {"detail": 3}, 422, "detail is a text"),
        ("/episodes/e9/end", {}, 404, "no episode 'e9'"),
        ("/episodes/e1/rewards", {}, 422, "null means not scored"),
        ("/episodes/e1/rewards", {"value": 1, "turn": "t"}, 422, "unknown field 'turn'"),
        ("/episodes/e1/rewards", {"value": 1, "source": ""}, 422, "source is a text"),
        ("/episodes/x%20y/rewards", {"value": 1}, 400, "is no episode id"),
        ("/episodes/e1/edits", {"text": "a"}, 422, "turn_id is a text"),
        ("/episodes/e1/edits", {"turn_id": "t", "text": None}, 422, "text is a text"),
        ("/episodes/e1/edits", {"turn_id": "t", "text": "a", "by": "b"}, 422, "unknown field 'by'"),
        ("/episodes/e1/humans", {"text": "a", "name": 1}, 422, "name is a text, or left out"),
        ("/episodes/e9/humans", {"text": "a"}, 404, "no episode 'e9'"),
    ],
)
def test_bodies_that_are_refused(
    desk: RecordingStage, path: str, body: Any, status: int, message: str
) -> None:
    desk.post("/episodes", {"id": "e1"})
    before = len(desk.events)
    answer = desk.post(path, body)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    assert len(desk.events) == before


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"value": NaN}', "not finite"),
        ('{"value": 1e300}', "larger than"),
        ('{"value": "1"}', "not a number: '1'"),
        ('{"value": [1]}', "not a number"),
        ('{"value": 1, "agent": 3}', "agent is a int, not a name"),
    ],
)
def test_refused_rewards_are_logged_as_refused(
    desk: RecordingStage, content: str, reason: str
) -> None:
    answer = desk.stage.http.post(f"{desk.stage.url}/episodes/e1/rewards", content=content)
    assert answer.status_code == 422
    assert reason in answer.json()["error"]["message"]
    (event,) = desk.of("reward")
    assert event.value is None and reason in event.refused


@pytest.mark.parametrize(("value", "logged"), [(True, 1.0), (0, 0.0), (None, None), (-2.5, -2.5)])
def test_rewards(desk: RecordingStage, value: Any, logged: float | None) -> None:
    turn_id = desk.ask().headers["X-Marft-Turn"]
    body = {"value": value, "turn_id": turn_id}
    assert desk.post("/episodes/e1/rewards", body).json()["known"]
    assert not desk.post("/episodes/e1/rewards", {"value": 1, "turn_id": "?"}).json()["known"]
    assert not desk.post("/episodes/of-yesterday/rewards", {"value": 1}).json()["known"]
    first = desk.of("reward")[0]
    assert (first.value, first.turn_id, first.refused) == (logged, turn_id, None)
    assert len(desk.of("reward")) == 3


def test_whoever_keeps_something_for_an_episode_learns_that_it_ended(house: House) -> None:
    with recording_stage(house, idle_s=60) as desk:
        ended: list[str] = []
        desk.recording.episodes.on_end = ended.append
        desk.ask("router", "e1")
        desk.ask("router", "e2")
        for _ in range(2):
            desk.post("/episodes/e1/end", {})
        desk.clock.now = 61
        desk.recording.episodes.sweep()
        assert ended == ["e1", "e2"]


def test_ending_again(desk: RecordingStage) -> None:
    desk.ask()
    assert desk.post("/episodes/e1/end", {}).json()["ended"] == "terminated"
    assert desk.post("/episodes/e1/end", {}).status_code == 200
    refused = desk.post("/episodes/e1/end", {"reason": "failed"})
    assert refused.status_code == 409
    assert "has ended already, terminated" in refused.json()["error"]["message"]
    assert len(desk.of("episode_ended")) == 1


def test_a_call_after_the_end_is_answered_and_not_recorded(
    desk: RecordingStage, caplog: pytest.LogCaptureFixture
) -> None:
    desk.ask()
    desk.post("/episodes/e1/end", {})
    for _ in range(2):
        late = desk.ask()
        assert late.status_code == 200
        assert late.headers["X-Marft-Recorded"] == "no; the episode e1 has ended"
    assert len(desk.turns) == 1
    assert caplog.text.count("is answered and not recorded") == 1


def test_an_end_while_a_call_is_under_way(desk: RecordingStage) -> None:
    gate = desk.stage.engine.gate = threading.Semaphore(0)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(desk.ask)
        assert desk.stage.engine.started.wait(5)
        assert desk.get("/episodes/e1").json()["calls_under_way"] == 1
        assert desk.post("/episodes/e1/end", {}).status_code == 200
        gate.release()
        assert reply.result(5).status_code == 200
    assert [event.type for event in desk.events] == ["episode_started", "turn", "episode_ended"]
    assert desk.turns[0].error == "the episode ended before the reply"
    assert desk.get("/episodes/e1").json()["calls_under_way"] == 0


def test_the_end_comes_after_a_stream_that_was_read_to_its_end(desk: RecordingStage) -> None:
    for k in range(10):
        assert "[DONE]" in desk.ask(episode=f"e{k}", stream=True).text
        desk.post(f"/episodes/e{k}/end", {})
    assert all(turn.complete and turn.trainable for turn in desk.turns)
    kinds = [event.type for event in desk.events]
    assert kinds == ["episode_started", "turn", "episode_ended"] * 10


# -- idle --------------------------------------------------------------------------------------


def test_idle_episodes_end_in_the_log_only(house: House) -> None:
    with recording_stage(house, idle_s=60) as desk:
        desk.stage.engine.replies = [{"content": "the very first answer"}]
        desk.ask()
        desk.clock.now = 61.0
        desk.recording.episodes.sweep()
        (end,) = desk.of("episode_ended")
        assert (end.reason, end.detail) == ("failed", "idle: no call for 60 s")
        assert desk.get("/episodes/e1").json()["ended"] is None
        quote = [*HELLO, {"role": "assistant", "content": "the very first answer"}, *HELLO]
        assert "X-Marft-Recorded" not in desk.ask(messages=quote).headers
        assert desk.post("/episodes/e1/end", {}).status_code == 200
        first, second = desk.turns
        assert (second.index, second.depends_on) == (1, [first.turn_id])
        assert [e.reason for e in desk.of("episode_ended")] == ["failed", "terminated"]
        assert len(desk.of("episode_started")) == 1


def test_an_episode_with_a_call_under_way_is_not_idle(house: House) -> None:
    with recording_stage(house, idle_s=60) as desk:
        gate = desk.stage.engine.gate = threading.Semaphore(0)
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(desk.ask)
            assert desk.stage.engine.started.wait(5)
            desk.clock.now = 1000.0
            desk.recording.episodes.sweep()
            gate.release()
            reply.result(5)
        desk.recording.episodes.sweep()
        assert desk.of("episode_ended") == []


def _episodes(clock: Clock, **options: Any) -> tuple[Episodes, MarftRecorder, InMemoryLog]:
    log = InMemoryLog()
    recorder = MarftRecorder(log=log)
    return Episodes(recorder.core, now=clock, **options), recorder, log


def test_memory_is_bounded() -> None:
    clock = Clock()
    episodes, recorder, log = _episodes(clock, limit=3, idle_s=10)
    for name in ("a", "b", "c", "a", "d"):
        assert episodes.use(name) is not None
    assert episodes.get("b") is None
    assert episodes.get("a") is not None
    recorder.flush()
    ends = [e for e in log.events if e.type == "episode_ended"]  # pyright: ignore[reportAttributeAccessIssue] every event has its type
    assert [(e.episode_id, e.detail) for e in ends] == [  # pyright: ignore[reportAttributeAccessIssue]
        ("b", "idle: 3 other episodes were used since")
    ]
    episodes.end("a", "terminated", None)
    clock.now = 11.0
    episodes.sweep()
    assert episodes.get("a") is None  # ended by the app: forgotten
    assert episodes.get("c") is not None  # ended by the clock: may go on
    clock.now = 22.0
    episodes.sweep()
    assert episodes.get("c") is None


def test_two_failed_calls_that_look_the_same_are_two_turns() -> None:
    episodes, _, _ = _episodes(Clock())
    live = episodes.use("e")
    assert live is not None
    calls = [HttpCall(live, "a", "act", "key", 1) for _ in range(2)]
    for call in calls:
        live.hold("key", call)
    assert [call.finished for call in calls] == [True, False]
    assert live.held("key") is calls[1]
    assert live.held("key") is None


# -- restarts ----------------------------------------------------------------------------------


def _restart(house: House, logs: Path, **options: Any) -> Any:
    return recording_stage(
        house,
        log=LogWriter(logs),
        resumable=recent_episodes(logs, 3600),
        recorder={"ids": random_id},
        **options,
    )


def _read(logs: Path, name: str) -> Episode:
    return LogReader(logs).episode(name)


def _call(name: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}}


def _seen(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": f"seen by {name}"}


def test_an_episode_goes_on_after_a_restart(house: House, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    first = {"content": "the first answer"}
    with _restart(house, logs) as desk:
        desk.post("/episodes", {"id": "e1", "task": "a task"})
        desk.stage.engine.replies = [first, {"tool_calls": [_call("c1")]}]
        desk.stage.engine.replies += [{"tool_calls": [_call("c2")]}]
        desk.ask(headers={"X-Request-Id": "r"})
        desk.ask("writer")
        desk.ask("writer", messages=[_seen("c1")])
    with _restart(house, logs) as desk:
        assert len(desk.get("/episodes/e1").json()["turns"]) == 3
        quote = {"role": "user", "content": "the first answer"}
        prompt = [quote, _seen("c1"), _seen("c2")]
        desk.ask(messages=prompt, headers={"X-Request-Id": "r"})
        assert desk.post("/episodes/e1/end", {}).status_code == 200
    with _restart(house, logs) as desk:
        assert desk.post("/episodes/e1/end", {}).status_code == 200  # the answer was lost
        assert "X-Marft-Recorded" in desk.ask().headers
    episode = _read(logs, "e1")
    assert episode.task == "a task"
    assert [t.index for t in episode.turns] == [0, 1, 2, 3]
    assert [t.step for t in episode.turns] == [0, 0, 1, 2]
    assert episode.turns[3].depends_on == [t.turn_id for t in episode.turns[:3]]
    assert [t.result for t in episode.tools] == ["seen by c1", "seen by c2"]
    assert episode.ended is not None and episode.ended.reason == "terminated"
    lines = [json.loads(x) for f in logs.glob("*.jsonl") for x in f.read_text().splitlines()]
    kinds = [line["type"] for line in lines]
    assert kinds.count("episode_started") == kinds.count("episode_ended") == 1


def test_only_recent_episodes_of_gateways_go_on(tmp_path: Path) -> None:
    assert recent_episodes(tmp_path, 60) == {}
    with MarftRecorder(tmp_path) as recorder, recorder.episode(task="of an app"):
        pass
    assert recent_episodes(tmp_path, 60) == {}
    with MarftRecorder(tmp_path) as recorder:
        Episodes(recorder.core).begin("e1", None, {})
    assert list(recent_episodes(tmp_path, 60)) == ["e1"]
    for file in tmp_path.glob("*.jsonl"):
        os.utime(file, (0, 0))
    assert recent_episodes(tmp_path, 60) == {}


def test_an_idle_end_before_a_restart_is_no_end(tmp_path: Path) -> None:
    clock = Clock()
    with MarftRecorder(tmp_path) as recorder:
        episodes = Episodes(recorder.core, idle_s=5, now=clock)
        episodes.use("e1")
        episodes.use("e2")
        episodes.end("e2", "failed", "a crash")
        clock.now = 6.0
        episodes.sweep()
    with MarftRecorder(tmp_path) as recorder:
        again = Episodes(recorder.core, resumable=recent_episodes(tmp_path, 60))
        assert again.use("e1") is not None
        assert again.use("e2") is None
        with pytest.raises(Refusal, match="ended already, failed"):
            again.end("e2", "terminated", None)


# -- keys and limits ---------------------------------------------------------------------------


def test_every_recording_route_asks_for_the_key(house: House) -> None:
    with recording_stage(house, api_key="sk-1") as desk:
        paths = [
            ("POST", "/episodes"),
            ("GET", "/episodes/e1"),
            ("POST", "/episodes/e1/end"),
            ("POST", "/episodes/e1/rewards"),
            ("POST", "/episodes/e1/edits"),
            ("POST", "/episodes/e1/humans"),
            ("POST", f"/episodes/e1/agents/router{CHAT}"),
            ("GET", "/episodes/e1/agents/router/v1/models"),
        ]
        for method, path in paths:
            url = f"{desk.stage.url}{path}"
            assert desk.stage.http.request(method, url, json={}).status_code == 401
        good = {"Authorization": "Bearer sk-1"}
        assert desk.post("/episodes", {"id": "e1"}, headers=good).status_code == 201
        assert len(desk.events) == 1


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_web_pages_of_other_sites_write_nothing(desk: RecordingStage, site: str) -> None:
    page = {"Sec-Fetch-Site": site, "Content-Type": "text/plain"}
    desk.post("/episodes", {"id": "e1"})
    for path in ("", "/e1/rewards", "/e1/end", "/e1/edits", "/e1/humans"):
        assert desk.post(f"/episodes{path}", {"value": 1}, headers=page).status_code == 403
    assert desk.ask(headers=page).status_code == 403
    assert len(desk.events) == 1
    assert desk.ask(headers={"Sec-Fetch-Site": "same-origin"}).status_code == 200


def test_bodies_have_a_limit(desk: RecordingStage) -> None:
    big = {"task": "x" * (1024 * 1024)}
    assert desk.post("/episodes", big).status_code == 413
    assert desk.post("/episodes/e1/rewards", {"value": 1, "source": "x" * 2**20}).status_code == 413


@pytest.mark.parametrize(
    "path",
    [
        "/episodes/%2e%2e/agents/router/v1/chat/completions",
        "/episodes/e1/agents/%2e%2e/v1/chat/completions",
        "/episodes/e1/agents/a%5Cb/v1/chat/completions",
        "/episodes/e1/agents/a%2F..%2Fb/v1/chat/completions",
        "/episodes/e1/agents/a%0Ab/v1/chat/completions",
        "/episodes/a%00b/end",
    ],
)
def test_names_that_are_paths_or_lines_lead_nowhere(desk: RecordingStage, path: str) -> None:
    url = httpx.URL(desk.stage.url).copy_with(raw_path=path.encode())
    answer = desk.stage.http.post(url, json={"model": "router", "messages": []})
    assert answer.status_code in (400, 404)
    assert desk.events == []


def test_secrets_in_metadata_are_masked(desk: RecordingStage) -> None:
    desk.post("/episodes", {"metadata": {"api_key": "sk-abcdef123456", "user": "u"}})
    (started,) = desk.of("episode_started")
    assert started.metadata["api_key"] != "sk-abcdef123456"
    assert started.metadata["user"] == "u"
