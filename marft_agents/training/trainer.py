"""Agent-by-agent advantage-weighted regression on TRL's base trainer.

Invariants: an optimizer step moves exactly one adapter; the others have no gradient, so neither
momentum nor weight decay touches them and they stay bit-identical. Each adapter has its own Adam
state. A loss or gradient that is not finite changes nothing and is counted.

Loop, schedules, clipping, accumulation and logging are TRL's and transformers'; order of data,
packing and loss are ours.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PrinterCallback, TrainerCallback

from marft_agents.errors import ConfigError, TrainingError
from marft_agents.training._trl import BaseTrainer
from marft_agents.training.config import MarftConfig
from marft_agents.training.losses import awr_loss
from marft_agents.training.packing import Pack, pack_turns
from marft_agents.training.sampler import AgentBlockSampler
from marft_agents.training.scoring import score


@dataclass(frozen=True)
class WeightedTurn:
    """One row to train on: prompt ids (P,), sampled ids (L,), its weight and its adapter."""

    adapter: str
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    weight: float
    temperature: float = 1.0

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)


class TurnDataset(Dataset[WeightedTurn]):
    """Rows, and behind them one weightless filler per adapter."""

    def __init__(self, turns: Sequence[WeightedTurn]) -> None:
        self.adapters = list(dict.fromkeys(turn.adapter for turn in turns))
        self.size = len(turns)
        self.turns = [*turns, *(WeightedTurn(a, (0,), (0,), 0.0) for a in self.adapters)]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> WeightedTurn:
        return self.turns[index]

    @property
    def rows(self) -> dict[str, list[int]]:
        """Row indices per adapter."""
        out: dict[str, list[int]] = {adapter: [] for adapter in self.adapters}
        for i, turn in enumerate(self.turns[: self.size]):
            out[turn.adapter].append(i)
        return out

    @property
    def fillers(self) -> dict[str, int]:
        return {adapter: self.size + i for i, adapter in enumerate(self.adapters)}


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one adapter, packed."""

    adapter: str
    packs: list[Pack]
    weight_B: list[float]
    temperature_B: list[float]


class Collator:
    """Packs the rows of a micro-batch; fillers are left out."""

    def __init__(self, pack_tokens: int, *, share: bool) -> None:
        self._pack_tokens, self._share = pack_tokens, share

    def __call__(self, turns: Sequence[WeightedTurn]) -> dict[str, Any]:
        adapters = {turn.adapter for turn in turns}
        if len(adapters) != 1:
            raise TrainingError(f"a batch mixes the adapters {', '.join(sorted(adapters))}")
        real = [turn for turn in turns if turn.weight > 0]
        batch = Batch(
            adapter=turns[0].adapter,
            packs=pack_turns(real, self._pack_tokens, share=self._share),
            weight_B=[turn.weight for turn in real],
            temperature_B=[turn.temperature for turn in real],
        )
        return {"batch": batch}


@contextlib.contextmanager
def _settings_refused() -> Generator[None]:
    """What the loop says of a setting that it cannot carry out, as a ``ConfigError``."""
    try:
        yield
    except (ValueError, ImportError, RuntimeError) as error:
        raise ConfigError(f"a setting was refused: {str(error).splitlines()[0]}") from error


class MarftTrainer(BaseTrainer):
    """Trains named adapters one after another on weighted turns."""

    _tag_names = ["marft-agents", "trl"]  # noqa: RUF012 an instance-free list by TRL's convention
    _name = "MARFT"
    loss_is_scaled_for_ga = False

    def __init__(
        self,
        model: Any,
        args: MarftConfig,
        turns: Sequence[WeightedTurn],
        *,
        share_prefixes: bool = True,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        self.config = args
        self.turns = TurnDataset(turns)
        self.nonfinite: dict[str, int] = defaultdict(int)
        self._sums: dict[str, list[float]] = defaultdict(list)
        loop = copy.copy(args)
        loop.num_train_epochs = 1.0  # the sampler holds every adapter's passes
        loop._n_gpu = min(loop.n_gpu, 1)  # pyright: ignore[reportPrivateUsage] has no setter; one device, no copies of the model
        with _settings_refused():
            super().__init__(
                model=model,
                args=loop,
                train_dataset=self.turns,
                data_collator=Collator(args.pack_tokens, share=share_prefixes),
                callbacks=[_FiniteGradients(self), *callbacks],
            )
        self.remove_callback(PrinterCallback)

    def _send_telemetry(self) -> None:
        """Nothing is sent home."""

    # -- data ------------------------------------------------------------------------------

    def sampler(self) -> AgentBlockSampler:
        """The order of rows; its length is the whole run, so the loop makes one epoch of it."""
        args = self.config
        world = self.accelerator.num_processes
        return AgentBlockSampler(
            self.turns.rows,
            self.turns.fillers,
            [turn.length for turn in self.turns.turns],
            block=args.per_device_train_batch_size * args.gradient_accumulation_steps * world,
            epochs=args.num_train_epochs,
            seed=args.seed,
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> AgentBlockSampler:
        return self.sampler()

    # -- one step --------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> Any:
        """All adapters are in the optimizer; the steps narrow gradients to one at a time."""
        self._peft.set_requires_grad(self.turns.adapters, True)
        with _settings_refused():
            return super().create_optimizer(model)

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """The schedule of ``lr_scheduler_type``."""
        with _settings_refused():
            return super().create_scheduler(*args, **kwargs)

    @property
    def _peft(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    def _activate(self, adapter: str) -> None:
        peft = self._peft
        if peft.active_adapters != [adapter] or any(
            parameter.requires_grad != (f".{adapter}." in name)
            for name, parameter in peft.named_parameters()
            if ".lora_" in name
        ):
            peft.set_adapter(adapter)

    def training_step(
        self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Backward over the packs of one micro-batch, each freed before the next is scored."""
        batch: Batch = inputs["batch"]
        self._activate(batch.adapter)
        model.train(self.args.gradient_checkpointing)
        total = torch.zeros((), device=self.args.device)
        for i, pack in enumerate(batch.packs):
            last = i + 1 == len(batch.packs)
            with contextlib.nullcontext() if last else self.accelerator.no_sync(model):
                loss = self.compute_loss(model, {"batch": batch, "pack": pack})
                if not math.isfinite(float(loss)):
                    self.count_nonfinite(batch.adapter, "loss")
                    continue
                self.accelerator.backward(loss / self.current_gradient_accumulation_steps)
            total = total + loss.detach()
        self._sums[f"{batch.adapter}/loss"].append(float(total))
        return total / self.current_gradient_accumulation_steps

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        batch, pack = inputs["batch"], inputs["pack"]
        temperature_B = [batch.temperature_B[row] for row in pack.rows]
        scores = score(model, pack, temperature_B, entropy=True)
        mean_logp_B = scores.mean_B(len(pack.rows))
        weight_B = torch.tensor(
            [batch.weight_B[row] for row in pack.rows], device=mean_logp_B.device
        )
        self._sums[f"{batch.adapter}/logp"] += mean_logp_B.tolist()
        self._sums[f"{batch.adapter}/weight_mean"] += weight_B.tolist()
        if scores.entropy is not None:
            self._sums[f"{batch.adapter}/entropy"].append(scores.entropy)
        return awr_loss(mean_logp_B, weight_B, self.args.per_device_train_batch_size)

    def count_nonfinite(self, adapter: str, what: str) -> None:
        """Count a step that was skipped.

        Raises:
            TrainingError: after more of them than ``max_nonfinite_steps``.
        """
        self.nonfinite[adapter] += 1
        if self.nonfinite[adapter] > self.config.max_nonfinite_steps:
            raise TrainingError(
                f"adapter {adapter!r}: {self.nonfinite[adapter]} steps gave a {what} that is not"
                f" finite (limit {self.config.max_nonfinite_steps}); nothing was published."
                f" Lower learning_rate (now {self.args.learning_rate:g}) or use dtype: float32"
            )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Metrics of the steps since the last log, per adapter."""
        means = {name: math.fsum(v) / len(v) for name, v in self._sums.items() if v}
        self._sums.clear()
        super().log({**logs, **means}, start_time)


class _FiniteGradients(TrainerCallback):
    """Drops a step whose gradient is not finite before Adam sees it."""

    def __init__(self, trainer: MarftTrainer) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if grads and not all(bool(torch.isfinite(grad).all()) for grad in grads):
            for parameter in model.parameters():
                parameter.grad = None
            adapters = self._trainer.accelerator.unwrap_model(model).active_adapters
            self._trainer.count_nonfinite(adapters[0], "gradient")
