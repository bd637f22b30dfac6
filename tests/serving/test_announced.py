"""What is said about an engine whose options the user has changed."""

from __future__ import annotations

from typing import Any

import pytest

from marft_agents.serving import LOGPROBS_MODE, SAMPLING_DEFAULTS
from marft_agents.serving.announced import announced_mode, announced_sampling


def test_without_options_it_is_what_engines_are_started_with() -> None:
    assert announced_sampling(()) == SAMPLING_DEFAULTS
    assert announced_mode(()) == LOGPROBS_MODE


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
    ],
)  # fmt: skip
def test_options_that_change_the_defaults_are_heard(
    args: list[str], changed: dict[str, Any]
) -> None:
    assert announced_sampling(args) == SAMPLING_DEFAULTS | changed


@pytest.mark.parametrize(
    "args",
    [
        ["--generation-config", "auto"],
        ["--generation_config=/models/x"],
        ["--override-generation-config", "{oops"],
        ["--override-generation-config"],
    ],
)
def test_what_cannot_be_told_is_left_unsaid(args: list[str]) -> None:
    assert announced_sampling(args) is None


@pytest.mark.parametrize(
    "args", [["--logprobs-mode", "raw_logprobs"], ["--logprobs_mode=raw_logprobs"]]
)
def test_the_mode_is_the_engines(args: list[str]) -> None:
    assert announced_mode(args) == "raw_logprobs"
