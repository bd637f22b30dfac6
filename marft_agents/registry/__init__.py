"""Adapter versions on disk, and what may become one. Loads no torch."""

from __future__ import annotations

from marft_agents.registry.audit import Change, current_user
from marft_agents.registry.base import (
    describe_base,
    module_shapes,
    resolve_model_dir,
    weight_sizes,
)
from marft_agents.registry.canary import Bounds, CanaryPlan
from marft_agents.registry.card import model_card
from marft_agents.registry.check import AdapterFacts, inspect_adapter, read_adapter_config
from marft_agents.registry.limits import (
    ALLOWED_MAX_RANKS,
    DEFAULT_ALPHA,
    DEFAULT_RANK,
    DEFAULT_TARGET_MODULES,
    allowed_max_rank,
    highest_rank,
    validate_adapter_config,
)
from marft_agents.registry.store import Registry
from marft_agents.registry.untrained import write_untrained_adapter

__all__ = [
    "ALLOWED_MAX_RANKS",
    "DEFAULT_ALPHA",
    "DEFAULT_RANK",
    "DEFAULT_TARGET_MODULES",
    "AdapterFacts",
    "Bounds",
    "CanaryPlan",
    "Change",
    "Registry",
    "allowed_max_rank",
    "current_user",
    "describe_base",
    "highest_rank",
    "inspect_adapter",
    "model_card",
    "module_shapes",
    "read_adapter_config",
    "resolve_model_dir",
    "validate_adapter_config",
    "weight_sizes",
    "write_untrained_adapter",
]
