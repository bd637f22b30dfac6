"""The card of a version: everything that its manifest says, in tables that hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from marft_agents.registry import describe_base, model_card
from marft_agents.schema import AdapterManifest, BaseModelInfo
from tests.registry.bases import make_base

TRAINING: dict[str, Any] = {
    "method": "MARFT-A (action level), clipped policy gradient (PPO)",
    "estimator": "marft",
    "level": "action",
    "objective": "ppo",
    "agents": ["planner", "planner-2"],
    "episodes": 6,
    "turns": 12,
    "tokens": 180,
    "mean_reward": 0.41666666666666669,
    "recorded_under": {"planner@v3": 12},
    "critic_explained_variance": None,
    "metrics": {"kl": 0.00409, "sampling/sampling_logp_difference/max": 6.55e-07},
    "program": "marft-agents 0.1.0",
    "settings": {"seed": 42, "beta": 0.01, "agents": {"judge": "external"}},
    "logs": [],
    "iteration": 2,
    "effect": {
        "good_before": -6.5, "good_after": -6.4, "bad_before": -6.8, "bad_after": -7.0,
        "change_norm": 0.06, "b_norm": 0.1,
    },
    "note": "a | b\n# not a heading",
}  # fmt: skip


def card(parent: int | None = 3, base: str = "org/tiny", **fields: Any) -> str:
    standard: dict[str, Any] = {
        "agent": "planner",
        "version": 4,
        "parent": parent,
        "base": BaseModelInfo(
            name=base, hidden_size=8, num_hidden_layers=2, vocab_size=32, model_type="llama",
            fingerprint="f" * 64, modules={},
        ),
        "rank": 4,
        "target_modules": ["k_proj", "q_proj"],
        "files": {},
        "training": TRAINING,
    }  # fmt: skip
    return model_card(AdapterManifest(**(standard | fields)))


def section(text: str, title: str) -> dict[str, list[str]]:
    """First cell to the other cells of a section's table."""
    part = text.split(f"## {title}", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows[1:]}


def test_the_front_matter_is_what_hubs_read() -> None:
    head = yaml.safe_load(card().split("---")[1])
    assert head["base_model"] == "org/tiny" and head["library_name"] == "peft"
    assert "marft-agents" in head["tags"]


def test_what_was_done_and_on_which_data() -> None:
    facts = section(card(), "Training")
    assert facts["method"] == ["MARFT-A (action level), clipped policy gradient (PPO)"]
    assert [facts[n] for n in ("estimator", "level", "objective")] == [
        ["marft"],
        ["action"],
        ["ppo"],
    ]
    assert (facts["iteration"], facts["agents"]) == (["2"], ["planner, planner-2"])
    assert facts["sampled tokens"] == ["180"] and facts["mean reward of the episodes"] == ["0.4167"]
    assert facts["turns by the version that sampled them"] == ["planner@v3: 12"]
    assert facts["logs"] == ["-"] and facts["program"] == ["marft-agents 0.1.0"]
    assert "- parent: version 3" in card() and "continued from version 3" in card()
    assert "- parent: none" in card(parent=None) and "from scratch" in card(parent=None)


def test_settings_effect_and_metrics_have_tables() -> None:
    text = card()
    assert section(text, "Settings that differ") == {
        "`seed`": ["42"], "`beta`": ["0.01"], "`agents`": ["judge: external"],
    }  # fmt: skip
    assert section(text, "Effect") == {
        "best": ["-6.500", "-6.400", "+0.100"], "worst": ["-6.800", "-7.000", "-0.200"],
    }  # fmt: skip
    assert section(text, "Metrics")["`sampling/sampling_logp_difference/max`"] == ["6.55e-07"]


def test_what_the_manifest_says_besides_is_there_and_stays_in_its_cell() -> None:
    assert "| note | a \\| b # not a heading |" in card().splitlines()


def test_logs_are_iteration_0() -> None:
    facts = section(
        card(training=TRAINING | {"iteration": 0, "logs": ["logs/a.jsonl"]}), "Training"
    )
    assert facts["iteration"] == ["0: the stage on logs"] and facts["logs"] == ["logs/a.jsonl"]


def test_an_untrained_version_says_so() -> None:
    text = card(training={}, untrained=True, parent=None)
    assert "answers exactly as the base model `org/tiny` does" in text
    assert "No record of training." in text


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("org/tiny", "org/tiny"),
        ("./org/tiny", "tiny"),
        ("org/../org/tiny", "tiny"),
        ("tiny", "tiny"),
        ("org/models/tiny", "tiny"),
        (".hidden/tiny", "tiny"),
    ],
)
def test_a_local_base_keeps_a_name_that_gives_no_path_away(
    given: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_base(Path(given))
    assert describe_base(given).name == name
    assert describe_base(Path(given).resolve()).name == "tiny"
