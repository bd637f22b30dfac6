"""What a server would refuse is refused before training (case 12: adapter the server refuses)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import AdapterError
from marft_agents.registry import (
    ALLOWED_MAX_RANKS,
    allowed_max_rank,
    highest_rank,
    read_adapter_config,
    validate_adapter_config,
)

CASES = Path(__file__).parents[1] / "cases"
LIMITS: dict[str, Any] = json.loads((CASES / "12-limits.json").read_text())


def _config(**settings: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]} | settings


@pytest.mark.parametrize("settings", LIMITS["refuse"], ids=json.dumps)
def test_case_12_refused_settings_name_value_and_fix(settings: dict[str, Any]) -> None:
    limit = LIMITS["server_max_lora_rank"]
    with pytest.raises(AdapterError) as caught:
        validate_adapter_config(_config(**settings), max_lora_rank=limit)
    offending = {k: v for k, v in settings.items() if k != "r" or len(settings) == 1}
    (name, value), *_ = offending.items()
    assert name in str(caught.value)
    shown = next(iter(value.values())) if isinstance(value, dict) else value  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType] JSON in
    assert str(shown) in str(caught.value)  # pyright: ignore[reportUnknownArgumentType] JSON in


@pytest.mark.parametrize("settings", LIMITS["accept"], ids=json.dumps)
def test_case_12_accepted_settings_pass(settings: dict[str, Any]) -> None:
    validate_adapter_config(_config(**settings), max_lora_rank=LIMITS["server_max_lora_rank"])


def test_case_12_rank_24_on_limit_16_tells_the_flag() -> None:
    config = read_adapter_config(CASES / "12-adapter-r24")
    with pytest.raises(AdapterError, match=r"r is 24.*limit is 16.*--max-lora-rank 32") as caught:
        validate_adapter_config(config, max_lora_rank=16)
    assert " ".join(map(str, LIMITS["server_accepts_as_max"])) in str(caught.value)
    validate_adapter_config(config, max_lora_rank=32)


def test_allowed_max_ranks_are_the_measured_ones() -> None:
    assert list(ALLOWED_MAX_RANKS) == LIMITS["server_accepts_as_max"]
    assert [allowed_max_rank(r) for r in (1, 2, 8, 9, 24, 300, 512)] == [1, 8, 8, 16, 32, 320, 512]
    for bad in (0, -1, 513):
        with pytest.raises(AdapterError, match=str(bad)):
            allowed_max_rank(bad)


def test_highest_rank_counts_rank_pattern() -> None:
    assert highest_rank({"r": 4}) == 4
    assert highest_rank({"r": 4, "rank_pattern": {"v_proj": 12}}) == 12


@pytest.mark.parametrize(
    "settings",
    [
        {"bias": "lora_only"},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "corda"},
        {"init_lora_weights": "loftq"},
        {"trainable_token_indices": [1]},
        {"layer_replication": [[0, 2]]},
        {"alora_invocation_tokens": [5]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": "model.embed_tokens"},
        {"target_modules": []},
        {"peft_type": "IA3"},
        {"r": 0},
        {"r": "8"},
        {"r": True},
        {"rank_pattern": {"q_proj": 0}},
    ],
    ids=json.dumps,
)
def test_other_refusals_name_the_setting(settings: dict[str, Any]) -> None:
    with pytest.raises(AdapterError) as caught:
        validate_adapter_config(_config(**settings))
    assert next(iter(settings)) in str(caught.value)


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal"])
def test_inits_that_leave_the_base_alone_pass(init: bool | str) -> None:
    validate_adapter_config(_config(init_lora_weights=init))
