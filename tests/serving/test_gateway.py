"""The gateway answers its own routes only, from adapters only, under the names it was asked for."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

import httpx
import pytest

from marft_agents.serving import gateway
from marft_agents.serving.canary import failed
from marft_agents.serving.passage import Outcome
from marft_agents.serving.rewrite import StreamRewriter
from tests.serving.stage import LOOK_OFTEN, House, Stage, running_stage


def test_alias_version_headers_and_name(quiet_stage: Stage) -> None:
    answer = quiet_stage.chat("router", temperature=0.5)
    assert answer.status_code == 200
    body = answer.json()
    assert body["model"] == "router"
    assert body["choices"][0]["message"]["content"] == 'says "model":"router@v1"'
    assert answer.headers["X-Marft-Adapter"] == "router@v1"
    assert answer.headers["X-Marft-Logprobs-Mode"] == "processed_logprobs"
    assert json.loads(answer.headers["X-Marft-Sampling-Defaults"])["temperature"] == 1.0
    sent = quiet_stage.engine.bodies("/v1/chat/completions")[-1]
    assert sent == {
        "model": "router@v1",
        "messages": [{"role": "user", "content": "é?"}],
        "temperature": 0.5,
    }


def test_own_headers_and_keys_stay_on_this_side(quiet_stage: Stage) -> None:
    headers = {
        "X-Marft-Episode": "e1",
        "X-Marft-Agent": "router",
        "Authorization": "Bearer sk-test",
        "Cookie": "a=b",
        "X-Request-Id": "r-7",
    }
    body = {"model": "router", "messages": []}
    answer = quiet_stage.http.post(
        f"{quiet_stage.url}/v1/chat/completions", json=body, headers=headers
    )
    assert answer.headers["X-Request-Id"] == "r-7"
    sent = quiet_stage.engine.seen[-1].headers
    assert sent["x-request-id"] == "r-7"
    assert not [h for h in sent if h.startswith("x-marft") or h in {"authorization", "cookie"}]
    assert "sk-test" not in json.dumps(sent)


@pytest.mark.parametrize("model", ["router@v1", "Router", " router "])
def test_other_spellings_of_a_served_agent(quiet_stage: Stage, model: str) -> None:
    answer = quiet_stage.chat(model)
    assert (answer.status_code, answer.json()["model"]) == (200, model)


@pytest.mark.parametrize(
    ("model", "status", "message"),
    [
        ("critic", 404, "no agent 'critic' is served here; use one of the agents: router, writer"),
        ("router@v2", 404, "no agent 'router@v2'"),
        ("router@v9", 404, "no agent 'router@v9'"),
        ("base", 404, "the base model ('base') is not served by itself"),
        ("base-model", 404, "the base model ('base-model') is not served by itself"),
        ("../../etc", 404, "no agent"),
        ("", 400, "names no model"),
        (None, 400, "names no model"),
        (["router"], 400, "names no model"),
    ],
)
def test_anything_else_is_refused_and_never_answered_by_the_base(
    quiet_stage: Stage, model: object, status: int, message: str
) -> None:
    before = len(quiet_stage.engine.seen)
    answer = quiet_stage.chat(model)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    assert len(quiet_stage.engine.seen) == before


def test_models_lists_agents_with_their_version(quiet_stage: Stage) -> None:
    data = quiet_stage.http.get(f"{quiet_stage.url}/v1/models").json()["data"]
    assert [(m["id"], m["root"], m["parent"]) for m in data] == [
        ("router", "router@v1", "base-model"),
        ("writer", "writer@v1", "base-model"),
    ]


_ENGINE_ROUTES = [
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/adapters"),
    ("DELETE", "/adapters/router@v1"),
    ("POST", "/invocations"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/version"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/responses"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/sleep"),
    ("GET", "/v1/models/"),
    ("GET", "//v1/models"),
    ("GET", "/"),
]


@pytest.mark.parametrize(("method", "path"), _ENGINE_ROUTES)
def test_no_other_route_exists(quiet_stage: Stage, method: str, path: str) -> None:
    before = len(quiet_stage.engine.seen)
    url = httpx.URL(quiet_stage.url).copy_with(raw_path=path.encode())
    answer = quiet_stage.http.request(
        method, url, json={"lora_name": "router@v1", "model": "router"}
    )
    assert answer.status_code == 404
    assert "not served here" in answer.json()["error"]["message"]
    assert len(quiet_stage.engine.seen) == before


@pytest.mark.parametrize("path", ["/chat/completions", "/models", "/responses"])
def test_an_address_without_v1_is_told_so(quiet_stage: Stage, path: str) -> None:
    answer = quiet_stage.http.post(f"{quiet_stage.url}{path}", json={"model": "router"})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].endswith("base_url of the app ends in /v1")


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_wrong_methods_are_refused(quiet_stage: Stage, method: str) -> None:
    answer = quiet_stage.http.request(method, f"{quiet_stage.url}/v1/chat/completions")
    assert answer.status_code == 405 and answer.headers["Allow"] == "POST"


def test_a_mistake_of_the_server_itself_is_an_answer_that_tells_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistaken(_: object) -> None:
        raise RuntimeError("of a secret")

    monkeypatch.setattr(stage.gateway.fleet, "choose", mistaken)
    answer = stage.chat()
    assert answer.status_code == 500 and answer.headers["X-Request-Id"]
    assert answer.json()["error"]["type"] == "server_error" and "secret" not in answer.text
    assert stage.gateway.settings.admission.in_flight == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_the_server_itself_spoils_is_no_good_one(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def mistaken(*_: object) -> bytes:
        raise RuntimeError("of a secret")

    outcomes: list[Outcome] = []
    stage.gateway.observers.append(outcomes.append)
    monkeypatch.setattr(gateway, "rewrite_json", mistaken)
    monkeypatch.setattr(StreamRewriter, "feed", mistaken)
    with contextlib.suppress(httpx.RemoteProtocolError):
        assert stage.chat(stream=stream).status_code == 500
    stage.wait(lambda: len(outcomes) == 1)
    assert failed(outcomes[0]) is True
    assert stage.gateway.fleet.in_flight == stage.gateway.settings.admission.in_flight == 0


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'"x"', b"\xff", b"[" * 4000])
def test_bodies_that_are_no_object(quiet_stage: Stage, content: bytes) -> None:
    answer = quiet_stage.http.post(f"{quiet_stage.url}/v1/chat/completions", content=content)
    assert answer.status_code == 400


def test_large_bodies_are_refused_by_length_and_by_count(quiet_stage: Stage) -> None:
    url = f"{quiet_stage.url}/v1/chat/completions"
    assert quiet_stage.http.post(url, content=b"x" * 5000).status_code == 413
    # Without a length: counted while it arrives.
    assert quiet_stage.http.post(url, content=iter([b"x" * 3000, b"x" * 3000])).status_code == 413
    assert quiet_stage.chat().status_code == 200


def test_engine_errors_pass_with_their_status(stage: Stage) -> None:
    stage.engine.faults.generate_status = 400
    answer = stage.chat()
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "EngineCore encountered an issue"
    assert answer.headers["X-Marft-Adapter"] == "router@v1"


def test_health_tells_the_truth(house: House) -> None:
    with running_stage(house, pace=LOOK_OFTEN) as stage:

        def health() -> tuple[int, str]:
            answer = stage.http.get(f"{stage.url}/ready")
            return answer.status_code, answer.json().get("reason", "")

        assert health()[0] == 200
        stage.engine.faults.unwell = True
        stage.wait(lambda: health()[0] == 503)
        assert "/health answered 503" in health()[1]
        stage.engine.faults.unwell = False
        stage.wait(lambda: health()[0] == 200)


def test_an_engine_that_says_it_is_well_but_answers_nothing_takes_no_requests(house: House) -> None:
    """An engine whose worker died answers /health with 200 and everything else with 500."""
    with running_stage(house) as stage:
        stage.engine.faults.generate_status = stage.engine.faults.score_status = 500
        for _ in range(3):
            assert stage.chat().status_code == 500
        stage.wait(lambda: stage.states == ["down"])
        answer = stage.chat()
        assert answer.status_code == 503 and answer.headers["Retry-After"]
        assert "EngineCore encountered an issue" in answer.json()["error"]["message"]
        stage.engine.faults.score_status = stage.engine.faults.generate_status = 200
        stage.wait(lambda: stage.states == ["ready"])
        assert stage.chat().status_code == 200


def test_requests_that_an_engine_cannot_answer_do_not_take_it_out(house: House) -> None:
    with running_stage(house) as stage:
        stage.engine.faults.generate_status = 500
        for _ in range(10):
            assert stage.chat().status_code == 500
        assert stage.states == ["ready"] and stage.said == []


def test_a_dead_engine_is_a_clear_503(house: House) -> None:
    with running_stage(house) as stage:
        stage.dead.append("the vllm engine ended with code 137")
        answer = stage.chat()
        assert answer.status_code == 503
        assert "ended with code 137" in answer.json()["error"]["message"]
        stage.dead.clear()
        stage.wait(lambda: stage.states == ["ready"])
        stage.engine.stop()
        answer = stage.chat()
        assert answer.status_code == 503 and answer.headers["Retry-After"]
        assert "cannot be reached" in answer.json()["error"]["message"]
        stage.wait(lambda: stage.http.get(f"{stage.url}/ready").status_code == 503)
        stage.engine.start()
        stage.wait(lambda: stage.chat().status_code == 200)


def test_a_silent_engine_is_a_504(house: House) -> None:
    with running_stage(house, read_timeout_s=0.1) as stage:
        stage.engine.gate = threading.Semaphore(0)
        answer = stage.chat()
        assert answer.status_code == 504
        assert "no answer in time" in answer.json()["error"]["message"]


# -- streams -----------------------------------------------------------------------------------


def test_stream_chunks_arrive_one_by_one_with_the_asked_name(stage: Stage) -> None:
    stage.engine.gate = threading.Semaphore(0)
    body = {"model": "router", "messages": [], "stream": True}
    seen: list[dict[str, Any]] = []
    done = False
    url = f"{stage.url}/v1/chat/completions"
    with stage.http.stream("POST", url, json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["X-Marft-Adapter"] == "router@v1"
        stage.engine.gate.release()
        lines = answer.iter_lines()
        for line in lines:
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: {"):
                seen.append(json.loads(line.removeprefix("data: ")))
                # The engine writes the next chunk only after this one was read here.
                stage.engine.gate.release()
    assert done
    assert [c["model"] for c in seen] == ["router"] * 5
    said = [c["choices"][0]["delta"]["content"] for c in seen]
    assert said == ["", "w0 ", "w1 ", "w2 ", "w3 "]


def test_a_client_that_leaves_a_stream_is_noticed_upstream(stage: Stage) -> None:
    stage.engine.gate = threading.Semaphore(1)
    body = {"model": "router", "messages": [], "stream": True}
    with stage.http.stream("POST", f"{stage.url}/v1/chat/completions", json=body) as answer:
        next(answer.iter_lines())
    assert stage.engine.gone.wait(5)
    stage.wait(lambda: not stage.gateway.aliases.in_flight(stage.gateway.aliases.routes()[0]))


def test_a_client_that_leaves_a_plain_call_is_noticed_upstream(stage: Stage) -> None:
    stage.engine.gate = threading.Semaphore(0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{stage.url}/v1/chat/completions",
            json={"model": "router", "messages": []},
            timeout=0.2,
        )
    assert stage.engine.gone.wait(5)
    stage.wait(lambda: not stage.gateway.aliases.in_flight(stage.gateway.aliases.routes()[0]))


def test_a_stream_that_the_engine_breaks_ends_with_an_error(stage: Stage) -> None:
    stage.engine.faults.break_stream_after = 2
    answer = stage.chat(stream=True)
    lines = [line for line in answer.text.splitlines() if line]
    assert len(lines) >= 2
    assert "[DONE]" not in answer.text
    stage.wait(lambda: not stage.gateway.aliases.in_flight(stage.gateway.aliases.routes()[0]))


# -- keys --------------------------------------------------------------------------------------


def test_api_key(house: House) -> None:
    with running_stage(house, api_key="sk-ä") as stage:
        url = f"{stage.url}/v1/models"
        assert stage.http.get(f"{stage.url}/ready").status_code == 200
        assert stage.chat().status_code == 401
        for value in ("", "Bearer", "Bearer wrong", "Basic sk-ä", "sk-ä"):
            headers = {b"Authorization": value.encode()}
            assert stage.http.get(url, headers=headers).status_code == 401
        assert stage.engine.bodies("/v1/chat/completions") == []
        good = {b"Authorization": "Bearer sk-ä".encode()}
        assert stage.http.get(url, headers=good).status_code == 200
