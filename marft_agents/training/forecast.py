"""The figures of ``estimates`` for a plan: its tokens counted, this device measured.

Invariant: nothing is loaded but headers; the device is asked for one small product and what memory
it has. Rows fall into passes as they will when they are trained.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from marft_agents.registry import (
    Registry,
    allowed_max_rank,
    module_shapes,
    read_adapter_config,
    weight_sizes,
)
from marft_agents.training.adapters import base_dtype
from marft_agents.training.config import MarftConfig
from marft_agents.training.dataset import EpisodeView, TurnRow
from marft_agents.training.estimates import (
    Device,
    Estimate,
    Load,
    Memory,
    Shape,
    adapter_parameters,
    adapters_bytes,
    base_bytes,
    pass_bytes,
    seconds,
    slot_line,
    time_text,
)
from marft_agents.training.packing import pack_turns
from marft_agents.training.plan import AdapterPlan, Plan, ServerLimits
from marft_agents.training.rates import block_size
from marft_agents.training.schedule import passes
from marft_agents.training.transcript import Line

_COUNTED_BLOCKS = 64
"""So many steps of an adapter are packed to know how much prefixes save; more are scaled."""
_CHARACTERS = 4
"""Of a token of text, where it is not known."""
_MEASURE_S = 0.05


def read_shape(model_dir: Path) -> Shape:
    """The base's shape, from its configuration and headers."""
    config: dict[str, Any] = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    config |= config.get("text_config") or {}
    sizes = weight_sizes(model_dir)
    outside = ("embed", "lm_head", "wte", "wpe")
    matrices = sum(n for name, (n, _) in sizes.items() if not any(part in name for part in outside))
    hidden = int(config["hidden_size"])
    return Shape(
        parameters=sum(n for n, _ in sizes.values()),
        stored=sum(size for _, size in sizes.values()),
        matrices=matrices,
        hidden=hidden,
        layers=int(config["num_hidden_layers"]),
        inner=int(config.get("intermediate_size") or 4 * hidden),
        vocab=int(config["vocab_size"]),
    )


# -- the device ----------------------------------------------------------------------------------


def measure(device: torch.device, dtype: torch.dtype, shape: Shape, tokens: int) -> Device:
    """Speed of a product as in the MLP of a pass, and of an operation on nothing."""
    states = torch.randn(min(tokens, 1024), shape.hidden, device=device).to(dtype)
    weights = torch.randn(shape.hidden, shape.inner, device=device).to(dtype)
    one = _time_of(lambda: states @ weights, device)
    small = torch.zeros(8, device=device)
    start = _time_of(lambda: small + 1, device)
    work = 2.0 * states.shape[0] * shape.hidden * shape.inner
    return Device(device.type, work / one, start, free_memory(device))


def _time_of(act: Any, device: torch.device) -> float:
    """Seconds of one call, the best of a few looks."""
    best = float("inf")
    with torch.no_grad():
        act()
        for _ in range(3):
            started, calls = time.perf_counter(), 0
            while time.perf_counter() - started < _MEASURE_S:
                act()
                calls += 1
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            best = min(best, (time.perf_counter() - started) / calls)
    return best


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on the device, where it says."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        return next(
            int(line.split()[1]) * 1024
            for line in text.splitlines()
            if line.startswith("MemAvailable")
        )
    except (OSError, StopIteration, ValueError):
        names = ("SC_AVPHYS_PAGES", "SC_PAGE_SIZE")
        if not all(name in os.sysconf_names for name in names):
            return None
        return os.sysconf(names[0]) * os.sysconf(names[1])


# -- the tokens ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """What training goes through, and the largest single pass."""

    load: Load
    tokens: int = 0
    sampled: int = 0


def training_load(rows: Sequence[TurnRow], config: MarftConfig, epochs: float) -> Packed:
    """The passes over an adapter's rows."""
    indices = list(range(len(rows)))
    lengths = {i: rows[i].length for i in indices}
    blocks = passes(indices, lengths, block=block_size(config), epochs=epochs, key="estimate")
    load, largest = Load(), (0, 0)
    counted = blocks[:_COUNTED_BLOCKS]
    for block in counted:
        for pack in pack_turns([rows[i] for i in block], config.pack_tokens):
            heads = len({node for path in pack.predictors for node in path})
            load += Load(len(pack.ids), heads, 1)
            largest = max(largest, (len(pack.ids), heads))
    return Packed(load.times(len(blocks) / max(len(counted), 1)), *largest)


def transcript_load(episodes: Sequence[EpisodeView], config: MarftConfig) -> Load:
    """What the critic reads of the episodes, once; common beginnings are read together."""
    tokens, seen = 0, set[int]()
    for episode in episodes:
        beginning = 0
        for line in episode.lines:
            beginning = hash((beginning, line.speaker, line.text))
            tokens += 0 if beginning in seen else _line_tokens(line)
            seen.add(beginning)
    return Load(tokens, 0, max(tokens // config.pack_tokens, 1))


def _line_tokens(line: Line) -> int:
    said = len(line.text) // _CHARACTERS + 1
    return said + len(line.speaker) // _CHARACTERS + 4


def places(episodes: Sequence[EpisodeView], config: MarftConfig) -> int:
    """Hidden states that the critic keeps: two a border, and at token level one a token."""
    borders = sum(2 * len(episode.agents_K) + 1 for episode in episodes)
    if config.level == "action":
        return borders
    return borders + sum(
        len(line.text) // _CHARACTERS + 1
        for episode in episodes
        for line in episode.lines
        if line.action
    )


# -- a run ---------------------------------------------------------------------------------------


def _modules(
    plan: AdapterPlan, registry: Registry, model_dir: Path, config: MarftConfig
) -> Mapping[str, tuple[int, int]]:
    if plan.start is None:
        targets: list[str] = list(config.of_adapter(plan.adapter, "lora_target_modules"))
    else:
        targets = list(
            read_adapter_config(registry.path(plan.adapter, plan.start))["target_modules"]
        )
    return module_shapes(model_dir, targets)


def estimate(plan: Plan, registry: Registry, config: MarftConfig, device: Device) -> Estimate:
    """The figures of the stage on logs."""
    shape = read_shape(plan.model_dir)
    width = number_width(config)
    packed = {
        a.adapter: training_load(plan.rows_of(a), config, config.num_train_epochs)
        for a in plan.adapters
    }
    sizes = {
        a.adapter: adapter_parameters(a.rank, _modules(a, registry, plan.model_dir, config))
        for a in plan.adapters
    }
    reads = has_critic(config)
    stored = places(plan.data.episodes, config) * shape.hidden * 4.0 if reads else 0.0
    checkpointing = config.gradient_checkpointing
    memory = Memory(
        base=base_bytes(shape, width=width, four_bit=config.load_in_4bit),
        adapters=adapters_bytes(list(sizes.values())),
        one_pass=pass_bytes(
            shape,
            tokens=max(p.tokens for p in packed.values()),
            sampled=max(p.sampled for p in packed.values()),
            width=width or 2,
            checkpointing=checkpointing,
        ),
        critic=3 * stored,
    )
    steps: dict[str, float] = {}
    if reads:
        load = transcript_load(plan.data.episodes, config)
        steps["critic"] = seconds(shape, load, device, adapter=0, trained=False)
    steps["training"] = sum(
        seconds(
            shape, p.load, device, adapter=sizes[a], trained=True, checkpointing=checkpointing
        )
        for a, p in packed.items()
    )  # fmt: skip
    return Estimate(
        memory,
        device,
        {name: value / config.world_size for name, value in steps.items()},
        sum(p.load.tokens for p in packed.values()),
        config.world_size,
        _left_out(config),
    )


def memory_warning(plan: Plan, registry: Registry, config: MarftConfig) -> str | None:
    """What to say before a run that will not fit."""
    device = Device(config.device.type, 1.0, 0.0, free_memory(config.device))
    return estimate(plan, registry, config, device).warning()


def _iteration_line(figures: Estimate, plan: Plan, config: MarftConfig) -> str:
    """An iteration's training, if its episodes are like those in the logs."""
    share = config.episodes_per_iteration / len(plan.data.episodes)
    per_pass = figures.steps["training"] / config.num_train_epochs
    each = share * (figures.steps.get("critic", 0.0) + per_pass * (config.update_epochs + 1))
    return (
        f"  online: about {time_text(each)} of training an iteration,"
        f" {time_text(each * config.iterations)} in {config.iterations}, if episodes are as long as"
        " in the logs; the app's own time is not in it"
    )


def has_critic(config: MarftConfig) -> bool:
    """Whether a critic reads the episodes of the stage on logs."""
    return config.offline != "sft" and config.estimator != "group"


def _left_out(config: MarftConfig) -> str:
    skips = " and light turns that are skipped" * (config.offline == "awr")
    return f"; loading, checks{skips} are not in it"


def number_width(config: MarftConfig) -> int | None:
    """Bytes of a number of the base; ``None``: as on disk."""
    dtype = base_dtype(config.dtype, config.device)
    return dtype.itemsize if isinstance(dtype, torch.dtype) else None


def measured(config: MarftConfig, shape: Shape) -> Device:
    """This run's device."""
    dtype = base_dtype(config.dtype, config.device)
    kind = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
    return measure(config.device, kind, shape, config.pack_tokens)


def estimate_lines(
    plan: Plan | None,
    registry: Registry,
    model_dir: Path,
    config: MarftConfig,
    limits: ServerLimits,
    *,
    online: bool,
) -> Iterator[str]:
    """What a dry run says."""
    yield "estimate (rough):"
    if plan is not None:
        figures = estimate(plan, registry, config, measured(config, read_shape(model_dir)))
        yield from figures.lines()
        if online:
            yield _iteration_line(figures, plan, config)
        warning = figures.warning()
        if warning is not None:
            yield warning
    adapters = {a.adapter: a.rank for a in plan.adapters} if plan else {}
    served = sorted({*adapters, *registry.agents()})
    rank = max([*adapters.values(), config.lora_rank])
    yield slot_line(
        len(served), allowed_max_rank(rank), given=limits.max_loras, server=limits.of_server
    )
