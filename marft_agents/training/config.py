"""Every setting of a training run.

Invariant: a ``MarftConfig`` that exists is valid; whatever is wrong with a value was a
``ConfigError`` naming the field. Names and meanings of ``transformers.TrainingArguments`` are kept
where it has them (``learning_rate``, ``num_train_epochs``, ``per_device_train_batch_size`` …).
"""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass, field
from typing import Any

from marft_agents.credit import NORMALISATIONS
from marft_agents.errors import ConfigError
from marft_agents.registry import DEFAULT_ALPHA, DEFAULT_RANK, DEFAULT_TARGET_MODULES
from marft_agents.training._trl import BaseConfig

DTYPES = ("auto", "float32", "bfloat16", "float16")


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class MarftConfig(BaseConfig):
    """Settings of offline training; see each field's help."""

    # what transformers has, with defaults that fit small adapters and few logs
    learning_rate: float = _setting(5e-4, "Adam's step size for the adapters.")
    num_train_epochs: float = _setting(4.0, "Passes over each adapter's turns, one after another.")
    per_device_train_batch_size: int = _setting(8, "Turns scored together.")
    lr_scheduler_type: str = _setting("constant", "Schedule over all agents' steps together.")
    gradient_checkpointing: bool = _setting(False, "Trade compute for memory.")
    bf16: bool | None = _setting(False, "Autocast; leave it off, `dtype` sets the base's type.")
    disable_tqdm: bool | None = _setting(True, "No progress bars; progress is printed as lines.")
    save_strategy: str = _setting("no", "Checkpoints of the loop.")
    logging_steps: float = _setting(5, "Steps between two lines of progress.")
    remove_unused_columns: bool = _setting(False, "Kept off: rows are ours.")
    dataloader_pin_memory: bool = _setting(False, "Rows are packed on the fly.")

    # whose turns
    agents: dict[str, str] = field(
        default_factory=dict[str, str],
        metadata={
            "help": "Agent to adapter name, `frozen` or `external`; others get their own adapter."
        },
    )
    max_length: int | None = _setting(
        None, "Longest turn (prompt and reply, tokens) to train on; default: the model's context."
    )

    # credit
    gamma: float = _setting(1.0, "Discount at an environment transition; a hand-off has none.")
    lam: float = _setting(0.95, "GAE's lambda, over the turns of all agents.")
    normalise: str = _setting("agent", "Scale of advantages: agent, team or none.")

    # advantage-weighted regression
    awr_temperature: float = _setting(0.5, "tau: small imitates only the best actions.")
    awr_weight_max: float = _setting(20.0, "Largest weight of one action.")
    awr_skip_share: float = _setting(0.1, "Skip the lightest turns, up to this share of weight.")

    # adapters
    lora_rank: int = _setting(DEFAULT_RANK, "Rank of an adapter that does not exist yet.")
    lora_alpha: int = _setting(DEFAULT_ALPHA, "Alpha of an adapter that does not exist yet.")
    lora_target_modules: list[str] = field(
        default_factory=lambda: list(DEFAULT_TARGET_MODULES),
        metadata={"help": "Modules of an adapter that does not exist yet."},
    )
    max_lora_rank: int = _setting(16, "The server's --max-lora-rank, when no --server is given.")
    dtype: str = _setting("auto", "Type of the base's weights: auto, float32, bfloat16, float16.")

    # critic
    critic_hidden: int = _setting(64, "Width of the value head.")
    critic_epochs: int = _setting(60, "Passes of the value head over all turn borders.")
    critic_learning_rate: float = _setting(1e-3, "Adam's step size for the value head.")
    critic_weight_decay: float = _setting(0.1, "Weight decay of the value head.")
    critic_folds: int = _setting(5, "Values of an episode come from a head that never saw it.")
    critic_max_length: int = _setting(4096, "Longest transcript window, tokens.")

    # guards and speed
    replay_turns: int = _setting(8, "Turns per adapter version to replay first; 0: no check.")
    replay_tolerance: float = _setting(0.05, "Largest mean |difference| of log-probabilities.")
    max_nonfinite_steps: int = _setting(3, "Stop after this many losses that are not finite.")
    pack_tokens: int = _setting(768, "Tokens of one forward pass; prompts share prefixes in it.")
    effect_turns: int = _setting(8, "Best and worst turns per adapter measured before and after.")

    def __post_init__(self) -> None:
        if self.output_dir is None:  # the loop's scratch folder; adapters go to the registry
            self.output_dir = os.path.join(tempfile.gettempdir(), "marft-agents")
        self._check()
        try:
            super().__post_init__()
        except (ValueError, TypeError, OSError) as error:
            raise ConfigError(f"a setting was refused: {str(error).splitlines()[0]}") from error

    def _check(self) -> None:
        for name in ("gamma", "lam"):
            self._must(name, 0 <= getattr(self, name) <= 1, "between 0 and 1")
        self._must("awr_skip_share", 0 <= self.awr_skip_share < 1, "from 0 to below 1")
        for name in (
            "learning_rate", "num_train_epochs", "awr_temperature", "awr_weight_max", "lora_rank",
            "lora_alpha", "max_lora_rank", "critic_hidden", "critic_epochs",
            "critic_learning_rate", "critic_max_length", "replay_tolerance",
            "per_device_train_batch_size", "gradient_accumulation_steps", "effect_turns",
        ):  # fmt: skip
            self._must(name, getattr(self, name) > 0, "above 0")
        for name in ("replay_turns", "max_nonfinite_steps", "weight_decay"):
            self._must(name, getattr(self, name) >= 0, "0 or more")
        for name in ("learning_rate", "num_train_epochs", "weight_decay", "critic_learning_rate"):
            self._must(name, math.isfinite(getattr(self, name)), "a finite number")
        self._must("seed", 0 <= self.seed < 2**32, "between 0 and 4294967295")
        self._must("critic_folds", self.critic_folds >= 2, "2 or more")
        self._must("pack_tokens", self.pack_tokens >= 16, "16 or more")
        self._must("max_length", self.max_length is None or self.max_length > 1, "above 1")
        self._must("normalise", self.normalise in NORMALISATIONS, f"one of {NORMALISATIONS}")
        self._must("dtype", self.dtype in DTYPES, f"one of {DTYPES}")
        self._must("lora_target_modules", bool(self.lora_target_modules), "at least one module")

    def _must(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be {what}")
