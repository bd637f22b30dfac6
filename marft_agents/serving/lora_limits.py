"""How many adapters an engine holds, of which rank, and what that costs: settled before it starts.

Invariant: no engine starts with fewer slots than its agents need while one of them is swapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from marft_agents.errors import ConfigError
from marft_agents.registry import ALLOWED_MAX_RANKS, allowed_max_rank, module_shapes
from marft_agents.serving.commands import lora_slots

LOWEST_AUTO_RANK = 16
_PACKED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Modules that vLLM runs as one: room for an adapter on any is room on all."""


@dataclass(frozen=True)
class Slots:
    """``loaded`` adapters can be used in one batch, ``kept`` stay in main memory."""

    loaded: int
    kept: int


def settle_slots(agents: int, *, max_loras: int | None, max_cpu_loras: int | None) -> Slots:
    """Slots for ``agents``; numbers that the user gave are checked, the others computed.

    Raises:
        ConfigError: with the arithmetic.
    """
    loaded = lora_slots(agents) if max_loras is None else max_loras
    needed = agents + 1
    if loaded < needed:
        raise ConfigError(
            f"{_count(agents, 'agent needs', 'agents need')} {_count(agents, 'slot', 'slots')}"
            f" + 1 to swap = {needed}, --max-loras is {max_loras}; give at least {needed}, or leave"
            f" it out for {lora_slots(agents)} (every agent's version in use and its next one)"
        )
    kept = 2 * loaded if max_cpu_loras is None else max_cpu_loras
    if kept < loaded:
        raise ConfigError(
            f"--max-cpu-loras {kept} is less than the {loaded} adapters that are in use at once;"
            f" an engine keeps those in main memory, too: give at least {loaded}"
        )
    return Slots(loaded, kept)


def settle_rank(wish: int | None, ranks: Iterable[int]) -> int:
    """The highest rank to serve: the wish, else one for every version in use and 16 at least.

    Raises:
        ConfigError: for a number that engines do not take.
    """
    if wish is None:
        return allowed_max_rank(max([LOWEST_AUTO_RANK, *ranks]))
    if wish not in ALLOWED_MAX_RANKS:
        raise ConfigError(
            f"--max-lora-rank {wish} is not one of {' '.join(map(str, ALLOWED_MAX_RANKS))}"
        )
    return wish


def adapter_bytes(
    model_dir: Path,
    modules: Mapping[str, tuple[int, int]],
    targets: Iterable[str],
    *,
    rank: int,
    element_bytes: int,
) -> int:
    """Bytes that one slot takes in vLLM, whatever the rank of the adapter in it.

    Args:
        modules: the base's, as ``BaseModelInfo.modules``; tells which exist.
        targets: modules that the engine prepares for adapters.
    """
    known = {name.rsplit(".", 1)[-1] for name in modules}
    wanted = set(targets)
    packed = {m for group in _PACKED if wanted & set(group) for m in group if m in known}
    shapes = module_shapes(model_dir, sorted(wanted | packed))
    return sum(rank * (out + into) for out, into in shapes.values()) * element_bytes


def slots_line(slots: Slots, agents: int, rank: int, slot_bytes: int | None) -> str:
    """What is said about it at the start."""
    line = (
        f"adapters: {slots.loaded} slots of rank {rank} for"
        f" {_count(agents, 'agent', 'agents')}, {slots.kept} kept in main memory"
    )
    if slot_bytes is None:
        return line
    return f"{line}; the slots take {_mib(slots.loaded * slot_bytes)} MiB of the engine's memory"


def _mib(size: int) -> str:
    return f"{size / 2**20:.3g}" if size < 1000 * 2**20 else f"{size / 2**20:.0f}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
