"""Real failures of real users in turning messages into a prompt."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from marft_agents.serving.local.chat import render
from marft_agents.serving.local.protocol import ChatRequest
from marft_agents.serving.local.refusal import Refusal
from tests.tiny_model import make_tiny_model

CASES = Path(__file__).parents[1] / "cases"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(make_tiny_model(tmp_path / "model"))


def rendered(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    request = ChatRequest.model_validate({"model": "x", "messages": messages})
    return tokenizer.decode(render(tokenizer, messages, request))


def test_case_01_arguments_are_decoded_once(tokenizer: Any) -> None:
    """Case 01: strings become objects; what is no object becomes an empty one, as in vLLM."""
    data = json.loads((CASES / "01-tool-args.json").read_text())
    tokenizer.chat_template = data["strict_template"]
    for variant in data["variants"]:
        messages = copy.deepcopy(data["messages"])
        messages[1]["tool_calls"][0]["function"]["arguments"] = variant["arguments"]
        wanted = variant["want"] if isinstance(variant["want"], dict) else {}
        shown = "".join(f" {name}={value}" for name, value in wanted.items())
        text = rendered(tokenizer, messages)
        assert text == data["want_render"].replace(" a=2 b=3", shown)


def test_case_03_null_content_is_rendered_as_empty_text(tokenizer: Any) -> None:
    """Case 03: null, empty and missing content give the same prompt, without the word None."""
    data = json.loads((CASES / "03-none-content.json").read_text())
    for message in [*data["messages"], *data["also"]]:
        text = rendered(tokenizer, [message])
        assert text == rendered(tokenizer, [message | {"content": message.get("content") or ""}])
        assert "None" not in text


def test_case_40_parts_become_lines_and_anything_but_text_is_refused(tokenizer: Any) -> None:
    """Case 40: two text parts arrive joined by one newline, never as the text of a list."""
    data = json.loads((CASES / "40-images.json").read_text())
    joined = [{"role": "user", "content": "a\nb"}]
    assert rendered(tokenizer, data["text_parts"]) == rendered(tokenizer, joined)
    for messages in (data["image"], data["unknown_part"]):
        with pytest.raises(Refusal, match="only text parts are served") as caught:
            rendered(tokenizer, messages)
        assert caught.value.status == data["image_status_on_text_model"]
