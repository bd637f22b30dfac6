"""The optimizer steps, on TRL's base trainer.

Invariants: an optimizer step moves exactly one adapter; the others have no gradient, so neither
momentum nor weight decay touches them and they stay bit-identical. Each adapter has its own Adam
state and its own gradient clip. A step whose loss or gradient is not finite changes nothing and is
counted. All processes take the same step: rows are dealt out, gradients are summed.

Loop, Adam, clipping, logging and tracking are TRL's and transformers'. What is trained on next
comes from a generator: each ``yield`` of a ``Block`` is one optimizer step, and the code between
two of them runs between two steps.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, SequentialSampler
from transformers import PrinterCallback, TrainerCallback
from transformers.trainer_utils import SaveStrategy

from marft_agents.errors import ConfigError, TrainingError
from marft_agents.training._trl import BaseTrainer
from marft_agents.training.adapters import is_of
from marft_agents.training.batch import Batch
from marft_agents.training.config import MarftConfig
from marft_agents.training.objective import PackLoss, Scale, awr_pack, ppo_pack
from marft_agents.training.packing import pack_turns
from marft_agents.training.schedule import Block
from marft_agents.training.scoring import score

_SLOTS = 1 << 40
"""More steps than any run takes: the generator decides when it is over."""


class _Slots(Dataset[int]):
    """What the loop counts: it has no rows, they come with the block."""

    def __len__(self) -> int:
        return _SLOTS

    def __getitem__(self, index: int) -> int:
        return 0


def _collate(_slots: Sequence[int]) -> dict[str, Any]:
    return {}


@contextlib.contextmanager
def _settings_refused() -> Generator[None]:
    """What the loop says of a setting that it cannot carry out, as a ``ConfigError``."""
    try:
        yield
    except (ValueError, ImportError, RuntimeError) as error:
        raise ConfigError(f"a setting was refused: {str(error).splitlines()[0]}") from error


@dataclass
class StepReport:
    """What one optimizer step did, over all processes."""

    adapter: str
    finite: bool
    means: dict[str, float] = field(default_factory=dict[str, float])


class MarftTrainer(BaseTrainer):
    """Takes the steps that a program asks for."""

    _tag_names = ["marft-agents", "trl"]  # noqa: RUF012 an instance-free list by TRL's convention
    _name = "MARFT"
    loss_is_scaled_for_ga = False

    def __init__(
        self,
        model: Any,
        args: MarftConfig,
        adapters: Sequence[str],
        *,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        self.config = args
        self.adapters = list(adapters)
        self.share_prefixes = True
        self.rates: dict[str, float] = {}
        """Step size per adapter, of the stage that is running."""
        self.rate_factor = 1.0
        """Where the schedule is."""
        self.clip_scale = 1.0
        """Halved by a guard: scales the clip range."""
        self.steps_before = 0
        """Steps of the run that this process did not take (resumed)."""
        self.batch: Batch | None = None
        self.last = StepReport("", True)
        self.nonfinite: dict[str, int] = defaultdict(int)
        self.metrics: dict[str, float] = {}
        """Last logged value of every metric."""
        self.tokens_scored = 0
        self._block: Block | None = None
        self._program: Iterator[Block] = iter(())
        self._sums: dict[str, list[float]] = {}
        with _settings_refused():
            super().__init__(
                model=model,
                args=_loop_args(args),
                train_dataset=_Slots(),
                data_collator=_collate,
                callbacks=[_Steps(self), *callbacks],
            )
        self.remove_callback(PrinterCallback)
        prepare: Any = self.accelerator.prepare_model
        # no process wraps the model: gradients are summed by `_reduce`
        self.accelerator.prepare_model = functools.partial(prepare, evaluation_mode=True)

    def _send_telemetry(self) -> None:
        """Nothing is sent home."""

    def run(self, program: Iterator[Block]) -> None:
        """Take a step for every block of the program."""
        self._program = program
        self.state.global_step = self.steps_before
        if self.advance():
            self.train()

    def report(self, metrics: Mapping[str, float], step: int) -> None:
        """Log what another trainer did at a step of the run."""
        self.state.global_step = step
        self.log(dict(metrics))

    @property
    def block(self) -> Block:
        """What the next step trains on."""
        if self._block is None:
            raise TrainingError("a step was asked for after the end of the program")
        return self._block

    def advance(self) -> bool:
        """Let the program go on to its next block; whether there is one."""
        self._block = next(self._program, None)
        return self._block is not None

    # -- what the loop asks for ------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(_Slots())

    def create_optimizer(self, model: Any = None) -> Any:
        """AdamW over every adapter, a parameter group (with and without decay) each."""
        if self.optimizer is None:
            with _settings_refused():
                kind, settings = self.get_optimizer_cls_and_kwargs(self.args, self._peft)
                self.optimizer = kind(self._groups(), **settings)
        self._peft.requires_grad_(False)
        return self.optimizer

    def _groups(self) -> list[dict[str, Any]]:
        return [
            {
                "params": [p for _, p in self.parameters_of(adapter)],
                "adapter": adapter,
                "weight_decay": self.args.weight_decay,
                "lr": self.config.of_adapter(adapter, "learning_rate"),
            }
            for adapter in self.adapters
        ]

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Step sizes are set by each step; the loop's own schedule stands still."""
        optimizer: Any = self.optimizer
        self.lr_scheduler = LambdaLR(optimizer, lambda _: 1.0)
        return self.lr_scheduler

    @property
    def _peft(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    def parameters_of(self, adapter: str) -> list[tuple[str, torch.nn.Parameter]]:
        """Name and parameter of every tensor of one adapter."""
        return [(n, p) for n, p in self._peft.named_parameters() if is_of(n, adapter)]

    def _activate(self, adapter: str) -> None:
        peft = self._peft
        if peft.active_adapters != [adapter] or any(
            parameter.requires_grad != is_of(name, adapter)
            for name, parameter in peft.named_parameters()
            if ".lora_" in name
        ):
            peft.set_adapter(adapter)

    # -- one step --------------------------------------------------------------------------

    @property
    def epsilon(self) -> tuple[float, float]:
        """Clip range downwards and upwards, as it is now."""
        config = self.config
        high = config.epsilon if config.epsilon_high is None else config.epsilon_high
        return config.epsilon * self.clip_scale, high * self.clip_scale

    def training_step(
        self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Backward over this process's packs, each freed before the next is scored."""
        block, batch = self.block, self.batch
        if batch is None:
            raise TrainingError("a block was given before its batch")
        self._activate(block.adapter)
        model.train(self.args.gradient_checkpointing)
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        mine = block.rows[rank::world]
        scale = Scale(block.size, batch.mean_length(block.adapter))
        sums: dict[str, tuple[float, float]] = {}
        total, finite = torch.zeros((), device=self.args.device), True
        turns = [batch.rows[i] for i in mine]
        for pack in pack_turns(turns, self.config.pack_tokens, share=self.share_prefixes):
            part = self._pack_loss(model, batch, pack, [mine[r] for r in pack.rows], scale)
            self.tokens_scored += len(pack.ids)
            finite = finite and math.isfinite(float(part.loss))
            if finite:
                self.accelerator.backward(part.loss)
            total = total + part.loss.detach()
            for name, (value, count) in part.sums.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + value, before[1] + count)
        self._finish_step(block, batch, float(total), finite, sums)
        self._set_rates()
        return torch.zeros((), device=self.args.device) + self.last.means.get("loss", 0.0)

    def _pack_loss(
        self, model: Any, batch: Batch, pack: Any, rows: Sequence[int], scale: Scale
    ) -> PackLoss:
        ppo = batch.objective == "ppo"
        entropy = "trained" if ppo and self.config.entropy_coef else "measured"
        temperature_B = [batch.rows[i].temperature for i in rows]
        scores = score(model, pack, temperature_B, entropy=entropy)
        if ppo:
            return ppo_pack(batch, rows, scores, scale, self.config, self.epsilon)
        return awr_pack(batch, rows, scores, scale)

    def _finish_step(
        self,
        block: Block,
        batch: Batch,
        loss: float,
        finite: bool,
        sums: Mapping[str, tuple[float, float]],
    ) -> None:
        """Sum over processes; drop the step where something is not finite."""
        parameters = [p for _, p in self.parameters_of(block.adapter)]
        facts = self._reduce(parameters, {"loss": (loss, 0.0), "bad": (not finite, 0.0), **sums})
        bad = facts.pop("bad")[0] > 0
        what = "loss"
        grads = [p.grad for p in parameters if p.grad is not None]
        if not bad and not all(bool(grad.isfinite().all()) for grad in grads):
            bad, what = True, "gradient"
        if bad:
            for parameter in parameters:
                parameter.grad = None
        means = {name: v / n for name, (v, n) in facts.items() if n}
        means["loss"] = facts["loss"][0]
        self.last = StepReport(block.adapter, not bad, means)
        if bad:
            self._count_nonfinite(block, batch, what)
            return
        means["learning_rate"] = self.rates.get(block.adapter, 0.0) * self.rate_factor
        for name, value in means.items():
            self._sums.setdefault(f"{block.adapter}/{name}", []).append(value)

    def _reduce(
        self,
        parameters: Sequence[torch.nn.Parameter],
        facts: Mapping[str, tuple[float, float]],
    ) -> dict[str, tuple[float, float]]:
        """Gradients and sums over all processes.

        One flat sum of one adapter's gradient, by hand: a process that holds no row of a block adds
        nothing and waits for nobody, and adapters that are not trained take no part.
        """
        if self.accelerator.num_processes == 1:
            return dict(facts)
        gathered: Any = [None] * self.accelerator.num_processes
        torch.distributed.all_gather_object(gathered, dict(facts))
        flat = torch.cat([
            (torch.zeros_like(p) if p.grad is None else p.grad).flatten().float()
            for p in parameters
        ])  # fmt: skip
        torch.distributed.all_reduce(flat)
        parts = flat.split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype).clone()
        out: dict[str, tuple[float, float]] = {}
        for one in gathered:
            for name, (value, count) in one.items():
                before = out.get(name, (0.0, 0.0))
                out[name] = (before[0] + value, before[1] + count)
        return out

    def _set_rates(self) -> None:
        """The step size of every adapter, before Adam moves."""
        optimizer: Any = self.optimizer
        for group in optimizer.param_groups:
            adapter = group["adapter"]
            group["lr"] = self.rates.get(adapter, 0.0) * self.rate_factor

    def _count_nonfinite(self, block: Block, batch: Batch, what: str) -> None:
        """Count a step that was skipped; its turns are written down for whoever looks for it.

        Raises:
            TrainingError: after more of them than ``max_nonfinite_steps``.
        """
        adapter = block.adapter
        self.nonfinite[adapter] += 1
        name = ""
        if self.accelerator.is_main_process:
            turns = [batch.rows[i].turn_id for i in block.rows]
            handle, name = tempfile.mkstemp(prefix=f"marft-nonfinite-{adapter}-", suffix=".json")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"what": what, "turns": turns}, file)
        if self.nonfinite[adapter] > self.config.max_nonfinite_steps:
            raise TrainingError(
                f"adapter {adapter!r}: {self.nonfinite[adapter]} steps gave a {what} that is not"
                f" finite (limit {self.config.max_nonfinite_steps}; the turns of the last one:"
                f" {name}); nothing was published. Lower learning_rate (now"
                f" {self.rates.get(adapter, 0.0):g}) or use dtype: float32"
            )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Metrics of the steps since the last log, per adapter."""
        means = {name: math.fsum(v) / len(v) for name, v in self._sums.items() if v}
        self._sums.clear()
        self.metrics |= means
        kept = {k: v for k, v in logs.items() if k not in ("epoch", "learning_rate")}
        super().log({**kept, **means}, start_time)


def _loop_args(config: MarftConfig) -> MarftConfig:
    """Settings for the loop, which counts steps and nothing else."""
    loop = copy.copy(config)
    loop.num_train_epochs = 1.0
    loop.max_steps = -1
    loop.per_device_train_batch_size = 1
    loop.gradient_accumulation_steps = 1  # a block is whole; packs bound the memory
    loop.save_strategy = SaveStrategy.NO
    loop._n_gpu = min(loop.n_gpu, 1)  # pyright: ignore[reportPrivateUsage] has no setter; one device, no copies of the model
    return loop


class _Steps(TrainerCallback):
    """Lets the program go on after every step, and ends the loop with it."""

    def __init__(self, trainer: MarftTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.global_step = self._trainer.steps_before

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._trainer.advance():
            control.should_training_stop = True
            control.should_log = True
