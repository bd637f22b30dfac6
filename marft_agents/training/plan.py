"""What a run will train: rows per adapter, where each adapter starts, and who stays as they are.

Invariant: a plan that exists can be carried out: every token id is in the base's vocabulary, every
adapter belongs to this base and is one that the server takes, and there is something to learn.
Nothing was written to get here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marft_agents.errors import AdapterError, LogError, NothingToLearn
from marft_agents.registry import (
    DEFAULT_RANK,
    Registry,
    module_shapes,
    read_adapter_config,
    validate_adapter_config,
)
from marft_agents.schema import BaseModelInfo, served_name
from marft_agents.training.dataset import TrainingSet, TurnRow, highest_token, too_long
from marft_agents.training.roles import (
    UNTRAINED_ROLES,
    check_adapter_settings,
    resolve_adapters,
)
from marft_agents.training.signal import require_signal
from marft_agents.training.stored import Picked


@dataclass(frozen=True)
class AdapterPlan:
    """One adapter to train."""

    adapter: str
    agents: list[str]
    rows: list[int]
    """Indices into the data set's rows."""
    start: int | None
    """Version that training starts from; ``None``: a fresh adapter."""
    rank: int
    behaviour: Counter[str]
    """Adapter version that sampled the turns, by number of turns."""


@dataclass(frozen=True)
class Untouched:
    """An agent or adapter that stays exactly as it is, and why."""

    name: str
    why: str


@dataclass
class Plan:
    """Everything decided before the first step."""

    data: TrainingSet
    base: BaseModelInfo
    model_dir: Path
    max_length: int
    adapters: list[AdapterPlan]
    untouched: list[Untouched]
    roles: dict[str, str] = field(default_factory=dict[str, str])
    """Agent to its adapter, ``frozen`` or ``external``."""
    notes: list[str] = field(default_factory=list[str])

    def rows_of(self, plan: AdapterPlan) -> Sequence[TurnRow]:
        return Picked(self.data.rows, plan.rows)


@dataclass(frozen=True)
class ServerLimits:
    """What the server that will serve the adapters takes."""

    max_lora_rank: int
    target_modules: list[str] | None = None
    """Modules that it prepares for adapters; ``None``: not known."""
    max_loras: int | None = None
    """Adapters in use at once; ``None``: not known, or no limit."""
    of_server: bool = False
    """Whether a running server said so."""


@dataclass(frozen=True)
class NewAdapter:
    """Shape of an adapter that does not exist yet."""

    rank: int
    alpha: int
    target_modules: list[str]


def context_length(model_dir: Path) -> int | None:
    """Longest sequence that the model's configuration allows; ``None`` when it does not say."""
    config: dict[str, Any] = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    for fields in (config, config.get("text_config") or {}):
        for name in ("max_position_embeddings", "n_positions", "max_sequence_length"):
            if isinstance(fields.get(name), int):
                return fields[name]
    return None


def make_plan(
    data: TrainingSet,
    *,
    registry: Registry,
    base: BaseModelInfo,
    model_dir: Path,
    agents: Mapping[str, str],
    new: Callable[[str], NewAdapter],
    max_length: int | None,
    limits: ServerLimits,
    spread: bool = True,
    settings: Iterable[str] = (),
) -> Plan:
    """Decide what is trained.

    ``new`` gives the shape of an adapter that does not exist yet; ``settings`` are the adapters
    that the configuration has settings for.

    Raises:
        ConfigError: an agent or a module name is wrong.
        LogError: the logs are of another tokenizer.
        AdapterError: an adapter is of another base, or one that the server would refuse.
        RewardError, NothingToLearn: there is no reward, or nothing to learn from it.
    """
    published = registry.agents()
    roles = resolve_adapters(
        {row.agent for row in data.rows}, agents, recorded=data.agents, published=published
    )
    check_adapter_settings(settings, [*roles.values(), *published])
    require_signal(data, spread=spread)
    limit = max_length or context_length(model_dir) or 1 << 30
    by_adapter = _rows_by_adapter(data, roles, base, limit)
    adapters = [
        _adapter_plan(data, registry, base, adapter, rows, new(adapter))
        for adapter, rows in sorted(by_adapter.items())
    ]
    untouched = _untouched(data, roles, by_adapter, registry)
    if not adapters:
        why = "; ".join(f"{u.name}: {u.why}" for u in untouched)
        raise NothingToLearn(f"no trainable turn ({why}); nothing was changed")
    plan = Plan(data, base, model_dir, limit, adapters, untouched, roles)
    _check_servable(plan, registry, new, limits)
    return plan


def _rows_by_adapter(
    data: TrainingSet, roles: Mapping[str, str], base: BaseModelInfo, limit: int
) -> dict[str, list[int]]:
    out: dict[str, list[int]] = {}
    for i, row in enumerate(data.rows):
        role = roles[row.agent]
        if role in UNTRAINED_ROLES:
            data.left_out_turns[row.agent, role] += 1
        elif too_long(row, limit):
            data.left_out_turns[row.agent, f"longer than the context of {limit} tokens"] += 1
        elif highest_token(row) >= base.vocab_size:
            raise LogError(
                f"turn {row.turn_id} of agent {row.agent!r} (episode"
                f" {data.episodes[row.episode].episode_id}) has token id {highest_token(row)}, and"
                f" {base.name} has only {base.vocab_size} tokens: the logs are of another model."
                " Give the model that answered with --model, or mark the agent as external"
            )
        else:
            out.setdefault(role, []).append(i)
    return out


def _adapter_plan(
    data: TrainingSet,
    registry: Registry,
    base: BaseModelInfo,
    adapter: str,
    rows: list[int],
    new: NewAdapter,
) -> AdapterPlan:
    start = registry.current(adapter)
    rank = new.rank
    if start is not None:
        manifest = registry.verify(adapter, start)
        rank = manifest.rank
        if manifest.base.fingerprint != base.fingerprint:
            raise AdapterError(
                f"adapter {served_name(adapter, start)} in {registry.root} was trained for the base"
                f" {manifest.base.name} ({manifest.base.fingerprint[:12]}), and --model is"
                f" {base.name} ({base.fingerprint[:12]}); give that base, or another --output"
            )
    return AdapterPlan(
        adapter=adapter,
        agents=sorted({data.rows[i].agent for i in rows}),
        rows=rows,
        start=start,
        rank=rank,
        behaviour=Counter(data.rows[i].adapter or "no adapter" for i in rows),
    )


def _untouched(
    data: TrainingSet, roles: Mapping[str, str], trained: Mapping[str, Any], registry: Registry
) -> list[Untouched]:
    out: list[Untouched] = []
    for agent in sorted({*data.agents, *roles}):
        role = roles.get(agent)
        if role in trained:
            continue
        reasons = [f"{n} {why}" for (a, why), n in data.left_out_turns.items() if a == agent]
        if role in UNTRAINED_ROLES:
            out.append(Untouched(agent, str(role)))
        else:
            why = f" ({', '.join(reasons)})" if reasons else ""
            out.append(Untouched(agent, f"0 samples{why}"))
    named = {u.name for u in out} | {roles[u.name] for u in out if u.name in roles}
    silent = [a for a in registry.agents() if a not in trained and a not in named]
    return out + [Untouched(adapter, "0 samples") for adapter in silent]


def _check_servable(
    plan: Plan, registry: Registry, shapes: Callable[[str], NewAdapter], limits: ServerLimits
) -> None:
    """Refuse now what the server would refuse after hours of training."""
    for adapter in plan.adapters:
        new = shapes(adapter.adapter)
        if adapter.start is not None:
            config = read_adapter_config(registry.path(adapter.adapter, adapter.start))
            name = served_name(adapter.adapter, adapter.start)
            if new.rank not in (adapter.rank, DEFAULT_RANK):
                plan.notes.append(
                    f"{adapter.adapter} goes on at rank {adapter.rank}, that of {name};"
                    f" rank {new.rank} is for adapters that do not exist yet"
                )
        else:
            module_shapes(plan.model_dir, new.target_modules)
            config = _fresh_config(new)
            name = f"the new adapter {adapter.adapter}"
        try:
            validate_adapter_config(config, max_lora_rank=limits.max_lora_rank)
        except AdapterError as error:
            raise AdapterError(f"{name}: {error}") from error
        _check_modules(name, config["target_modules"], limits)


def _check_modules(name: str, targets: Sequence[str], limits: ServerLimits) -> None:
    """An engine drops weights of modules that it did not prepare, without a word."""
    prepared = limits.target_modules
    ignored = sorted({t.rsplit(".", 1)[-1] for t in targets} - set(prepared or targets))
    if prepared and ignored:
        raise AdapterError(
            f"{name} trains {', '.join(ignored)}, and the server prepares only"
            f" {', '.join(sorted(prepared))} for adapters; restart serve with --target-modules"
            f" {','.join(sorted({*prepared, *ignored}))}, or set lora_target_modules"
        )


def _fresh_config(new: NewAdapter) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": new.rank,
        "lora_alpha": new.alpha,
        "target_modules": new.target_modules,
        "bias": "none",
    }


def reward_line(rewards: Sequence[float]) -> str:
    """``mean 0.45, from 0 to 1`` of the episodes' total rewards."""
    mean = sum(rewards) / len(rewards)
    return f"mean {mean:.3f}, from {min(rewards):g} to {max(rewards):g}"
