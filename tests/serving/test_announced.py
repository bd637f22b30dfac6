"""What is said about an engine whose options the user has changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import ConfigError
from marft_agents.serving import LOGPROBS_MODE, SAMPLING_DEFAULTS
from marft_agents.serving.announced import announced_mode, announced_sampling, pinned_generation


@pytest.fixture
def model(tmp_path: Path) -> Path:
    own = {"temperature": 0.6, "top_k": 50, "do_sample": True, "eos_token_id": [2]}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    return tmp_path


def test_without_options_it_is_what_engines_are_started_with(model: Path) -> None:
    assert announced_sampling(()) == SAMPLING_DEFAULTS
    assert announced_mode(()) == LOGPROBS_MODE
    assert pinned_generation(("--seed", "1"), model) == ("--seed", "1")


@pytest.mark.parametrize(
    ("args", "changed"),
    [
        (["--override-generation-config", '{"temperature": 0.5, "top_k": 20}'],
         {"temperature": 0.5, "top_k": 20}),
        (["--override-generation-config.top_p=0.8"], {"top_p": 0.8}),
        (["--override_generation_config.top_p", "0.8"], {"top_p": 0.8}),
        (["--override-generation-config", '{"max_new_tokens": 9, "eos_token_id": 1}'],
         {"max_tokens": 9}),
        (["--tool-strict-level=parameter", "--seed", "1"], {"tool_strict_level": "parameter"}),
        (["--generation-config", "vllm"], {}),
        (["--generation-config", "auto"], {"temperature": 0.6, "top_k": 50}),
        (["--generation_config=auto", "--override-generation-config.top_k=7"],
         {"temperature": 0.6, "top_k": 7}),
        (["--logits-processors", "my.module:Ban"], {"logits_processors": ["my.module:Ban"]}),
        (["--watermark-config", "{}"], {"watermarking": True}),
    ],
)  # fmt: skip
def test_options_that_change_the_defaults_are_heard(
    args: list[str], changed: dict[str, Any], model: Path
) -> None:
    assert announced_sampling(pinned_generation(args, model)) == SAMPLING_DEFAULTS | changed


def test_defaults_from_elsewhere_are_written_out_for_the_engine(model: Path) -> None:
    args = ["--generation-config", "auto", "--override-generation-config.min_p", "0.1", "--seed=1"]
    *kept, name, value = pinned_generation(args, model)
    assert kept == ["--generation-config", "auto", "--seed=1"]
    assert name == "--override-generation-config"
    expected = SAMPLING_DEFAULTS | {"temperature": 0.6, "top_k": 50, "min_p": 0.1}
    assert json.loads(value) == expected


def test_another_folder_and_a_file_of_options_are_read(model: Path, tmp_path: Path) -> None:
    options = tmp_path / "vllm.yaml"
    options.write_text(
        f"generation-config: {model}\noverride_generation_config: {{top_p: 0.5}}\n"
        "logprobs-mode: raw_logprobs\ntool-strict-level: function\n"
    )
    args = pinned_generation(("--config", str(options)), model)
    assert args[:2] == ("--config", str(options))
    changed = {"temperature": 0.6, "top_k": 50, "top_p": 0.5, "tool_strict_level": "function"}
    assert announced_sampling(args) == SAMPLING_DEFAULTS | changed
    assert announced_mode(args) == "raw_logprobs"


def test_a_model_without_defaults_of_its_own(tmp_path: Path) -> None:
    args = pinned_generation(("--generation-config", "auto"), tmp_path)
    assert announced_sampling(args) == SAMPLING_DEFAULTS


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--override-generation-config", "{oops"], "no JSON object"),
        (["--override-generation-config"], "no JSON object"),
        (["--generation-config", "/nowhere"], "there is no /nowhere/generation_config.json"),
        (["--config", "/nowhere.yaml"], "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_refused(args: list[str], said: str, model: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        pinned_generation(args, model)


def test_a_parser_that_holds_calls_to_a_form_is_announced() -> None:
    assert announced_sampling((), calls_held=True)["tool_strict_level"] == "function"
    more = announced_sampling(("--tool-strict-level", "parameter"), calls_held=True)
    assert more["tool_strict_level"] == "parameter"
    less = announced_sampling(("--tool-strict-level", "auto"), calls_held=True)
    assert less["tool_strict_level"] == "function"


@pytest.mark.parametrize(
    "args",
    [
        ["--logprobs-mode", "raw_logprobs"],
        ["--logprobs_mode=raw_logprobs"],
        ["--logprobs-mode", "processed_logprobs", "--seed", "1", "--logprobs-mode=raw_logprobs"],
    ],
)
def test_the_mode_is_the_engines(args: list[str]) -> None:
    assert announced_mode(args) == "raw_logprobs"
