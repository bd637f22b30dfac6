"""What clients send passes unchanged; what acts beyond a reply is refused; the rest is said."""

from __future__ import annotations

import ast
import copy
import importlib.util
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from marft_agents.serving.fields import BEYOND, DETOKENIZE, KNOWN, RENDER, TOKENIZE, Fields
from marft_agents.serving.refusals import Refusal
from tests.serving.stage import House, Stage, running_stage

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
PICTURE = "data:image/png;base64,AAAA"


def part(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, fields]}]}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": HELLO, "store": True, "metadata": {"a": "b"}, "service_tier": "auto"},
        {"messages": HELLO, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k"},
        {"messages": HELLO, "verbosity": "low", "reasoning_effort": "low", "modalities": ["text"]},
        {"messages": HELLO, "return_token_ids": True, "logprobs": True, "top_logprobs": 20},
        {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}, "reasoning": {}},
        {"messages": HELLO, "tools": [{}], "tool_choice": "auto", "parallel_tool_calls": False},
        {"messages": HELLO, "functions": [], "function_call": "none", "max_tokens": 5, "n": 128},
        {"messages": HELLO, "guided_json": {"type": "object"}, "priority": 0, "vllm_xargs": None},
        {"messages": HELLO, "logit_bias": {"1": 2}, "stream_options": {"include_usage": True}},
        {"messages": None, "n": None, "top_logprobs": None, "chat_template": None},
        {"messages": [1, None, {"content": {"type": "text"}}, {"content": [None, 3]}]},
        part(type="image_url", image_url={"url": PICTURE, "detail": "auto"}),
        part(type="image_url", image_url={"url": "DATA:image/png;base64,AAAA"}),
        part(type="input_audio", input_audio={"data": "AAAA", "format": "wav"}),
        part(type="refusal", refusal="no"),
    ],
)
def test_what_clients_send_passes_unchanged(body: dict[str, Any]) -> None:
    given = copy.deepcopy(body)
    kept, dropped = Fields().checked(CHAT, body)
    assert kept == given and dropped == ()


@pytest.mark.parametrize("name", sorted(BEYOND))
def test_what_acts_beyond_one_reply_is_refused_by_name(name: str) -> None:
    body = {"messages": HELLO, name: {"a": 1}}
    with pytest.raises(Refusal, match=f"the field {name} is not passed on") as caught:
        Fields().checked(CHAT, body)
    assert (caught.value.status, caught.value.param) == (400, name)
    assert "--allow-field" in caught.value.message
    assert Fields([name]).checked(CHAT, body) == (body, ())


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"lora_request": {"lora_path": "/etc"}}, "lora_request"),
        ({"My_LoRA": "x"}, "My_LoRA"),
        ({"n": 129}, "n"),
        ({"n": "4000"}, "n"),
        ({"best_of": 1e9}, "best_of"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 100_000}, "logprobs"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"max_completion_tokens": -5}, "max_completion_tokens"),
        ({"logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias"),
        ({"messages": [{}] * 10_001}, "messages"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"chat_template_kwargs": {"chat_template": "{{ x }}"}}, "chat_template"),
        ({"chat_template_kwargs": {"tokenizer": "x"}}, "chat_template"),
    ],
)
def test_too_much_is_refused_by_name(body: dict[str, Any], name: str) -> None:
    with pytest.raises(Refusal) as caught:
        Fields().checked(CHAT, body)
    assert (caught.value.status, caught.value.param) == (400, name)
    Fields([name]).checked(CHAT, body)


@pytest.mark.parametrize("path", [TOKENIZE, DETOKENIZE, RENDER, TEXT])
def test_every_route_refuses_them(path: str) -> None:
    for body in ({"priority": 1}, {"chat_template": "x"}, {"lora_name": "x"}):
        with pytest.raises(Refusal):
            Fields().checked(path, body)


def test_the_engine_fetches_no_address() -> None:
    for address in (
        "http://169.254.169.254/latest",
        "https://example.org/a.png",
        "file:///etc/passwd",
        " http://x",
        "\tdata:,",
        "ftp://x",
        "//x/y",
        "/etc/passwd",
        "unix:x",
    ):
        for fields in (
            {"type": "image_url", "image_url": {"url": address}},
            {"image_url": address},
            {"type": "input_image", "image_url": address},
            {"type": "audio_url", "audio_url": {"url": address}},
            {"type": "video_url", "video_url": {"url": address}},
            {"type": "text", "text": "x", "image_url": address},
        ):
            with pytest.raises(Refusal, match="does not fetch"):
                Fields().checked(CHAT, part(**fields))
            with pytest.raises(Refusal, match="does not fetch"):
                Fields().checked(CHAT, {"messages": [{"content": fields}]})


def test_addresses_that_the_operator_allows() -> None:
    allowing = Fields(media_urls=True)
    for address in ("http://x/a", "HTTPS://x/a", PICTURE):
        allowing.checked(CHAT, part(type="image_url", image_url={"url": address}))
    for address in ("file:///etc/passwd", "ftp://x", "/etc/passwd"):
        with pytest.raises(Refusal):
            allowing.checked(CHAT, part(type="image_url", image_url={"url": address}))


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "image_embeds", "image_embeds": "AAAA"},
        {"prompt_embeds": {}, "data": "AAAA"},
        {"type": "image_url", "image_url": {"url": PICTURE}, "uuid": "somebody's"},
    ],
)
def test_no_tensor_is_unpacked_and_no_shared_media_is_named(fields: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as caught:
        Fields().checked(CHAT, part(**fields))
    assert caught.value.param in fields.keys() | {"image_embeds"}
    Fields(["uuid", "image_embeds", "prompt_embeds"]).checked(CHAT, part(**fields))


def test_unknown_fields_are_dropped_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    fields = Fields()
    body: dict[str, Any] = {"messages": HELLO, "zebra": 1, "enable_thinking": True, "a b\r\nX": 3}
    kept: dict[str, Any] = {}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            kept, dropped = fields.checked(CHAT, body)
            assert kept == {"messages": HELLO}
            assert dropped == ("enable_thinking", "zebra", "+1")
    assert len(caplog.messages) == 3
    assert all("\n" not in message for message in caplog.messages)
    assert body.keys() > kept.keys()
    for i in range(1000):
        fields.checked(CHAT, {f"x{i}": 1})
    assert len(caplog.messages) == 100


def test_dropped_fields_are_in_the_headers_and_opened_ones_reach_the_engine(house: House) -> None:
    with running_stage(house) as stage:
        answer = stage.chat("router", zebra=1, lion=2, temperature=0.5)
        assert answer.headers["X-Marft-Dropped-Fields"] == "lion,zebra"
        assert "zebra" not in stage.engine.bodies(CHAT)[-1]
        assert "X-Marft-Dropped-Fields" not in stage.chat("router").headers
        refused = stage.chat("router", kv_transfer_params={"a": 1})
        assert (refused.status_code, refused.json()["error"]["param"]) == (
            400,
            "kv_transfer_params",
        )
        assert refused.json()["error"]["code"] == "field_not_allowed"
    with running_stage(house, fields=Fields(["zebra", "priority"])) as stage:
        answer = stage.chat("router", zebra=1, priority=3)
        assert answer.status_code == 200 and "X-Marft-Dropped-Fields" not in answer.headers
        sent = stage.engine.bodies(CHAT)[-1]
        assert (sent["zebra"], sent["priority"]) == (1, 3)


@pytest.mark.parametrize("path", [TOKENIZE, DETOKENIZE, RENDER])
def test_token_routes_act_for_the_version_of_the_agent(quiet_stage: Stage, path: str) -> None:
    asked = {"model": "router", "messages": HELLO, "tokens": [1, 2]}
    answer = quiet_stage.http.post(f"{quiet_stage.url}{path}", json=asked)
    assert answer.status_code == 200
    assert answer.headers["X-Marft-Adapter"] == "router@v1"
    seen = quiet_stage.engine.seen[-1]
    assert (seen.path, seen.body["model"]) == (path, "router@v1")
    for model, status in (("base", 404), ("nobody", 404), (None, 400)):
        answer = quiet_stage.http.post(f"{quiet_stage.url}{path}", json=asked | {"model": model})
        assert answer.status_code == status


def _fields_of(file: str, name: str) -> set[str]:
    """Annotated fields of a class in the engine's source, which takes long to import."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed here")
    tree = ast.parse((Path(spec.origin).parent / "entrypoints" / file).read_text())
    found = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name]
    lines = [n for n in found[0].body if isinstance(n, ast.AnnAssign)]
    names = {n.target.id for n in lines if isinstance(n.target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize(
    ("path", "file", "name"),
    [
        (CHAT, "openai/chat_completion/protocol.py", "ChatCompletionRequest"),
        (TEXT, "openai/completion/protocol.py", "CompletionRequest"),
        (TOKENIZE, "serve/tokenize/protocol.py", "TokenizeChatRequest"),
        (TOKENIZE, "serve/tokenize/protocol.py", "TokenizeCompletionRequest"),
        (DETOKENIZE, "serve/tokenize/protocol.py", "DetokenizeRequest"),
    ],
)
def test_every_field_of_the_engine_is_known_or_refused(path: str, file: str, name: str) -> None:
    names = _fields_of(file, name)
    assert "model" in names
    assert not names - KNOWN[path] - BEYOND.keys()


def test_a_check_costs_little() -> None:
    messages = [{"role": "user", "content": "hello " * 50}] * 30
    body = {"model": "m", "messages": messages, "temperature": 1, "stream": True, "tools": []}
    fields, best = Fields(), 1.0
    for _ in range(20):
        begun = time.perf_counter()
        for _ in range(100):
            fields.checked(CHAT, body)
        best = min(best, (time.perf_counter() - begun) / 100)
    assert best < 100e-6, f"{best * 1e6:.1f} µs for {len(json.dumps(body))} bytes"
    print(f"{best * 1e6:.1f} µs")
