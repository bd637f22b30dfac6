"""Of every route that an engine has, only the gateway's own list answers, in one spelling each."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from marft_agents.serving.access import Access
from tests.serving.conftest import furnished
from tests.serving.recording_kit import recording_stage
from tests.serving.stage import OPERATOR_KEY, House, Stage, running_stage

API_KEY = "sk-routes-0123456789"


def _words(text: str) -> list[str]:
    return text.split()


METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE")
OURS = {
    "/v1/chat/completions": {"POST"},
    "/v1/completions": {"POST"},
    "/v1/chat/completions/render": {"POST"},
    "/tokenize": {"POST"},
    "/detokenize": {"POST"},
    "/v1/models": {"GET", "HEAD"},
    "/health": {"GET", "HEAD"},
    "/ready": {"GET", "HEAD"},
    "/metrics": {"GET", "HEAD"},
}
"""What answers; ``/marft`` and ``/episodes`` are ours alone and have tests of their own."""
OPEN = {"/health", "/ready", "/metrics"}
"""What answers this machine without a key."""
NAMED = _words(
    """
    / /abort_requests /adapters /adapters/router@v1 /classify /cohere/v2/chat /collective_rpc
    /detokenize /docs /docs/oauth2-redirect /fault_tolerance/apply /generative_scoring
    /get_world_size /health /inference/v1/abort_requests /inference/v1/generate
    /init_weight_transfer_engine /invocations /is_paused /is_scaling_elastic_ep /is_sleeping
    /kv_event_sources /load /metrics /metrics/ /openapi.json /pause /ping /pooling /ready
    /redoc /release_kv_cache_memory /rerank /reset_encoder_cache /reset_mm_cache
    /reset_prefix_cache /resume /scale_elastic_ep /score /server_info /sleep /start_profile
    /start_weight_update /static/x /stop_profile /tokenize /tokenizer_info /update_weights
    /v1/audio/transcriptions /v1/audio/translations /v1/chat/completions
    /v1/chat/completions/batch /v1/chat/completions/derender /v1/chat/completions/render
    /v1/completions /v1/completions/render /v1/embeddings /v1/load_lora_adapter /v1/messages
    /v1/messages/count_tokens /v1/models /v1/models/router /v1/realtime /v1/rerank
    /v1/responses /v1/responses/r1 /v1/responses/r1/cancel /v1/responses/render /v1/score
    /v1/systemone /v1/unload_lora_adapter /v2/embed /v2/rerank /version /wake_up
    /weight_checker /weight_info
    """
)
_ROUTE = re.compile(r"""["'](/[a-z][A-Za-z0-9_/.{}]*)["']""")
_DECLARES = re.compile(
    r"(?:router|app)\.(?:get|post|put|delete|add_api_route|websocket|mount)\(\s*"
)


def _engine_routes() -> set[str]:
    """Routes in the source of the engine that is installed, beside those named above."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return set()
    found: set[str] = set()
    for file in (Path(spec.origin).parent / "entrypoints").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for declared in _DECLARES.finditer(text):
            if match := _ROUTE.match(text, declared.end()):
                found.add(re.sub(r"\{[^}]*\}", "x1", match[1]))
    assert len(found) > 40 and "/v1/load_lora_adapter" in found
    return found


def _paths() -> list[str]:
    return sorted({*NAMED, *_engine_routes()})


BODY = {"model": "router", "messages": [], "prompt": "x", "tokens": [1], "lora_name": "x"}
NO_ANSWER = {400, 401, 403, 404, 405, 429}


def _asks(http: httpx.Client, url: str, method: str, path: str, **more: Any) -> httpx.Response:
    exact = {"target": path.encode()}  # not as the client would tidy it up
    return http.request(method, url, content=json.dumps(BODY), extensions=exact, **more)


def _spellings(path: str) -> Iterator[str]:
    yield path + "/"
    yield "/" + path
    yield path.replace("/", "//", 2)
    if path != "/":
        yield path.upper()
        yield path.title()
        yield path + "%00"
        yield path + "%2f"
        yield path + "/."
        yield path + "/.."
        yield path + ";x"
        yield path.replace("/", "/./", 1)
        yield "/v1/.." + path
        yield "/%2e%2e" + path
        yield path[:1] + "%2f" + path[1:]


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    house = furnished(tmp_path_factory.mktemp("locked"))
    with running_stage(house, access=Access(OPERATOR_KEY, API_KEY)) as stage:
        yield stage


def test_every_route_and_method_of_the_engine(locked: Stage) -> None:
    keys = {
        "none": {},
        "application": {"Authorization": f"Bearer {API_KEY}"},
        "operator": {
            "X-Marft-Operator-Key": OPERATOR_KEY,
            "Authorization": f"Bearer {OPERATOR_KEY}",
        },
    }
    answered: set[tuple[str, str, str]] = set()
    before = len(locked.engine.seen)
    for path in _paths():
        for method in METHODS:
            for who, headers in keys.items():
                answer = _asks(locked.http, locked.url, method, path, headers=headers)
                if answer.status_code in NO_ANSWER:
                    # Of what is ours, a refusal is one of the key or of the method.
                    assert "[Errno" not in answer.text and "Traceback" not in answer.text
                else:
                    answered.add((path, method, who))
    wrong = {a for a in answered if a[1] not in OURS.get(a[0], set())}
    assert not wrong
    assert not {a for a in answered if a[2] == "none" and a[0] not in OPEN}
    assert not {a for a in answered if a[2] == "operator" and a[0] not in OPEN}
    assert {path for path, _, who in answered if who == "application"} == OPEN | {"/v1/models"}
    # The body names an adapter, so nothing was generated; without that, it is.
    assert not [s for s in locked.engine.seen[before:] if s.method == "POST"]
    good = {"model": "router", "messages": []}
    for path in ("/v1/chat/completions", "/tokenize", "/v1/chat/completions/render"):
        answer = locked.http.post(f"{locked.url}{path}", json=good, headers=keys["application"])
        assert answer.status_code == 200


def test_no_other_spelling_of_any_route(locked: Stage) -> None:
    headers = {
        "Authorization": f"Bearer {API_KEY}",
        "X-Marft-Operator-Key": OPERATOR_KEY,
    }
    before = len(locked.engine.seen)
    for path in _paths():
        for spelling in _spellings(path):
            if spelling in OURS or spelling == "//":
                continue
            for method in ("GET", "POST"):
                answer = _asks(locked.http, locked.url, method, spelling, headers=headers)
                assert answer.status_code in (400, 404), (method, spelling, answer.status_code)
    assert len(locked.engine.seen) == before


@pytest.mark.parametrize("recorded", [True, False])
def test_routes_below_agents_and_episodes_are_as_few(house: House, recorded: bool) -> None:
    prefixes = ("/episodes/e1/agents/router", "/episodes/e1", "/agents/router")
    stages = recording_stage(house) if recorded else running_stage(house)
    with stages as made:
        stage = made if isinstance(made, Stage) else made.stage
        for prefix in prefixes:
            for path in _paths():
                if path in ("/", "/v1/chat/completions", "/v1/models"):
                    continue
                for method in ("GET", "POST", "DELETE"):
                    answer = _asks(stage.http, stage.url, method, prefix + path)
                    assert answer.status_code in (404, 405), (prefix + path, answer.status_code)
        assert not [s for s in stage.engine.seen if s.path not in ("/v1/models", "/health")][8:]


@pytest.mark.parametrize(
    "path",
    [
        "/episodes/../v1/models",
        "/episodes/%2e%2e/v1/models",
        "/episodes/e1/agents/%2e%2e/v1/chat/completions",
        "/episodes/e1/agents/..%2f..%2fetc/v1/chat/completions",
        "/episodes/e1/agents/a%00b/v1/chat/completions",
        "/episodes/e1/agents/%E2%80%AE/v1/chat/completions",
        "/episodes/%c0%ae%c0%ae/agents/router/v1/chat/completions",
        "/episodes/e%0d%0aX-A:b/agents/router/v1/chat/completions",
        f"/episodes/{'e' * 200}/agents/router/v1/chat/completions",
        f"/episodes/e1/agents/{'a' * 200}/v1/chat/completions",
        "/episodes/e%ff/agents/router/v1/chat/completions",
    ],
)
def test_no_name_in_a_path_leads_elsewhere(house: House, path: str) -> None:
    with recording_stage(house) as desk:
        before = len(desk.stage.engine.seen)
        answer = _asks(desk.stage.http, desk.stage.url, "POST", path)
        assert answer.status_code in (400, 404, 405)
        assert not [s for s in desk.stage.engine.seen[before:] if s.method == "POST"]
        assert not desk.turns
