"""Slots and ranks are reckoned before an engine starts."""

from __future__ import annotations

import pytest

from marft_agents.errors import AdapterError, ConfigError
from marft_agents.registry import describe_base
from marft_agents.serving.lora_limits import (
    Slots,
    adapter_bytes,
    settle_rank,
    settle_slots,
    slots_line,
)
from tests.serving.stage import House


@pytest.mark.parametrize(
    ("agents", "wish", "kept", "expected"),
    [
        (1, None, None, Slots(2, 4)),
        (5, None, None, Slots(10, 20)),
        (5, 6, None, Slots(6, 12)),
        (5, 6, 6, Slots(6, 6)),
    ],
)
def test_slots(agents: int, wish: int | None, kept: int | None, expected: Slots) -> None:
    assert settle_slots(agents, max_loras=wish, max_cpu_loras=kept) == expected


@pytest.mark.parametrize(
    ("agents", "wish", "kept", "said"),
    [
        (5, 4, None, r"5 agents need 5 slots \+ 1 to swap = 6, --max-loras is 4; give at least 6"),
        (1, 1, None, r"1 agent needs 1 slot \+ 1 to swap = 2, --max-loras is 1"),
        (2, None, 3, "--max-cpu-loras 3 is less than the 4 adapters"),
    ],
)
def test_too_few_slots_are_refused(
    agents: int, wish: int | None, kept: int | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        settle_slots(agents, max_loras=wish, max_cpu_loras=kept)


@pytest.mark.parametrize(
    ("wish", "ranks", "expected"),
    [(None, [], 16), (None, [8, 16], 16), (None, [8, 17], 32), (8, [4], 8), (64, [], 64)],
)
def test_rank(wish: int | None, ranks: list[int], expected: int) -> None:
    assert settle_rank(wish, ranks) == expected


def test_a_rank_that_no_engine_takes() -> None:
    with pytest.raises(ConfigError, match="--max-lora-rank 12 is not one of 1 8 16"):
        settle_rank(12, [])
    with pytest.raises(AdapterError, match="rank 600 cannot be served"):
        settle_rank(None, [600])


def test_memory_counts_what_runs_as_one(house: House) -> None:
    base = describe_base(house.base_dir)
    sizes = {name.rsplit(".", 1)[-1]: sum(shape) for name, shape in base.modules.items()}
    attention = sizes["q_proj"] + sizes["k_proj"] + sizes["v_proj"]

    def size(*targets: str, rank: int = 16, element_bytes: int = 4) -> int:
        return adapter_bytes(
            house.base_dir, base.modules, targets, rank=rank, element_bytes=element_bytes
        )

    one = base.num_hidden_layers * 16 * 4
    assert size("q_proj") == size("q_proj", "v_proj") == attention * one
    assert size("o_proj") == sizes["o_proj"] * one
    assert size("down_proj", "o_proj") == (sizes["down_proj"] + sizes["o_proj"]) * one
    assert size("o_proj", rank=8, element_bytes=2) * 4 == size("o_proj")


def test_an_unknown_module_is_refused(house: House) -> None:
    base = describe_base(house.base_dir)
    with pytest.raises(ConfigError, match="'nope' is in no layer"):
        adapter_bytes(house.base_dir, base.modules, ["nope"], rank=8, element_bytes=4)


def test_what_is_said() -> None:
    line = slots_line(Slots(4, 8), 2, 16, 5 * 2**20)
    assert line == (
        "adapters: 4 slots of rank 16 for 2 agents, 8 kept in main memory; the slots take 20 MiB"
        " of the engine's memory"
    )
    assert "MiB" not in slots_line(Slots(2, 4), 1, 16, None)
