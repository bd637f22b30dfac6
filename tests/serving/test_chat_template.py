"""Where a model keeps its template, and which files are refused as one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from marft_agents.errors import ConfigError
from marft_agents.serving.chat_template import (
    model_template,
    needs_template,
    read_chat_template,
)

GOOD = "{% for m in messages %}{{ m.content }}{% generation %}x{% endgeneration %}{% endfor %}"


@pytest.mark.parametrize(
    ("file", "content", "found"),
    [
        ("chat_template.jinja", "{{ a }}", "{{ a }}"),
        ("chat_template.json", json.dumps({"chat_template": "{{ b }}"}), "{{ b }}"),
        ("tokenizer_config.json", json.dumps({"chat_template": "{{ c }}"}), "{{ c }}"),
        (
            "tokenizer_config.json",
            json.dumps({"chat_template": [{"name": "default", "template": "{{ d }}"},
                                          {"name": "tool_use", "template": "{{ t }}"}]}),
            "{{ t }}",
        ),
        ("tokenizer_config.json", "{}", None),
        ("tokenizer_config.json", "oops", None),
    ],
)  # fmt: skip
def test_a_model_keeps_it_in_one_of_several_places(
    tmp_path: Path, file: str, content: str, found: str | None
) -> None:
    (tmp_path / file).write_text(content)
    assert model_template(tmp_path) == found
    assert needs_template(tmp_path, "llama") is (found is None)


def test_its_own_file_wins_and_the_one_for_tools_wins_over_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ old }}"}))
    (tmp_path / "chat_template.jinja").write_text("{{ new }}")
    assert model_template(tmp_path) == "{{ new }}"
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("{{ tools }}")
    assert model_template(tmp_path) == "{{ tools }}"


def test_models_whose_prompts_are_written_otherwise_need_none(tmp_path: Path) -> None:
    assert needs_template(tmp_path, "llama")
    assert not needs_template(tmp_path, "deepseek_v32")
    (tmp_path / "tekken.json").write_text("{}")
    assert not needs_template(tmp_path, "mistral")


def test_a_good_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(GOOD)
    assert read_chat_template(file) == GOOD


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no such file"),
        (b"", "the file is empty"),
        (b"hello", "no Jinja expression"),
        (b"\xff{{ x }}", "not UTF-8"),
        (b"{{ x }}\n{% for m in messages %}", "line 2: "),
        (b"{{ x }}{% frobnicate %}", "line 1: .*frobnicate"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, content: bytes | None, said: str) -> None:
    file = tmp_path / "t.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--chat-template .*t.jinja: .*{said}"):
        read_chat_template(file)


def test_a_folder_is_no_template(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_chat_template(tmp_path)
