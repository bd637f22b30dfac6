"""The models of one run in memory: frozen base, its adapters, tokenizer.

Invariant: loaded once, on the configuration's device; the base is frozen and shared by every
adapter. Whether prompts can share prefixes is tried out on this model, not assumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from marft_agents.training._trl import use_adapter
from marft_agents.training.adapters import (
    attach_adapters,
    base_dtype,
    load_base,
    load_tokenizer,
)
from marft_agents.training.config import MarftConfig
from marft_agents.training.effect import Before, EffectMeter, Measured
from marft_agents.training.packing import Scorable
from marft_agents.training.plan import context_length
from marft_agents.training.processes import Processes
from marft_agents.training.scoring import score_turns, sharing_is_exact

T = TypeVar("T")


class Session:
    """One base model with one trainable adapter per name.

    Args:
        model_dir: the base's folder.
        folders: adapter name to the folder it starts from.
    """

    def __init__(
        self,
        model_dir: Path,
        folders: Mapping[str, Path],
        config: MarftConfig,
        say: Callable[[str], None] = print,
    ) -> None:
        started = time.monotonic()
        self.config, self.say, self.model_dir = config, say, model_dir
        self.adapters = list(folders)
        self.device: torch.device = config.device
        base = load_base(
            model_dir,
            base_dtype(config.dtype, self.device),
            self.device,
            four_bit=config.load_in_4bit,
        )
        self.tokenizer = load_tokenizer(model_dir)
        self.model: Any = attach_adapters(base, folders)
        self.context = context_length(model_dir) or 1 << 30
        self._share: bool | None = None
        self.processes = Processes.of(config)
        say(
            f"loaded {model_dir.name} with {', '.join(folders)} on {self.device.type}"
            f" in {time.monotonic() - started:.0f} s"
        )

    @property
    def is_main(self) -> bool:
        """Whether this process speaks and writes."""
        return self.processes.is_main

    @property
    def world(self) -> int:
        """Processes of this run."""
        return self.processes.world

    @property
    def share(self) -> bool:
        """Whether packs may share prefixes; known once ``try_sharing`` has seen turns."""
        return bool(self._share)

    def try_sharing(self, rows: Sequence[Scorable]) -> None:
        """Find out, once, whether this model scores turns in a tree as it scores them alone."""
        if self._share is not None:
            return
        self._share = sharing_is_exact(self.model, rows, self.config.pack_tokens)
        if not self._share:
            self.say("note: no shared prefixes with this model or log; turns are scored one by one")

    def score(
        self, rows: Sequence[Measured], adapter: str | None, temperature: float | None = None
    ) -> list[list[float]]:
        """Log-probabilities (L,) of every row under an adapter (``None``: the base).

        At the rows' own temperatures, or at the one given. The rows are dealt out to the processes.
        """
        mine = list(rows[self.processes.rank :: self.world])
        at = [row.temperature if temperature is None else temperature for row in mine]
        with use_adapter(self.model, adapter):
            scored = score_turns(
                self.model, mine, at, pack_tokens=self.config.pack_tokens, share=self.share
            )
        out: list[list[float]] = [[] for _ in rows]
        for rank, part in enumerate(self.processes.gather(scored)):
            out[rank :: self.world] = part
        return out

    def meter(
        self,
        adapter: str,
        good: Sequence[Measured],
        bad: Sequence[Measured],
        before: Before | None = None,
    ) -> EffectMeter:
        """Measures an adapter's best and worst turns, now and later."""
        return EffectMeter(
            self.model,
            adapter,
            good,
            bad,
            pack_tokens=self.config.pack_tokens,
            share=self.share,
            before=before,
        )

    def from_main(self, value: Any) -> Any:
        """The main process's value, in every process."""
        return self.processes.from_main(value)

    def on_main(self, work: Callable[[], T]) -> T:
        """What work gives that the main process does alone, or raises, in every process."""
        return self.processes.on_main(work)
