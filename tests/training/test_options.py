"""Settings from YAML and the command line, and the configuration itself."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from marft_agents.errors import ConfigError
from marft_agents.training._quiet import set_environment
from marft_agents.training.config import MarftConfig
from marft_agents.training.options import MANAGED, merge, read_assignments, read_yaml

ROOT = Path(__file__).parents[2]


def build(**values: Any) -> MarftConfig:
    return MarftConfig(use_cpu=True, **merge(MarftConfig, [("finetune.yaml", values)]))


def test_the_later_layer_wins() -> None:
    layers = [("file", {"gamma": 0.5, "lam": 0.5}), ("--set", {"gamma": 0.9})]
    assert merge(MarftConfig, layers) == {"gamma": 0.9, "lam": 0.5}


def test_numbers_that_yaml_reads_as_text_are_numbers() -> None:
    config = build(**yaml.safe_load("learning_rate: 1e-4\nnum_train_epochs: '4'"))
    assert (config.learning_rate, config.num_train_epochs) == (1e-4, 4.0)


def test_settings_of_one_adapter_are_read_like_those_of_all() -> None:
    text = "adapters: {coder: {learning_rate: 1e-4, lora_rank: 16, lora_target_modules: q_proj}}"
    config = build(**yaml.safe_load(text))
    assert config.of_adapter("coder", "learning_rate") == 1e-4
    assert config.of_adapter("coder", "lora_rank") == 16
    assert config.of_adapter("coder", "lora_target_modules") == ["q_proj"]
    assert config.of_adapter("planner", "learning_rate") == config.learning_rate


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rte": 1}, "unknown setting 'learning_rte'; did you mean 'learning_rate'"),
        ({"lora_rank": 1.5}, "lora_rank is 1.5; it must be a whole number"),
        ({"gamma": "fast"}, "gamma is 'fast'; it must be a number"),
        ({"gradient_checkpointing": "maybe"}, "must be true or false"),
        ({"lora_target_modules": 3}, "must be a list"),
        ({"agents": ["a"]}, "must be a mapping"),
        ({"seed": None}, "seed has no value"),
        ({"output_dir": "x"}, "use --output"),
        ({"max_steps": 3}, r"use num_train_epochs \(logs\), iterations and update_epochs"),
        ({"resume_from_checkpoint": "x"}, "use --resume"),
        ({"fsdp": "full_shard"}, "use torchrun"),
        ({"gamma": 1.5}, "gamma is 1.5; it must be between 0 and 1"),
        ({"awr_temperature": 0}, "awr_temperature is 0.0; it must be above 0"),
        ({"normalise": "batch"}, "normalise is 'batch'; it must be one of"),
        ({"lora_target_modules": []}, "at least one module"),
        ({"optim": "adm"}, "a setting was refused"),
        ({"learning_rate": "inf"}, "learning_rate is inf; it must be a finite number"),
        ({"num_train_epochs": "inf"}, "num_train_epochs is inf; it must be a finite number"),
        ({"seed": -1}, "seed is -1; it must be between 0"),
        ({"awr_weight_max": "inf"}, "awr_weight_max is inf; it must be a finite number"),
        ({"awr_weight_max": 1e300}, "awr_weight_max is 1e\\+300; it must be at most"),
        ({"sft_threshold": "nan"}, "sft_threshold is nan; it must be a finite number"),
        ({"max_grad_norm": "nan"}, "max_grad_norm is nan; it must be a finite number"),
        ({"max_grad_norm": -1}, "max_grad_norm is -1.0; it must be 0 or more"),
        ({"critic_weight_decay": "nan"}, "critic_weight_decay is nan; it must be a finite number"),
        ({"critic_weight_decay": -5}, "critic_weight_decay is -5.0; it must be 0 or more"),
        ({"online_learning_rate": "inf"}, "online_learning_rate is inf; it must be a finite"),
        ({"beta": "inf"}, "beta is inf; it must be a finite number"),
        ({"save_total_limit": -1}, "save_total_limit is -1; it must be above 0"),
        ({"save_total_limit": 0}, "save_total_limit is 0; it must be above 0"),
        ({"importance_sampling_clip_min": 3}, "at most importance_sampling_clip_max"),
        ({"adapters": {"a": {"learning_rate": "inf"}}}, "adapters: a: learning_rate is inf"),
        ({"seed": 2**32}, "it must be between 0 and 4294967295"),
        (
            {"adapters": {"a": {"lora_rank": "x"}}},
            "adapters: a: lora_rank is 'x'; it must be a whole",
        ),
        ({"adapters": {"a": {"lora_rnk": 2}}}, "adapters: a: unknown setting 'lora_rnk'; one of"),
        ({"adapters": {"a": {"learning_rate": -1}}}, "adapters: a: learning_rate is -1"),
        ({"adapters": {"a": 3}}, "adapters: a is 3; it must be a mapping"),
        ({"eval_strategy": "steps"}, "eval_strategy is not set here"),
        ({"deepspeed": "zero3.json"}, "use torchrun"),
    ],
)
def test_what_is_wrong_with_a_setting_is_said(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"resume_from_checkpoint": True}, r"finetune\(..., resume=True\)"),
        ({"max_steps": 5}, "num_train_epochs"),
        ({"eval_strategy": "epoch"}, "held-out tasks"),
        ({"load_best_model_at_end": True}, "marft-agents swap"),
        ({"fsdp": "full_shard"}, "torchrun"),
        ({"remove_unused_columns": True}, "rows have no columns"),
        ({"bf16": True}, "dtype"),
    ],
)
def test_a_setting_without_effect_is_refused_from_python_too(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(values))} is not set here.*{message}"):
        MarftConfig(use_cpu=True, **values)


def test_an_infinite_limit_is_none() -> None:
    assert build(target_kl="inf", epsilon="inf").target_kl == float("inf")


def test_a_configuration_can_be_made_from_another() -> None:
    made = dataclasses.replace(build(gamma=0.5), lam=0.5)
    assert (made.gamma, made.lam) == (0.5, 0.5)


def test_assignments_are_read_as_yaml() -> None:
    got = read_assignments(["seed=3", "agents={critic: frozen}", "dtype=float32"])
    assert got == {"seed": 3, "agents": {"critic": "frozen"}, "dtype": "float32"}
    with pytest.raises(ConfigError, match="key=value"):
        read_assignments(["seed"])


def test_a_list_may_be_given_with_commas() -> None:
    config = build(lora_target_modules="q_proj, v_proj")
    assert config.lora_target_modules == ["q_proj", "v_proj"]


def test_config_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config"):
        read_yaml(tmp_path / "missing.yaml")
    (tmp_path / "torn.yaml").write_text("a: [1\nb: 2\n")
    with pytest.raises(ConfigError, match="no valid YAML at line 2"):
        read_yaml(tmp_path / "torn.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="not a list"):
        read_yaml(tmp_path / "list.yaml")
    (tmp_path / "empty.yaml").write_text("")
    assert read_yaml(tmp_path / "empty.yaml") == {}


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/**/finetune*.yaml")), ids=str)
def test_every_example_config_is_valid(path: Path) -> None:
    build(**read_yaml(path))


def test_the_full_example_is_every_setting_at_its_default() -> None:
    example = build(**read_yaml(ROOT / "examples" / "finetune_full.yaml"))
    default = build()
    ours = set(vars(MarftConfig)["__annotations__"]) - set(MANAGED)
    assert set(read_yaml(ROOT / "examples" / "finetune_full.yaml")) == ours
    assert {n: getattr(example, n) for n in ours} == {n: getattr(default, n) for n in ours}


def test_the_configuration_in_the_docs_is_valid() -> None:
    text = (ROOT / "docs" / "finetune.md").read_text(encoding="utf-8")
    (block,) = [part.split("```")[0] for part in text.split("```yaml\n")[1:]]
    config = build(**yaml.safe_load(block))
    assert config.agents["coder-2"] == "coder" and config.level == "token"
    assert config.of_adapter("coder", "learning_rate") == 1e-4
    named = set(re.findall(r"`([a-z]+(?:_[a-z0-9]+)+)`", text))
    assert named <= {*MarftConfig.__dataclass_fields__, "at_once"}, "settings that do not exist"


def test_the_python_of_the_docs_is_of_this_version() -> None:
    text = (ROOT / "docs" / "finetune.md").read_text(encoding="utf-8")
    blocks = [part.split("```")[0] for part in text.split("```python\n")[1:]]
    for block in blocks:
        compile(block, "docs/finetune.md", "exec")
    names: dict[str, Any] = {}
    (library,) = [block for block in blocks if "import MarftConfig" in block]
    for line in library.splitlines():
        if line.startswith("from marft_agents"):
            exec(line, names)
    taken = set(inspect.signature(names["finetune"]).parameters)
    assert {"model", "output", "config", "online", "resume", "fresh_optimizer", "dry_run"} <= taken
    assert set(re.findall(r"        (\w+)=", library)) <= set(
        inspect.signature(names["OnlineSource"]).parameters
    )


def test_every_setting_of_ours_has_a_help_text() -> None:
    ours = vars(MarftConfig)["__annotations__"]
    fields = MarftConfig.__dataclass_fields__
    assert all(fields[name].metadata.get("help") for name in ours)


def test_the_users_own_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.delenv("HF_HUB_DISABLE_TELEMETRY", raising=False)
    set_environment()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"
