"""The base model with its LoRA layers, and the one forward pass that everything goes through.

Invariant: the weights of the base never change, and a row's logits are those of the base plus the
row's own adapter, whatever shares its batch. A start-up check compares this path with a plain
transformers forward and refuses the model when they differ.

Axes: ``_B`` rows, ``_T`` tokens per row, ``_N`` picked positions, ``_V`` vocabulary.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# reason: transformers and peft ship no complete types
from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from marft_agents.errors import ConfigError, EngineError
from marft_agents.serving.local.cache import (
    ATTENTION,
    ForwardCache,
    SlotCache,
    register_attention,
)
from marft_agents.serving.local.text import Tokenizer

BASE = "__base__"
"""PEFT's name for rows without an adapter."""
_PLACEHOLDER = "placeholder"
_CHECK_IDS = list(range(3, 12))


class LocalModel:
    """Weights, tokenizer and forward pass. Used by one thread at a time.

    Raises:
        ConfigError: when the folder holds no model that this engine can run.
        EngineError: when the start-up check fails.
    """

    def __init__(self, folder: Path, *, window: int | None = None) -> None:
        self.folder = folder
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        base, self.tokenizer = _load(folder, self.device)
        self.decoder: Tokenizer = copy.deepcopy(self.tokenizer)
        """The model thread's own tokenizer: the fast ones are not safe to share."""
        self.window = _window(base.config, window)
        self.vocab_size: int = int(base.get_input_embeddings().weight.shape[0])
        self.end_ids = _end_ids(base, self.tokenizer)
        head = base.get_output_embeddings()
        self.linears = {
            name: (module.out_features, module.in_features)
            for name, module in base.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not head
        }
        """(out, in) of every layer that an adapter may touch."""
        if not self.linears:
            raise ConfigError(f"{folder} holds a model without linear layers; LoRA has no place")
        reference = _plain_logits(base, self.device)
        base.set_attn_implementation(ATTENTION)
        self._picks: tuple[torch.Tensor, torch.Tensor] | None = None
        head.register_forward_pre_hook(self._pick)
        # One adapter that no row ever uses keeps PEFT's wrapper in place when no other is loaded.
        placeholder = LoraConfig(r=1, target_modules=[next(iter(self.linears))])
        self.peft = cast(PeftModel, get_peft_model(base, placeholder, adapter_name=_PLACEHOLDER))
        self.peft.eval()
        self.peft.requires_grad_(False)
        self._check(reference)

    def forward(
        self,
        slots: SlotCache,
        rows: Sequence[int],
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        adapters: Sequence[str],
        picks: Sequence[tuple[int, int]],
    ) -> torch.Tensor:
        """Run ``tokens[i]`` of row ``rows[i]`` at positions ``starts[i]``, …

        ``picks`` are (i, offset into ``tokens[i]``); returns their logits (N, V). Shorter rows are
        padded at the end; what a pad writes lies beyond its row and is overwritten later.
        """
        width = max(len(part) for part in tokens)
        ids_BT = torch.tensor(
            [[*part, *[0] * (width - len(part))] for part in tokens], device=self.device
        )
        steps_T = torch.arange(width, device=self.device)
        positions_BT = torch.tensor(starts, device=self.device)[:, None] + steps_T
        positions_BT.clamp_(max=self.window - 1)  # only pads reach that far
        cache = ForwardCache(slots, rows, positions_BT)
        index = torch.tensor(list(picks), device=self.device)
        self._picks = (index[:, 0], index[:, 1])
        try:
            out: Any = self.peft(
                input_ids=ids_BT,
                attention_mask=cache.mask(),
                position_ids=positions_BT,
                past_key_values=cache,
                use_cache=True,
                adapter_names=list(adapters),
            )
        finally:
            self._picks = None
        logits_NV: torch.Tensor = out.logits
        return logits_NV

    def _pick(self, _head: Any, args: tuple[torch.Tensor, ...]) -> Any:
        """Before the output layer: keep the hidden states of the picked positions only."""
        if self._picks is None:
            return None
        return (args[0][self._picks], *args[1:])

    @torch.inference_mode()
    def _check(self, reference_NV: torch.Tensor) -> None:
        slots, split = SlotCache(), len(_CHECK_IDS) - 1
        before = self.forward(
            slots, [0], [_CHECK_IDS[:split]], [0], [BASE], [(0, i) for i in range(split)]
        )
        after = self.forward(slots, [0], [_CHECK_IDS[split:]], [split], [BASE], [(0, 0)])
        mine_NV = torch.log_softmax(torch.cat([before, after]).float(), dim=-1)
        gap = float((mine_NV - torch.log_softmax(reference_NV, dim=-1)).abs().max())
        limit = 1e-3 if before.dtype == torch.float32 else 0.5
        if not gap <= limit:
            raise EngineError(
                f"the local engine cannot run {self.folder}: its log-probabilities differ by"
                f" {gap:.2g} from a plain forward pass; serve this model with vLLM"
            )


def _load(folder: Path, device: torch.device) -> tuple[Any, Tokenizer]:
    register_attention()
    dtype: Any = torch.float32 if device.type == "cpu" else "auto"
    try:
        base: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
        tokenizer = cast(Tokenizer, AutoTokenizer.from_pretrained(folder, local_files_only=True))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"no model can be loaded from {folder}: {reason}") from error
    base.to(device).eval().requires_grad_(False)
    return base, tokenizer


def _window(config: Any, asked: int | None) -> int:
    """Tokens that one row may hold.

    Raises:
        ConfigError: for an attention that this engine's cache does not do.
    """
    sliding = getattr(config, "sliding_window", None)
    implied = "sliding_attention" if sliding else "full_attention"
    kinds = set(getattr(config, "layer_types", None) or [implied])
    rope = getattr(config, "rope_parameters", None) or {}
    unsupported = [f"{kind} layers" for kind in kinds - {"full_attention", "sliding_attention"}]
    if getattr(config, "attn_logit_softcapping", None):
        unsupported.append("soft-capped attention")
    if rope.get("rope_type") in ("dynamic", "longrope"):
        unsupported.append("positions whose encoding depends on the longest row")
    if unsupported:
        what = " or ".join(sorted(unsupported))
        raise ConfigError(f"the local engine does not do {what}; serve this model with vLLM")
    limit = int(getattr(config, "max_position_embeddings", None) or 2048)
    if sliding and "sliding_attention" in kinds:
        limit = min(limit, int(sliding))
    if asked is not None and asked > limit:
        raise ConfigError(
            f"--max-model-len {asked} is more than the {limit} tokens that this model can be"
            " served with here"
        )
    return asked or limit


def _end_ids(base: Any, tokenizer: Tokenizer) -> frozenset[int]:
    found: set[int] = set()
    sources = (base.generation_config, base.config, tokenizer)
    for ids in (getattr(source, "eos_token_id", None) for source in sources):
        if ids is not None:
            found |= {ids} if isinstance(ids, int) else set(ids)
    return frozenset(found)


@torch.inference_mode()
def _plain_logits(base: Any, device: torch.device) -> torch.Tensor:
    out = base(input_ids=torch.tensor([_CHECK_IDS], device=device), use_cache=False)
    logits_NV: torch.Tensor = out.logits[0].float()
    return logits_NV
