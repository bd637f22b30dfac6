"""The one place that imports TRL, its private names included.

Invariant: nothing comes from ``trl.experimental``; every name here is checked against its expected
signature by a test, so a TRL release that moves one fails there and not in a user's run.
"""

from __future__ import annotations

from trl.trainer import base_config, base_trainer
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_config import KTOConfig
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer
from trl.trainer.utils import (
    disable_dropout_in_model,
    entropy_from_logits,
    selective_log_softmax,
    use_adapter,
)

BaseConfig = base_config._BaseConfig  # pyright: ignore[reportPrivateUsage] see the docstring
BaseTrainer = base_trainer._BaseTrainer  # pyright: ignore[reportPrivateUsage] see the docstring

__all__ = [
    "BaseConfig",
    "BaseTrainer",
    "DPOConfig",
    "DPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "SFTConfig",
    "SFTTrainer",
    "disable_dropout_in_model",
    "entropy_from_logits",
    "selective_log_softmax",
    "use_adapter",
]
