"""A critic with a LoRA adapter of its own on the shared base, trained together with its head.

Invariant: while this critic reads or learns, its adapter is the only one active; the agents'
adapters and the base are afterwards what they were, bit for bit. Its tensors live here by name and
are laid into the model for as long as they are needed, so that critics of several folds share one
place in it.

A fit first fits the head on the states as they are (a head that knows nothing would spoil them),
then goes over the texts once for every ``_HEAD_PASSES`` passes of the head and trains both.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn

from marft_agents.training.config import MarftConfig
from marft_agents.training.cross_fitting import Shelf, parts, read_chains
from marft_agents.training.features import (
    Piece,
    Reader,
    adapter_alone,
    flags_kept,
    read_group,
)
from marft_agents.training.named_state import (
    adam_shapes,
    adam_state,
    load_adam_state,
    require_shapes,
)
from marft_agents.training.value_head import CriticSettings, HeadFit, Read, draw, targets

CRITIC_ADAPTER = "marft-critic"
_HEAD_PASSES = 20
_ROWS = 64
"""Fewest rows of one optimizer step."""


def add_critic_adapter(model: Any, config: MarftConfig) -> dict[str, nn.Parameter]:
    """The parameters of the critic's adapter by plain name; it is made when it is not there yet."""
    if CRITIC_ADAPTER not in model.peft_config:
        lora = LoraConfig(
            r=config.critic_rank,
            lora_alpha=2 * config.critic_rank,
            target_modules=list(config.lora_target_modules),
            task_type="CAUSAL_LM",
        )
        with flags_kept(model), torch.random.fork_rng(devices=[]):
            active = model.active_adapter
            model.add_adapter(CRITIC_ADAPTER, lora)
            model.set_adapter(active)
        model.eval()
    mark = f".{CRITIC_ADAPTER}."
    return {
        name.replace(mark, "."): parameter
        for name, parameter in model.named_parameters()
        if mark in name
    }


def fresh_tensors(parameters: Mapping[str, nn.Parameter], seed: int) -> dict[str, Tensor]:
    """A ~ U(-1/sqrt(in), 1/sqrt(in)), B = 0; on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    out: dict[str, Tensor] = {}
    for name in sorted(parameters):
        tensor = torch.zeros(parameters[name].shape)
        if "lora_A" in name:
            bound = 1 / math.sqrt(tensor.shape[-1])
            tensor.uniform_(-bound, bound, generator=generator)
        out[name] = tensor
    return out


class LoraEstimator:
    """A head and the adapter under it, with an optimizer each."""

    def __init__(self, reader: Reader, config: MarftConfig, settings: CriticSettings) -> None:
        self.reader = reader
        self.head = HeadFit(reader.width, settings)
        self._parameters = add_critic_adapter(reader.model, config)
        self._optimizer = torch.optim.AdamW(
            list(self._parameters.values()), lr=config.critic_lora_learning_rate, weight_decay=0.0
        )
        self._tensors = fresh_tensors(self._parameters, settings.seed)
        self._moments: dict[str, Tensor] = {}

    @property
    def fits(self) -> int:
        return self.head.fits

    def fit(self, shelf: Shelf, which: Sequence[int], *, epochs: int, seed: int) -> float:
        chains = [shelf.lessons[i][0] for i in which if i in shelf.lessons]
        if not chains:
            return 0.0
        with self._mounted():
            found = read_chains(self.reader, chains, CRITIC_ADAPTER)
            reads = self.head.prepare([Read(*read) for read in found])
            self.head.train(reads, epochs=epochs, seed=seed)
            passes = max(1, epochs // _HEAD_PASSES)
            return self._train(reads, passes, torch.Generator().manual_seed(seed))

    def values(self, shelf: Shelf, which: Sequence[int]) -> Iterator[tuple[int, list[float]]]:
        with self._mounted():
            for part in parts(shelf.chains, which, shelf.limit):
                chains = [shelf.chains[i] for i in part]
                read = read_chains(self.reader, chains, CRITIC_ADAPTER)
                for i, (_, features) in zip(part, read, strict=True):
                    yield i, self.head.values(features).tolist()

    def _train(self, reads: Sequence[Read], passes: int, generator: torch.Generator) -> float:
        """Head and adapter together; a pass's targets are from the values of the one before."""
        reads = draw(reads, generator)
        features = torch.cat([read.features for read in reads])
        values = self.head.values(features)
        old = None if self.head.anchor is None else self.head.anchor(features).detach()
        texts = [text for read in reads for text in read.chain.texts]
        packs = list(self.reader.groups(texts))
        loss = 0.0
        with adapter_alone(self.reader.model, CRITIC_ADAPTER) as backbone:
            for _ in range(passes):
                target, weight = _all_rows(reads, values)
                losses: list[float] = []
                order = torch.randperm(len(packs), generator=generator).tolist()
                for batch in _batches([packs[i] for i in order]):
                    losses.append(self._learn(backbone, batch, values, target, weight, old))
                loss = math.fsum(losses) / len(target)
        return loss

    def _learn(
        self,
        backbone: Any,
        batch: Sequence[Sequence[Piece]],
        values: Tensor,
        target: Tensor,
        weight: Tensor,
        old: Tensor | None,
    ) -> float:
        """One optimizer step; notes the values in ``values``. Returns the summed loss."""
        count = sum(len(piece.rows) for pack in batch for piece in pack)
        self._optimizer.zero_grad()
        self.head.optimizer.zero_grad()
        total = 0.0
        for pack in batch:
            rows, hidden = read_group(backbone, pack)
            value = self.head.head(hidden)
            values[rows] = self.head.bounded(value.detach())
            bound = None if old is None else old[rows]
            loss = self.head.loss(value, target[rows], weight[rows], bound) * (len(rows) / count)
            loss.backward()
            total += float(loss.detach()) * count
        parameters = [*self.head.head.parameters(), *self._parameters.values()]
        nn.utils.clip_grad_norm_(parameters, self.head.settings.max_grad_norm)
        self._optimizer.step()
        self.head.optimizer.step()
        return total

    @contextmanager
    def _mounted(self) -> Generator[None]:
        """This critic's tensors and moments in the model, and taken out again."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(self._tensors[name])
        load_adam_state(self._optimizer, self._parameters, self._moments)
        try:
            yield
        finally:
            self._tensors = {
                name: parameter.detach().to("cpu", torch.float32, copy=True)
                for name, parameter in self._parameters.items()
            }
            self._moments = adam_state(self._optimizer, self._parameters)
            self._optimizer.state.clear()
            self._optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """The head's state, and the adapter's tensors and moments under ``lora.``."""
        own = {**self._tensors, **self._moments}
        return self.head.state() | {
            f"lora.{name}": tensor.contiguous().clone() for name, tensor in own.items()
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state; see ``HeadFit.load_state``."""
        head = {name: t for name, t in state.items() if not name.startswith("lora.")}
        own = {name[5:]: t for name, t in state.items() if name.startswith("lora.")}
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        moments = adam_shapes(self._parameters) if int(state.get("fits", torch.tensor(0))) else {}
        require_shapes(own, shapes | moments)
        self.head.load_state(head)
        self._tensors = {name: own[name].clone() for name in shapes}
        self._moments = {name: own[name].clone() for name in moments}


def _all_rows(reads: Sequence[Read], values: Tensor) -> tuple[Tensor, Tensor]:
    """Target and weight (mean 1) of every row; one without a target weighs nothing."""
    current: list[float] = values.tolist()
    target: list[float] = []
    weight: list[float] = []
    start = 0
    for read in reads:
        t, w = targets(read.chain, current[start : start + read.chain.rows], read.final)
        last = [0.0] * int(read.chain.final)
        target += t + last
        weight += w + last
        start += read.chain.rows
    weights = torch.tensor(weight)
    return torch.tensor(target), weights / weights.mean()


def _batches(packs: Sequence[list[Piece]]) -> Iterator[list[list[Piece]]]:
    """Packs of at least ``_ROWS`` rows together, if there are so many."""
    batch: list[list[Piece]] = []
    rows = 0
    for pack in packs:
        batch.append(pack)
        rows += sum(len(piece.rows) for piece in pack)
        if rows >= _ROWS:
            yield batch
            batch, rows = [], 0
    if batch:
        yield batch
