"""Which adapter configurations a server takes, checked before hours of training and not after.

Invariant: what passes here is plain LoRA (rsLoRA and rank patterns included) that an engine either
serves exactly or refuses loudly. Settings that an engine accepts and then ignores are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from marft_agents.errors import AdapterError

ALLOWED_MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
DEFAULT_TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
DEFAULT_RANK = 8
DEFAULT_ALPHA = 16

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
_HEAD_MODULES = frozenset({"lm_head", "embed_tokens", "wte", "embed_out"})
_REFUSED_WHEN_SET = {
    "use_dora": "DoRA; train with use_dora: false",
    "modules_to_save": "full copies of modules; train without modules_to_save",
    "lora_bias": "a LoRA bias; train with lora_bias: false",
    "trainable_token_indices": "trained token embeddings, which an engine drops silently;"
    " train without trainable_token_indices",
    "layer_replication": "replicated layers; train without layer_replication",
    "alora_invocation_tokens": "activated LoRA; train without alora_invocation_tokens",
    "use_bdlora": "block-diagonal LoRA; train without use_bdlora",
    "use_qalora": "QALoRA; train without use_qalora",
    "target_parameters": "LoRA on bare parameters; train modules instead",
}


def allowed_max_rank(rank: int) -> int:
    """The smallest value that ``--max-lora-rank`` takes and that is enough for ``rank``.

    Raises:
        AdapterError: when no server takes so high a rank.
    """
    fitting = next((limit for limit in ALLOWED_MAX_RANKS if limit >= rank), None)
    if rank < 1 or fitting is None:
        raise AdapterError(
            f"LoRA rank {rank} cannot be served; choose a rank from 1 to {ALLOWED_MAX_RANKS[-1]}"
        )
    return fitting


def _ranks(config: Mapping[str, Any]) -> dict[str, int]:
    """Every rank the configuration gives, by the setting that gives it."""
    pattern = cast("Mapping[str, Any]", config.get("rank_pattern") or {})
    named: dict[str, Any] = {"r": config.get("r")}
    named |= {f"rank_pattern[{key!r}]": value for key, value in pattern.items()}
    for setting, value in named.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise AdapterError(f"adapter config: {setting} is {value!r}; give a rank of 1 or more")
    return named


def highest_rank(config: Mapping[str, Any]) -> int:
    """The highest rank of any module, ``rank_pattern`` included."""
    return max(_ranks(config).values())


def rank_of(config: Mapping[str, Any], module: str) -> int:
    """Rank of one module by PEFT's rule: the first ``rank_pattern`` key that ends its name."""
    pattern = cast("Mapping[str, int]", config.get("rank_pattern") or {})
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return int(config["r"])


def _check_ranks(config: Mapping[str, Any], max_lora_rank: int | None) -> None:
    for setting, rank in _ranks(config).items():
        needed = allowed_max_rank(rank)
        if max_lora_rank is not None and rank > max_lora_rank:
            choices = " ".join(map(str, ALLOWED_MAX_RANKS))
            raise AdapterError(
                f"adapter config: {setting} is {rank}, the server's limit is {max_lora_rank};"
                f" serve with --max-lora-rank {needed} (it takes only {choices})"
                f" or train with a rank of at most {max_lora_rank}"
            )


def _check_targets(config: Mapping[str, Any]) -> None:
    targets = config.get("target_modules")
    if not targets:
        raise AdapterError("adapter config: target_modules is empty; name the modules to adapt")
    names: Sequence[str] = (
        [targets] if isinstance(targets, str) else [str(t) for t in cast("Iterable[Any]", targets)]
    )
    for name in names:
        last = name.rsplit(".", 1)[-1]
        if last in _HEAD_MODULES:
            raise AdapterError(
                f"adapter config: target_modules names {last!r}; its log-probabilities would be"
                " served without the adapter's part, train the attention or MLP projections only"
            )


def validate_adapter_config(config: Mapping[str, Any], *, max_lora_rank: int | None = None) -> None:
    """Refuse what a server would refuse, or would accept and then answer wrongly.

    Args:
        config: ``adapter_config.json`` or the same settings before training.
        max_lora_rank: the server's limit; ``None`` checks only that some limit is enough.

    Raises:
        AdapterError: naming the setting, its value and the fix.
    """
    kind = config.get("peft_type")
    if kind is not None and str(getattr(kind, "value", kind)).upper() != "LORA":
        raise AdapterError(f"adapter config: peft_type is {kind!s}; only LORA can be served")
    for setting, why in _REFUSED_WHEN_SET.items():
        if config.get(setting):
            raise AdapterError(
                f"adapter config: {setting} is {config[setting]!r}; servers do not take {why}"
            )
    bias = config.get("bias", "none")
    if bias not in (None, "none"):
        raise AdapterError(f"adapter config: bias is {bias!r}; servers take only bias: none")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        raise AdapterError(
            f"adapter config: init_lora_weights is {init!r}, which changes the base model's"
            " weights; servers keep the original base, train with init_lora_weights: true"
        )
    _check_ranks(config, max_lora_rank)
    _check_targets(config)
