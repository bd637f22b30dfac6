"""sft, kto and dpo by TRL's own trainers, on recorded token ids, one named adapter after another.

Invariants: no text is encoded: the trainers are given ids and a tokenizer that knows none. Prompts
carry no loss. Only the adapter being trained moves; what a trainer does to the model besides is
undone. The reference of kto and dpo is the adapter at the start: its log-probabilities are computed
once, before the first step, so no second model and no copy of the adapter is kept.

Losses are of the log-probabilities at temperature 1, TRL's and the papers' form, whatever the turns
were sampled at: what is imitated or preferred is a reply, not the sampler.

    sft   mean over a batch's tokens of -log π(w)
    dpo   -log sigmoid(β (r_chosen - r_rejected)),  r = log π/π_ref of a reply    arXiv 2305.18290
    kto   λ (1 - sigmoid(±β (r - z))),  z = mean r of mismatched replies, λ: each label has half
          of the weight                                                           arXiv 2402.01306
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from tokenizers import Tokenizer, models
from transformers import (
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
)

from marft_agents.errors import ConfigError, TrainingError
from marft_agents.training._trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    SFTConfig,
    SFTTrainer,
)
from marft_agents.training.borrowed import model_restored, only_this_moves, switch_dropout_off
from marft_agents.training.config import MarftConfig
from marft_agents.training.examples import (
    Example,
    Said,
    dpo_examples,
    kto_examples,
    kto_weights,
    sft_examples,
)
from marft_agents.training.preferences import MethodRow, Selection, select
from marft_agents.training.scoring import score_turns

Say = Callable[[str], None]
Log = Callable[[dict[str, float], int], None]
_QUIET_S = 10.0
_NOT_METRICS = ("epoch", "learning_rate", "num_tokens", "step")


def train_with_trl(
    model: PeftModel,
    method: str,
    adapters: Mapping[str, Sequence[MethodRow]],
    config: MarftConfig,
    scratch: Path,
    say: Say,
    *,
    share: bool = False,
    log: Log | None = None,
) -> dict[str, float]:
    """Train the named adapters of ``model`` by ``method`` (sft, kto or dpo), in the order given.

    Args:
        scratch: a folder for the trainers; nothing that is kept goes there.
        share: whether this model scores turns with shared prefixes exactly.
        log: receives the metrics of a step, for tracking, and the step's number in the stage.

    Returns:
        The last metrics as ``<adapter>/<name>``, and ``<adapter>/loss_first`` of the first step.
        Adapters with nothing to learn are said, left as they are, and have no metrics.

    Raises:
        NothingToLearn: when no adapter has anything to learn.
        ConfigError: when a setting cannot be carried out.
        TrainingError: when another adapter moved, or too many steps were not finite.
    """
    if method == "kto" and config.per_device_train_batch_size < 2:
        raise ConfigError(
            "kto compares the turns of a batch with each other; set per_device_train_batch_size to"
            f" 2 or more (it is {config.per_device_train_batch_size})"
        )
    selection = select(method, adapters, config)
    for line in selection.lines:
        say(line)
    for adapter, why in selection.idle.items():
        say(f"{method}: {adapter} has nothing to learn from ({why}); untouched")
    metrics: dict[str, float] = {}
    steps = 0
    for adapter in selection.adapters:
        with only_this_moves(model, adapter), model_restored(model):
            model.set_adapter(adapter)
            switch_dropout_off(model)
            examples = _examples(model, adapter, selection, config, share)
            watch = _Watch(adapter, config, say, log, steps)
            steps += _train(model, adapter, selection, examples, config, scratch, watch)
        if watch.nonfinite:
            say(f"WARNING: {adapter}: {watch.nonfinite} steps were not finite and were skipped")
        metrics |= {f"{adapter}/{name}": value for name, value in watch.metrics.items()}
    return metrics


def _examples(
    model: PeftModel, adapter: str, selection: Selection, config: MarftConfig, share: bool
) -> list[Example]:
    """The adapter's data; references are scored under the adapter as it is now."""

    def score(replies: Sequence[Said]) -> list[float]:
        scored = score_turns(
            model, replies, [1.0] * len(replies), pack_tokens=config.pack_tokens, share=share
        )
        return [math.fsum(logps) for logps in scored]

    model.eval()
    if selection.method == "sft":
        return sft_examples(selection.imitated[adapter])
    if selection.method == "dpo":
        return dpo_examples(selection.pairs[adapter], score)
    return kto_examples(
        selection.labelled[adapter],
        score,
        batch=config.per_device_train_batch_size,
        seed=config.seed,
    )


class _OnIds:
    """What all three trainers do not do here: encode text, write cards, call home."""

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return dataset

    def _send_telemetry(self) -> None:
        pass

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        pass


class SftOnIds(_OnIds, SFTTrainer):
    """TRL's SFT trainer on ids."""


class KtoOnIds(_OnIds, KTOTrainer):
    """TRL's KTO trainer on ids and known log-probabilities of the reference."""


class DpoOnIds(_OnIds, DPOTrainer):
    """TRL's DPO trainer on ids and known log-probabilities of the reference."""


TRAINERS: dict[str, tuple[Any, Any]] = {
    "sft": (SftOnIds, SFTConfig),
    "kto": (KtoOnIds, KTOConfig),
    "dpo": (DpoOnIds, DPOConfig),
}


def _arguments(
    adapter: str, selection: Selection, config: MarftConfig, scratch: Path
) -> TrainingArguments:
    """The run's settings in the trainer's own configuration."""
    method = selection.method
    values = {f.name: getattr(config, f.name) for f in fields(TrainingArguments) if f.init}
    values |= {
        "output_dir": str(scratch / f"{method}-{adapter}"),
        "learning_rate": config.of_adapter(adapter, "learning_rate"),
        "max_length": None,  # TRL's own limit cuts replies off, and drops what it cut
        "router_aux_loss_coef": 0.0,
        "save_strategy": "no",
        "eval_strategy": "no",
        "load_best_model_at_end": False,
        "push_to_hub": False,
        "report_to": "none",  # the run's own trainer reports, under the adapter's name
        "logging_first_step": True,
        "dataloader_drop_last": False,
        "remove_unused_columns": False,
    }
    if method == "sft":
        values["completion_only_loss"] = True
    else:
        values["beta"] = config.preference_beta
    if method == "kto":
        good, bad = kto_weights(selection.labelled[adapter])
        values |= {
            "desirable_weight": good,
            "undesirable_weight": bad,
            "train_sampling_strategy": "sequential",  # its batches are made, see kto_examples
        }
    arguments = TRAINERS[method][1](**values)
    arguments._n_gpu = min(arguments.n_gpu, 1)  # one device, no copies of the model
    return arguments


def _make_trainer(
    model: PeftModel,
    method: str,
    arguments: TrainingArguments,
    examples: list[Example],
    watch: TrainerCallback,
) -> Any:
    others: dict[str, Any] = {} if method == "sft" else {"ref_model": _NoReference()}
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    trainer = TRAINERS[method][0](
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(examples),
        processing_class=_no_tokenizer(),
        callbacks=[watch],
        **others,
    )
    if method != "sft":
        trainer.precompute_ref_logps = True
    for name, parameter in model.named_parameters():
        if name in start:  # on a quantised base they were rounded to bfloat16
            parameter.data = start[name]
    trainer.remove_callback(PrinterCallback)
    return trainer


def _train(
    model: PeftModel,
    adapter: str,
    selection: Selection,
    examples: list[Example],
    config: MarftConfig,
    scratch: Path,
    watch: _Watch,
) -> int:
    """Steps that were taken."""
    try:
        arguments = _arguments(adapter, selection, config, scratch)
        trainer = _make_trainer(model, selection.method, arguments, examples, watch)
        trainer.create_optimizer()
    except (ValueError, ImportError, RuntimeError) as error:
        raise ConfigError(f"a setting was refused: {str(error).splitlines()[0]}") from error
    trainer.train()
    return int(trainer.state.global_step)


class _Watch(TrainerCallback):
    """Progress, metrics, and the guard against gradients that are not finite."""

    def __init__(
        self, adapter: str, config: MarftConfig, say: Say, log: Log | None, steps_before: int
    ) -> None:
        self._adapter, self._limit, self._say = adapter, config.max_nonfinite_steps, say
        self._log, self._steps_before = log, steps_before
        self._started = self._spoke = time.monotonic()
        self.metrics: dict[str, float] = {}
        self.nonfinite = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trained = [p for p in kwargs["model"].parameters() if p.grad is not None]
        if all(bool(torch.isfinite(p.grad).all()) for p in trained):
            return
        for parameter in trained:
            parameter.grad = None
        self.nonfinite += 1
        if self.nonfinite > self._limit:
            raise TrainingError(
                f"adapter {self._adapter!r}: {self.nonfinite} steps gave a gradient that is not"
                f" finite (limit {self._limit}); nothing was published. Lower learning_rate"
                f" (now {args.learning_rate:g}) or use dtype: float32"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == state.max_steps:
            control.should_log = True

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        values = {n: float(v) for n, v in (logs or {}).items() if n not in _NOT_METRICS}
        if "loss" not in values:
            return
        self.metrics |= {"loss_first": self.metrics.get("loss_first", values["loss"]), **values}
        if self._log is not None:
            step = self._steps_before + state.global_step
            self._log({f"{self._adapter}/{name}": value for name, value in values.items()}, step)
        now = time.monotonic()
        if state.global_step == state.max_steps or now - self._spoke > _QUIET_S:
            self._spoke = now
            self._say(
                f"  {self._adapter}: step {state.global_step}/{state.max_steps}"
                f"  loss {values['loss']:.4f}  {now - self._started:.0f} s"
            )


class _NoReference(torch.nn.Module):
    """Stands where kto and dpo want a second model, which known log-probabilities replace.

    Without it they would look for an adapter called ``default``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.config = PreTrainedConfig()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise TrainingError("the reference's log-probabilities are known; no model gives them")


def _no_tokenizer() -> PreTrainedTokenizerFast:
    """Pads with id 0, which no mask lets anyone see, and encodes nothing."""
    empty = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=empty, pad_token="<pad>")
