"""The closing tables, drawn from what was published."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from marft_agents.training.effect import Effect
from marft_agents.training.plan import Untouched
from marft_agents.training.results import (
    AdapterResult,
    FinetuneResult,
    iteration_lines,
    result_lines,
)

EFFECT = Effect(-2.0, -1.5, -1.0, -1.2, 0.1, 0.2)


def adapter(name: str = "planner", method: str = "awr", **fields: Any) -> AdapterResult:
    standard: dict[str, Any] = {
        "agents": [name], "episodes": 6, "turns": 12, "tokens": 180, "used": 9,
        "mean_weight": 3.5, "effect": EFFECT, "parent": 3, "start": 1, "version": 4,
    }  # fmt: skip
    return AdapterResult(adapter=name, method=method, **(standard | fields))


def lines(*adapters: AdapterResult, **fields: Any) -> list[str]:
    standard: dict[str, Any] = {
        "untouched": [], "explained_variance": None, "seconds": 1.0, "tokens_scored": 0,
        "credit_file": None,
    }  # fmt: skip
    result = FinetuneResult(adapters=list(adapters), **(standard | fields))
    return list(result_lines(result, {"planner": "yes"}))


def test_weights_have_a_column_where_there_are_some() -> None:
    head, row, coder, *_ = lines(adapter(), adapter("coder", "ppo", start=None, used=12))
    assert head.split() == [
        "adapter", "episodes", "turns", "used", "tokens", "weight", "good", "bad", "version",
        "served",
    ]  # fmt: skip
    assert row.split() == [
        "planner", "6", "12", "9", "180", "3.50", "+0.500", "-0.200", "v1", "->", "v4", "yes",
    ]  # fmt: skip
    assert coder.split()[5] == "-" and coder.endswith("new -> v4  no")
    assert "weight" not in lines(adapter(method="ppo"))[0]


def test_what_went_wrong_and_who_was_left_alone_is_below() -> None:
    worse = adapter(effect=Effect(-2.0, -2.5, -1.0, -1.0, 0.1, 0.2))
    said = lines(worse, untouched=[Untouched("critic", "0 samples")])
    assert any(x.startswith("WARNING: planner@v4: good turns did not gain") for x in said)
    assert said[-1] == "untouched: critic: 0 samples"
    assert lines(untouched=[Untouched("critic", "0 samples")]) == ["untouched: critic: 0 samples"]


def test_an_iteration_is_a_line() -> None:
    rounds = [
        {"online/episodes": 64.0, "online/failed": 2.0, "online/reward_mean": 0.4375,
         "planner/version": 3.0, "planner/kl": 0.0123, "planner/entropy": 1.5},
        {"online/episodes": 64.0, "online/failed": 0.0, "online/reward_mean": 0.5},
        {"online/episodes": 60.0, "online/failed": 4.0, "online/reward_mean": 0.625,
         "planner/version": 4.0, "planner/kl": 0.02, "planner/entropy": 1.25,
         "coder/version": 2.0},
    ]  # fmt: skip
    head, one, two, three, legend = iteration_lines(rounds)
    assert head.split() == ["iteration", "episodes", "failed", "reward", "coder", "planner"]
    assert one.split() == ["1", "64", "2", "0.438", "-", "v3", "0.012", "1.500"]
    assert two.split() == ["2", "64", "0", "0.500", "-", "-"], "an iteration without an update"
    assert three.split() == ["3", "60", "4", "0.625", "v2", "-", "-", "v4", "0.020", "1.250"]
    assert legend.startswith("per adapter: version, KL")
    assert lines(adapter(), rounds=rounds)[:5] == [head, one, two, three, legend]


def test_a_result_survives_a_checkpoint() -> None:
    made = adapter(start=None)
    assert AdapterResult.from_json(json.loads(json.dumps(dataclasses.asdict(made)))) == made
    assert made.skipped == 3
