"""Adapter versions on disk, and the names that agents, adapters and versions have.

Invariant: a manifest is written once; a name is made by one rule and taken apart by one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import Field

from marft_agents.errors import ConfigError
from marft_agents.schema.events import SCHEMA_VERSION, JsonDict, Record


class BaseModelInfo(Record):
    """What identifies a base model well enough to refuse an adapter of another one."""

    name: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    model_type: str
    fingerprint: str
    """sha256 over the config's shape fields and a sample of the weights."""
    modules: dict[str, tuple[int, int]] = Field(default_factory=dict[str, tuple[int, int]])
    """(out, in) per linear module, ``model.layers.*.self_attn.q_proj`` for all layers at once."""


class Probe(Record):
    """A check that a served adapter is the trained one.

    ``logprobs`` (L,) are the trainer's under the adapter, ``base_logprobs`` (L,) without it, both
    at temperature 1 for ``token_ids`` (L,) given ``prompt_token_ids`` (P,).
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    base_logprobs: list[float]


class AdapterManifest(Record):
    """``manifest.json`` beside one published adapter version; written once, never changed."""

    schema_version: int = SCHEMA_VERSION
    agent: str
    version: int = Field(ge=1)
    created: datetime = Field(default_factory=lambda: datetime.now(UTC))
    base: BaseModelInfo
    parent: int | None = None
    """Version that training started from; ``None`` for the untrained first one."""
    untrained: bool = False
    """True when B = 0: the adapter answers exactly as the base does."""
    rank: int
    target_modules: list[str]
    files: dict[str, str]
    """sha256 per file in the folder."""
    probe: Probe | None = None
    training: JsonDict = Field(default_factory=dict[str, Any])
    """What it was trained on: episodes, turns, tokens, metrics, configuration."""

    @property
    def served_name(self) -> str:
        return served_name(self.agent, self.version)


CRITIC_ADAPTER = "marft-critic"
"""Reserved for the value function's own adapter; plain ``critic`` is what teams call a reviewer."""
RESERVED_NAMES = frozenset({"default", "ref", "base", "__base__", CRITIC_ADAPTER})
_MODULE_PARTS = frozenset(
    {
        "model", "layers", "self_attn", "mlp", "lm_head", "embed_tokens", "norm", "base_model",
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
        "input_layernorm", "post_attention_layernorm", "lora_a", "lora_b", "weight",
    }
)  # fmt: skip


def adapter_slug(agent: str) -> str:
    """The one rule that turns an agent's name into an adapter's: lower case, ``[a-z0-9_-]``.

    Raises:
        ConfigError: when nothing usable is left, or the name is reserved or a module's.
    """
    slug = re.sub(r"[^a-z0-9_-]+", "-", agent.strip().lower()).strip("-")
    if not slug or slug.isdigit() or len(slug) > 64:
        raise ConfigError(
            f"agent name {agent!r} gives no usable adapter name; use letters, digits, - and _"
            " (at most 64, not digits alone)"
        )
    if slug in RESERVED_NAMES or slug in _MODULE_PARTS:
        raise ConfigError(
            f"agent name {agent!r} gives the reserved adapter name {slug!r}; use another name,"
            " or map it to an adapter under `agents:` in the config of finetune"
        )
    return slug


def served_name(agent: str, version: int) -> str:
    """Name under which the engine knows one version: ``planner@v7``."""
    return f"{agent}@v{version}"


def parse_served_name(name: str) -> tuple[str, int] | None:
    """``("planner", 7)`` for ``planner@v7``; ``None`` for anything else."""
    match = re.fullmatch(r"([a-z0-9_-]+)@v([1-9][0-9]*)", name)
    return (match[1], int(match[2])) if match else None


def adapter_slugs(agents: Sequence[str]) -> dict[str, str]:
    """Adapter name per agent.

    Raises:
        ConfigError: when two different agents would share one adapter name by accident.
    """
    out: dict[str, str] = {}
    for agent in agents:
        slug = adapter_slug(agent)
        clash = next((a for a, s in out.items() if s == slug and a != agent), None)
        if clash is not None:
            raise ConfigError(
                f"agents {clash!r} and {agent!r} both give the adapter name {slug!r};"
                " rename one, or map them under `agents:` in the config"
            )
        out[agent] = slug
    return out
