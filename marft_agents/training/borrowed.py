"""A model lent to a trainer of another library, and given back as it was.

Invariant: after the loan only the tensors of the one adapter that was trained may differ. Trainers
patch the model's forward, write token ids into its configuration, and freeze and thaw parameters.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Generator
from typing import Any

from peft import PeftModel

from marft_agents.errors import TrainingError
from marft_agents.training._trl import disable_dropout_in_model
from marft_agents.training.adapters import adapter_state

_CONFIG_FIELDS = (
    "pad_token_id", "bos_token_id", "eos_token_id", "output_router_logits", "router_aux_loss_coef",
    "use_cache",
)  # fmt: skip


def switch_dropout_off(model: PeftModel) -> None:
    """Dropout off, also where it is no module but a number that attention reads."""
    disable_dropout_in_model(model)
    for module in model.modules():
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.__dict__["attention_dropout"] = 0.0


def fingerprint(model: PeftModel, adapter: str) -> str:
    """A checksum of one adapter's tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(adapter_state(model, adapter).items()):
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


@contextlib.contextmanager
def only_this_moves(model: PeftModel, adapter: str) -> Generator[None]:
    """Every other adapter is bit for bit the same after the block.

    Raises:
        TrainingError: when one is not.
    """
    others = [str(name) for name in model.peft_config if name != adapter]
    before = {name: fingerprint(model, name) for name in others}
    yield
    moved = [name for name in others if fingerprint(model, name) != before[name]]
    if moved:
        raise TrainingError(
            f"training {adapter!r} changed {', '.join(moved)} too; nothing was published"
        )


@contextlib.contextmanager
def model_restored(model: PeftModel) -> Generator[None]:
    """Undo what a trainer does to the model besides training: its forward, configs and flags."""
    base: Any = model.get_base_model()
    forwards = [(m, m.__dict__.get("forward")) for m in (model, base)]
    configs = [base.config, base.config.get_text_config(), base.generation_config]
    values = [
        (config, name, copy.copy(getattr(config, name)))
        for config in configs
        if config is not None
        for name in _CONFIG_FIELDS
        if hasattr(config, name)
    ]
    flags = [(p, p.requires_grad) for p in model.parameters()]
    hooks: dict[int, Any] = base.get_input_embeddings()._forward_hooks
    known_hooks = list(hooks)
    active, training = list(model.active_adapters), model.training
    checkpointing = base.is_gradient_checkpointing
    try:
        yield
    finally:
        if base.is_gradient_checkpointing and not checkpointing:
            base.gradient_checkpointing_disable()
        for added in [key for key in hooks if key not in known_hooks]:
            del hooks[added]  # there may be two, of which the model remembers one
        for module, forward in forwards:
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward
        for config, name, value in values:
            setattr(config, name, value)
        tuner: Any = model.base_model
        tuner.set_adapter(active)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
            parameter.grad = None
        model.train(training)
