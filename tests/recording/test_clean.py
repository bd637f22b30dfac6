"""Anything becomes JSON; payloads become hash and size."""

from __future__ import annotations

import base64
import enum
import hashlib
import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from marft_agents.recording.clean import Payload, jsonable, stored_messages, without_secrets


class Colour(enum.StrEnum):
    RED = "red"


class Thing(BaseModel):
    when: date
    where: Path


class Hostile:
    def __str__(self) -> str:
        raise RuntimeError("no text of mine")


def test_foreign_objects_become_text() -> None:
    given: Any = {
        "model": Thing(when=date(2026, 1, 2), where=Path("/a")),
        "class": Thing,
        1: {"x"},
        "tuple": (1, 2.5, None, True),
        "enum": Colour.RED,
        "hostile": Hostile(),
    }
    out = jsonable(given)
    json.dumps(out)
    assert out["model"] == {"when": "2026-01-02", "where": "/a"}
    assert out["1"] == ["x"] and out["tuple"] == [1, 2.5, None, True]
    assert out["enum"] == "red" and out["hostile"] == "<Hostile>"


def test_keys_are_left_out_wherever_an_app_puts_its_settings() -> None:
    given: Any = {
        "llm_config": {"config_list": [{"model": "m", "api_key": "sk-test-1"}], "apiKey": None},
        "headers": {"Authorization": "Bearer sk-test-2", "X-Api-Key": "sk-test-3"},
        "question": "my api_key=sk-mine is refused",
        "max_tokens": 5,
    }
    out = without_secrets(jsonable(given))
    assert "sk-test" not in json.dumps(out)
    config = {"model": "m", "api_key": "[redacted:api-key]"}
    assert out["llm_config"] == {"config_list": [config], "apiKey": None}
    assert out["question"] == given["question"], "text is the app's own"
    assert out["max_tokens"] == 5


def test_a_structure_that_holds_itself_ends() -> None:
    loop: list[Any] = []
    loop.append(loop)
    json.dumps(jsonable(loop))


def test_the_copy_is_independent() -> None:
    given = {"a": [1]}
    out = jsonable(given)
    given["a"].append(2)
    assert out == {"a": [1]}


def test_text_is_verbatim_even_when_it_looks_like_data() -> None:
    messages = [
        {"role": "user", "content": "data:image/png;base64,aGk="},
        {"role": "user", "content": [{"type": "text", "text": "A" * 600}]},
        {"role": "user", "content": "half a pair \ud83d"},
    ]
    assert stored_messages(messages) == messages


def test_payloads_of_any_part_type_are_hashed() -> None:
    raw = bytes(range(256)) * 4
    encoded = base64.b64encode(raw).decode()
    parts = [
        {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}},
        {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{encoded}"}},
        {"type": "image_url", "image_url": {"url": "https://example.invalid/cat.png"}},
        "loose",
        7,
    ]
    (message,) = stored_messages([{"role": "user", "content": parts}])
    want = {"sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw)}
    audio, file, url, *rest = message["content"]
    data: list[Payload] = [audio["input_audio"]["data"], file["file"]["file_data"]]
    assert [payload.described() for payload in data] == [want, want]
    assert audio["type"] == "input_audio" and audio["input_audio"]["format"] == "wav"
    assert url == parts[2] and rest == ["loose", 7]


def test_a_long_text_that_is_no_data_stays_a_text() -> None:
    assert Payload("no base64! " * 100).described() == "no base64! " * 100


def test_odd_messages_are_kept_as_they_can() -> None:
    assert stored_messages("no list") == []
    assert stored_messages(["x"]) == [{"role": "unknown", "content": "x"}]
    assert (
        stored_messages([{"content": {"type": "text", "text": "a"}}])[0]["content"]["text"] == "a"
    )


class Unreadable(list[int]):
    def __iter__(self) -> Iterator[int]:
        raise RuntimeError("no items of mine")


def test_what_cannot_be_read_becomes_text_and_the_rest_stays() -> None:
    out = jsonable({"good": [1], "bad": Unreadable([1, 2]), "huge": 10**5000, "numbers": range(9)})
    assert out["good"] == [1] and out["bad"] == "[1, 2]" and out["numbers"] == "range(0, 9)"
    assert out["huge"].startswith("0x")
    json.dumps(out)


def test_things_that_refer_to_each_other_have_an_end() -> None:
    root: dict[str, Any] = {"children": []}
    root["children"] = [{"parent": root, "name": i} for i in range(3)]
    child = {"parent": "<itself>", "name": 0}
    assert jsonable(root)["children"][0] == child
    shared: list[Any] = ["leaf"]
    for _ in range(60):
        shared = [shared, shared]
    with_limit = jsonable({"first": [shared], "then": "text"})
    assert with_limit["then"] == "text"
