"""The wire: shapes, streams, stops and errors as vLLM has them."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from marft_agents.serving.local.engine import LocalEngine
from tests.serving.local_setup import World, events, write_adapter

MESSAGES = [{"role": "user", "content": "ship on friday?"}]
CHAT = "/v1/chat/completions"
EXACT = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "logprobs": True}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def served(world: World) -> Generator[tuple[LocalEngine, TestClient]]:
    with world.client() as pair:
        yield pair


@pytest.fixture
def client(served: tuple[LocalEngine, TestClient]) -> TestClient:
    return served[1]


def _chat(client: TestClient, **fields: Any) -> dict[str, Any]:
    body = {"model": "router@v1", "messages": MESSAGES, "max_tokens": 10, **EXACT, **fields}
    reply = client.post(CHAT, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def _refused(client: TestClient, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    reply = client.post(path, json=body)
    assert reply.json().keys() == {"error"}
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["message"]
    assert error["code"] == reply.status_code
    return reply.status_code, error


def test_health_and_models(client: TestClient, world: World) -> None:
    assert client.get("/health").status_code == 200
    cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    assert cards.keys() == {"base", "router@v1", "writer@v1", "idle@v1"}
    assert (cards["base"]["root"], cards["base"]["parent"]) == (str(world.model), None)
    router = cards["router@v1"]
    assert (router["root"], router["parent"]) == (str(world.folders["router@v1"]), "base")
    assert (router["owned_by"], router["max_model_len"]) == ("marft-agents", 1024)


def test_a_chat_reply(client: TestClient, world: World) -> None:
    body = _chat(client)
    choice = body["choices"][0]
    prompt = client.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    assert body["object"] == "chat.completion" and body["model"] == "router@v1"
    assert body["id"].startswith("chatcmpl-")
    assert body["prompt_token_ids"] == prompt
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert len(choice["token_ids"]) == 10
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": 10,
        "total_tokens": 10 + len(prompt),
    }
    assert body["usage"].items() >= usage.items()
    content = choice["logprobs"]["content"]
    assert all(e.keys() == {"token", "logprob", "bytes", "top_logprobs"} for e in content)
    assert all(entry["bytes"] == list(entry["token"].encode()) for entry in content)
    expected = world.logprobs("router@v1", prompt, choice["token_ids"])
    assert [entry["logprob"] for entry in content] == pytest.approx(expected, abs=1e-4)


def test_nothing_extra_unless_asked_for(client: TestClient) -> None:
    body = _chat(client, return_token_ids=None, logprobs=None)
    assert body["prompt_token_ids"] is None
    assert body["choices"][0]["token_ids"] is None and body["choices"][0]["logprobs"] is None


def test_top_logprobs(client: TestClient) -> None:
    for entry in _chat(client, top_logprobs=3)["choices"][0]["logprobs"]["content"]:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 3 and values[0] == entry["logprob"] and values[1] >= values[2]
    cut = _chat(client, top_logprobs=3, temperature=1.0, top_k=1)["choices"][0]["logprobs"]
    assert [t["logprob"] for t in cut["content"][0]["top_logprobs"]] == [0.0, -9999.0, -9999.0]


@pytest.mark.parametrize("fields", [{}, {"stop": ["e", "on"]}, {"temperature": 0.9, "seed": 4}])
def test_streamed_equals_whole(client: TestClient, fields: dict[str, Any]) -> None:
    whole = _chat(client, **fields)
    body = {"model": "router@v1", "messages": MESSAGES, "max_tokens": 10, **EXACT, **fields}
    with client.stream(
        "POST", CHAT, json=body | {"stream": True, "stream_options": {"include_usage": True}}
    ) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        chunks = events(reply.read().decode())
    opening, *middle, usage = chunks
    assert opening["prompt_token_ids"] == whole["prompt_token_ids"]
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert usage["choices"] == [] and usage["usage"] == whole["usage"]
    choices = [chunk["choices"][0] for chunk in middle]
    expected = whole["choices"][0]
    assert "".join(c["delta"]["content"] for c in choices) == expected["message"]["content"]
    assert [t for c in choices for t in c["token_ids"]] == expected["token_ids"]
    assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == expected["finish_reason"]
    assert choices[-1]["stop_reason"] == expected["stop_reason"]
    streamed = [entry for c in choices for entry in c["logprobs"]["content"]]
    whole_content = expected["logprobs"]["content"]
    assert [e["token"] for e in streamed] == [e["token"] for e in whole_content]
    assert [e["logprob"] for e in streamed] == pytest.approx(
        [e["logprob"] for e in whole_content], abs=1e-4
    )
    assert {chunk["id"] for chunk in chunks} == {opening["id"]}


def test_a_stream_without_usage_has_none(client: TestClient) -> None:
    body = {"model": "base", "messages": MESSAGES, "max_tokens": 3, "stream": True}
    chunks = events(client.post(CHAT, json=body).text)
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


def test_a_stop_string_cuts_the_text_and_not_the_ids(client: TestClient) -> None:
    free = _chat(client, max_tokens=30)["choices"][0]
    text = free["message"]["content"]
    stop = text[4:7]
    choice = _chat(client, max_tokens=30, stop=stop)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["message"]["content"] == text[: text.find(stop)]
    length = len(choice["token_ids"])
    assert choice["token_ids"] == free["token_ids"][:length] and 0 < length < 30
    kept = _chat(client, max_tokens=30, stop=stop, include_stop_str_in_output=True)
    assert kept["choices"][0]["message"]["content"] == text[: text.find(stop)] + stop


def test_a_length_stop_has_no_end_token(client: TestClient) -> None:
    for seed in range(30):
        choice = _chat(client, ignore_eos=False, temperature=1.5, max_tokens=20, seed=seed)
        choice = choice["choices"][0]
        ends = [place for place, token in enumerate(choice["token_ids"]) if token == 2]
        if choice["finish_reason"] == "stop":
            assert ends == [len(choice["token_ids"]) - 1]
            assert "<|im_end|>" not in choice["message"]["content"]
            return
        assert ends == [] and len(choice["token_ids"]) == 20
    pytest.fail("no reply ended by its end token")


def test_two_choices(client: TestClient) -> None:
    choices = _chat(client, n=2, temperature=1.0, seed=1)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert choices[0]["token_ids"] != choices[1]["token_ids"]
    assert (
        choices[0]["token_ids"] == _chat(client, temperature=1.0, seed=1)["choices"][0]["token_ids"]
    )
    body = {"model": "router@v1", "messages": MESSAGES, "max_tokens": 10, **EXACT}
    body |= {"n": 2, "temperature": 1.0, "seed": 1, "stream": True}
    ids: dict[int, list[int]] = {0: [], 1: []}
    for chunk in events(client.post(CHAT, json=body).text):
        for choice in chunk["choices"]:
            ids[choice["index"]] += choice.get("token_ids") or []
    assert [ids[0], ids[1]] == [choice["token_ids"] for choice in choices]


def test_every_message_form_reaches_the_template(client: TestClient) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {
            "role": "system",
            "content": [{"type": "text", "text": "you"}, {"type": "text", "text": "it"}],
        },
        {"role": "user", "name": "Ann", "content": "plan"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    text = (
        "<|im_start|>system\nyou\nit<|im_end|>\n<|im_start|>user\nplan<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    )
    chat = client.post("/tokenize", json={"messages": messages}).json()
    plain = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert chat["tokens"] == plain["tokens"] and chat["count"] == len(chat["tokens"])
    assert "".join(plain["token_strs"]) == text and plain["max_model_len"] == 1024
    assert _chat(client, messages=messages)["prompt_token_ids"] == chat["tokens"]
    rendered = client.post(
        "/v1/chat/completions/render", json={"model": "writer@v1", "messages": messages}
    ).json()
    assert (rendered["token_ids"], rendered["model"]) == (chat["tokens"], "writer@v1")
    back = client.post("/detokenize", json={"tokens": chat["tokens"]}).json()
    assert back == {"prompt": text}
    for wrong in ([10**9], [-1], "x", None):
        assert client.post("/detokenize", json={"tokens": wrong}).status_code == 400


def test_completions_of_text_ids_and_several(client: TestClient, world: World) -> None:
    ids = client.post("/tokenize", json={"prompt": "the quick fox"}).json()["tokens"]
    body = {"model": "writer@v1", "max_tokens": 6, **EXACT, "logprobs": 1}
    forms: list[Any] = ["the quick fox", ids, [ids, ids[:2]], ["the quick fox", "plan"]]
    replies = [
        client.post("/v1/completions", json=body | {"prompt": form}).json() for form in forms
    ]
    first = replies[0]["choices"][0]
    assert replies[0]["object"] == "text_completion" and replies[0]["id"].startswith("cmpl-")
    assert first["prompt_token_ids"] == ids and len(first["token_ids"]) == 6
    for reply in replies[1:]:
        assert reply["choices"][0]["token_ids"] == first["token_ids"]
    assert [choice["index"] for choice in replies[2]["choices"]] == [0, 1]
    assert replies[2]["choices"][1]["prompt_token_ids"] == ids[:2]
    logprobs = first["logprobs"]
    expected = world.logprobs("writer@v1", ids, first["token_ids"])
    assert logprobs["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    assert logprobs["text_offset"][0] == 0 and len(logprobs["tokens"]) == 6
    pairs = zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
    assert all(name in top for name, top in pairs)


def test_a_streamed_completion(client: TestClient) -> None:
    body = {"model": "base", "prompt": "ship", "max_tokens": 5, **EXACT, "logprobs": 0}
    whole = client.post("/v1/completions", json=body).json()["choices"][0]
    chunks = events(client.post("/v1/completions", json=body | {"stream": True}).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert [t for choice in choices for t in choice["token_ids"]] == whole["token_ids"]
    assert "usage" not in chunks[-1]


@pytest.mark.parametrize("top", [0, 1, 3])
def test_prompt_logprobs(client: TestClient, world: World, top: int) -> None:
    ids = [5, 77, 31, 200, 9]
    body = {"model": "router@v1", "prompt": ids, "max_tokens": 1, "prompt_logprobs": top}
    first, *rest = client.post("/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"]
    assert first is None and len(rest) == 4
    expected = world.logprobs("router@v1", ids[:1], ids[1:])
    for token, entries, value in zip(ids[1:], rest, expected, strict=True):
        assert top <= len(entries) <= top + 1
        entry = entries[str(token)]
        assert entry.keys() == {"logprob", "rank", "decoded_token"} and entry["rank"] >= 1
        assert entry["logprob"] == pytest.approx(value, abs=1e-4)
        ranks = sorted(e["rank"] for e in entries.values())
        assert ranks[: max(top, 1)] == list(range(1, top + 1)) or top == 0


def test_chat_prompt_logprobs_are_at_the_top(client: TestClient) -> None:
    body = _chat(client, prompt_logprobs=0)
    assert len(body["prompt_logprobs"]) == len(body["prompt_token_ids"])


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_an_unknown_model_is_404(client: TestClient, path: str) -> None:
    body = {"model": "router", "messages": MESSAGES, "prompt": "x"}
    status, error = _refused(client, path, body)
    assert (status, error["type"]) == (404, "NotFoundError")
    assert error["message"] == "The model `router` does not exist."


def test_a_missing_model_name_means_the_base(client: TestClient) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1}
    assert client.post(CHAT, json=body).json()["model"] == "base"


@pytest.mark.parametrize(
    ("path", "fields", "text"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a " * 2000}]}, "maximum context length"),
        (CHAT, {"max_tokens": 1024}, "requested 1024 output tokens"),
        (CHAT, {"temperature": -1}, "temperature"),
        (CHAT, {"temperature": "hot"}, "temperature"),
        (CHAT, {"top_p": 0}, "top_p"),
        (CHAT, {"n": 0}, "n:"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"stop": ""}, "stop cannot contain an empty string"),
        (CHAT, {"top_logprobs": 99}, "top_logprobs"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hello"}, "messages"),
        (CHAT, {"messages": [{"content": "x"}]}, "role is None"),
        (CHAT, {"messages": [{"role": "user", "content": 7}]}, "neither text nor parts"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text parts"),
        (CHAT, {"presence_penalty": 0.5}, "presence_penalty=0.5 is not supported"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"tools": [{"type": "function"}]}, "tool_choice='auto' is not supported"),
        (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [-1]}, "prompt"),
        ("/v1/completions", {"prompt": [99999]}, "out of vocabulary"),
        ("/v1/completions", {"prompt": ""}, "no tokens"),
        ("/v1/completions", {"echo": True}, "echo=True"),
        ("/tokenize", {"prompt": "x", "messages": []}, "either"),
        ("/v1/load_lora_adapter", {"lora_name": "x"}, "lora_path"),
        ("/v1/load_lora_adapter", {"lora_name": "", "lora_path": "x"}, "lora_name"),
    ],
)
def test_a_bad_field_is_400_and_named(
    client: TestClient, path: str, fields: dict[str, Any], text: str
) -> None:
    body: dict[str, Any] = {"model": "base", "prompt": "x"}
    body |= {"messages": MESSAGES} if path == CHAT else {}
    status, error = _refused(client, path, body | fields)
    assert status == 400 and text in error["message"]


def test_a_body_that_is_not_json(client: TestClient) -> None:
    reply = client.post(CHAT, content=b"{")
    assert reply.status_code == 400 and "not JSON" in reply.json()["error"]["message"]


def test_neutral_and_unknown_fields_are_ignored(client: TestClient) -> None:
    plain = _chat(client)["choices"][0]["token_ids"]
    fields: dict[str, Any] = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1,
        "response_format": {"type": "text"},
        "logit_bias": {},
        "user": "me",
        "parallel_tool_calls": True,
        "top_k": -1,
        "top_p": 1.0,
        "min_p": 0,
        "stop": None,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "none",
    }
    assert _chat(client, **fields)["choices"][0]["token_ids"] == plain


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/metrics", 404), ("GET", CHAT, 405)]
)
def test_other_routes_answer_in_the_same_form(
    client: TestClient, method: str, path: str, status: int
) -> None:
    reply = client.request(method, path)
    assert reply.status_code == reply.json()["error"]["code"] == status


def test_the_request_id_comes_back(client: TestClient) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1}
    reply = client.post(CHAT, json=body, headers={"X-Request-Id": "abc"})
    assert reply.json()["id"] == "chatcmpl-abc"


def test_adapter_routes_answer_as_vllm_does(client: TestClient, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "coder-v1", seed=9)
    order = {"lora_name": "coder@v1", "lora_path": str(folder)}
    reply = client.post("/v1/load_lora_adapter", json=order)
    assert (reply.status_code, reply.text) == (
        200,
        "Success: LoRA adapter 'coder@v1' added successfully.",
    )
    status, error = _refused(client, "/v1/load_lora_adapter", order)
    assert (status, error["type"]) == (400, "InvalidUserInput")
    assert _chat(client, model="coder@v1")["model"] == "coder@v1"
    reply = client.post("/v1/load_lora_adapter", json=order | {"load_inplace": True})
    assert reply.status_code == 200
    status, _ = _refused(
        client, "/v1/load_lora_adapter", {"lora_name": "x@v1", "lora_path": str(tmp_path / "no")}
    )
    assert status == 404
    reply = client.post("/v1/unload_lora_adapter", json={"lora_name": "coder@v1"})
    assert (reply.status_code, reply.text) == (
        200,
        "Success: LoRA adapter 'coder@v1' removed successfully.",
    )
    status, error = _refused(client, "/v1/unload_lora_adapter", {"lora_name": "coder@v1"})
    assert (status, error["type"]) == (404, "NotFoundError")
    assert _refused(client, CHAT, {"model": "coder@v1", "messages": MESSAGES})[0] == 404


def test_an_engine_failure_is_a_500_and_an_event_once_streaming(
    served: tuple[LocalEngine, TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, client = served
    forward, calls = engine.model.forward, [0]

    def fails_at(call: int) -> Any:
        def run(*args: Any) -> Any:
            calls[0] += 1
            if calls[0] >= call:
                raise MemoryError("no room")
            return forward(*args)

        calls[0] = 0
        return run

    body = {"model": "base", "messages": MESSAGES, "max_tokens": 8, "stream": True} | EXACT
    monkeypatch.setattr(engine.model, "forward", fails_at(1))
    assert _refused(client, CHAT, body)[0] == 500
    monkeypatch.setattr(engine.model, "forward", fails_at(4))
    chunks = events(client.post(CHAT, json=body).text)
    assert chunks[-1]["error"]["code"] == 500 and len(chunks) == 5
    monkeypatch.undo()
    assert client.get("/health").status_code == 200
    assert _chat(client)["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize"])
def test_half_a_character_is_the_clients_mistake(client: TestClient, path: str) -> None:
    torn = "a \ud800 b"
    body = {"messages": [{"role": "user", "content": torn}]} if path == CHAT else {"prompt": torn}
    data = json.dumps({"model": "router@v1"} | body)
    reply = client.post(path, content=data, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    assert "error" in reply.json()
