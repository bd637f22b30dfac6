"""Images in tasks and results of tools are kept as hash and size; texts are kept whole."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from marft_agents import MarftRecorder
from marft_agents.log import LogReader
from tests.recording.kit import case

IMAGE = base64.b64encode(b"\x89PNG\r\n\x1a\n" * 200).decode()
KEPT = {"sha256": hashlib.sha256(base64.b64decode(IMAGE)).hexdigest(), "bytes": 1600}
URL = f"data:image/png;base64,{IMAGE}"


def recorded(tmp_path: Path, task: Any, result: Any) -> Any:
    with MarftRecorder(tmp_path) as recorder, recorder.episode(task=task):
        live = recorder.current()
        assert live is not None
        live.tool("camera", arguments={"of": task}, result=result)
    (episode,) = LogReader(tmp_path).episodes()
    assert episode.tools[0].arguments == {"of": episode.task}
    return episode


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (URL, KEPT),
        ([{"type": "image_url", "image_url": {"url": URL}}], None),
        ({"type": "input_image", "image_url": URL.replace("data:", "DATA:")}, None),
        ({"type": "image", "data": IMAGE, "mimeType": "image/png"}, None),
        ([[{"source": {"type": "base64", "media_type": "image/png", "data": IMAGE}}]], None),
    ],
    ids=["url", "chat part", "response part", "tool protocol", "nested"],
)
def test_data_is_a_hash_and_a_size(value: Any, kept: Any, tmp_path: Path) -> None:
    episode = recorded(tmp_path, value, value)
    assert episode.task == episode.tools[0].result
    assert kept is None or episode.task == kept
    written = json.dumps(episode.task)
    assert json.dumps(KEPT)[1:-1] in written and IMAGE[:40] not in written


@pytest.mark.parametrize(
    "text",
    ["word " * 300, "data: what is it?", "QUJD" * 300, f"<img {URL}>"[:40]],
    ids=["words", "a question", "looks like data", "a text with a beginning of data"],
)
def test_a_text_is_kept_whole(text: str, tmp_path: Path) -> None:
    episode = recorded(tmp_path, text, {"type": "page", "text": text, "data": text})
    assert episode.task == text
    assert episode.tools[0].result == {"type": "page", "text": text, "data": text}


def test_case_40_the_task_is_the_images_message(tmp_path: Path) -> None:
    messages = case("40-images.json")["image"]
    episode = recorded(tmp_path, messages, None)
    assert episode.task[0]["content"][0] == {"type": "text", "text": "What is it?"}
    assert episode.task[0]["content"][1]["image_url"]["url"]["bytes"] == 8
