"""What runs elsewhere: whether it can be an engine of ours, and what clients see of its errors."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from marft_agents.errors import ConfigError, EngineError
from marft_agents.serving import ServerProcess
from marft_agents.serving.client import EngineClient
from marft_agents.serving.foreign import require_engine
from marft_agents.serving.masking import masked_body, masking
from marft_agents.serving.rewrite import StreamRewriter
from tests.serving.fake_engine import FakeEngine
from tests.serving.stage import House, Stage, running_app, running_stage

SECRET = "sk-proj-" + "aB3dE5gH7jK9" * 3


def _require(url: str, key: str | None = None) -> None:
    with EngineClient(url, api_key=key) as client:
        require_engine(client)


# -- who is there ------------------------------------------------------------------------------


def test_an_engine_may_be_used_and_is_asked_for_nothing() -> None:
    with FakeEngine() as engine:
        _require(engine.url)
        assert engine.adapters == {} and not engine.events


@pytest.mark.parametrize("api_key", [None, "sk-1"])
def test_another_gateway_is_none_ready_or_not(house: House, api_key: str | None) -> None:
    with running_stage(house, api_key=api_key) as stage:
        told = f"{stage.url} is a gateway of marft-agents, not an engine.*base_url {stage.url}/v1"
        with pytest.raises(ConfigError, match=told):
            _require(stage.url)
        stage.gateway.fleet.replicas[0].become("down", "a test")
        with pytest.raises(ConfigError, match=told):
            _require(stage.url)


@pytest.mark.parametrize("ready", [Response("ok"), JSONResponse({"status": "fine"})])
def test_an_engine_without_a_route_for_adapters_is_none(ready: Response) -> None:
    def answer(_: Request) -> Response:
        return ready

    with running_app(Starlette(routes=[Route("/ready", answer)])) as url:
        with pytest.raises(ConfigError, match="no route /v1/load_lora_adapter; start it with") as e:
            _require(url)
        assert url in str(e.value) and "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" in str(e.value)


def _start(house: House, url: str) -> str:
    words = ("--server", url)
    server = ServerProcess(
        house.registry.root, model=house.base_dir, extra=words, start_timeout_s=60
    )
    with pytest.raises(EngineError) as caught:
        server.start()
    return str(caught.value)


def test_serve_says_so_once_and_ends(house: House) -> None:
    with running_stage(house) as stage:
        said = _start(house, stage.url)
    assert "is a gateway of marft-agents, not an engine" in said and "--offline" not in said


def test_an_engine_that_was_started_without_room_for_adapters(house: House) -> None:
    with FakeEngine() as engine:
        engine.faults.load_status = 500
        engine.faults.load_message = "Call to add_lora method failed: LoRA is not enabled"
        said = _start(house, engine.url)
    assert "takes no adapters: it says that LoRA is not enabled; start it with --enable" in said
    assert "--offline" not in said


# -- what it says ------------------------------------------------------------------------------


@pytest.fixture
def stage(house: House) -> Iterator[Stage]:
    with running_stage(house) as stage:
        yield stage


def test_an_engines_error_reaches_clients_without_its_secrets(stage: Stage) -> None:
    stage.engine.faults.refuses = lambda _: f"wrong key {SECRET}, asked for 'é'"
    answer = stage.chat()
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert SECRET not in answer.text
    assert message.startswith("wrong key [redacted:") and message.endswith(", asked for 'é'")


def test_a_reply_is_none_of_an_error(stage: Stage) -> None:
    stage.engine.replies = [{"content": SECRET}]
    answer = stage.chat()
    assert answer.json()["choices"][0]["message"]["content"] == SECRET


def test_why_a_replica_is_down_is_told_without_secrets(stage: Stage) -> None:
    stage.gateway.fleet.replicas[0].become("down", f"it answered 401: wrong key {SECRET}")
    answer = stage.chat()
    assert answer.status_code == 503
    assert "it answered 401: wrong key [redacted:" in answer.json()["error"]["message"]


def test_the_key_that_an_engine_is_asked_with_is_masked_whatever_it_looks_like() -> None:
    masked = masking("open sesame")
    assert masked("no such key: open sesame") == "no such key: [redacted:key]"
    assert masking("ab")("about") == "about"


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        (b'{"error":  "all is well"}', b'{"error":  "all is well"}'),
        (b"wrong key open sesame", b"wrong key [redacted:key]"),
        (b"\xff", b"\xff"),
        (
            b'{"detail": [{"password": "hunter22hunter", "n": 1}]}',
            b'{"detail": [{"password": "[redacted:password]", "n": 1}]}',
        ),
    ],
)
def test_bodies_of_any_form(content: bytes, seen: bytes) -> None:
    assert masked_body(content, masking("open sesame")) == seen


def _event(value: object) -> bytes:
    return b"data: %b\n\n" % json.dumps(value, separators=(",", ":")).encode()


@pytest.mark.parametrize("together", [False, True])
def test_an_error_in_a_stream(together: bool) -> None:
    chunk = {"id": "x", "model": "router@v1", "choices": [{"index": 0, "delta": {"content": "a"}}]}
    said = chunk | {"choices": [{"index": 0, "delta": {"content": f'"error" {SECRET}'}}]}
    events = [_event(chunk), _event(chunk), _event(said), _event({"error": {"message": SECRET}})]
    rewriter = StreamRewriter("router@v1", "router")
    fed = [b"".join(events)] if together else events
    first = rewriter.feed(_event(chunk)) + rewriter.feed(_event(chunk))
    seen = b"".join([first, *map(rewriter.feed, fed), rewriter.end()])
    told = [json.loads(e.removeprefix(b"data: ")) for e in seen.split(b"\n\n") if e]
    assert [t["model"] for t in told[:-1]] == ["router"] * 5
    assert told[4]["choices"][0]["delta"]["content"] == f'"error" {SECRET}'
    assert told[5]["error"]["message"].startswith("[redacted:")


def test_half_a_surrogate_pair_beside_a_secret() -> None:
    content = rb'{"error": "\ud800 open sesame"}'
    assert json.loads(masked_body(content, masking("open sesame")))["error"].startswith("\ud800 ")
    assert b"open sesame" not in masked_body(content, masking("open sesame"))
