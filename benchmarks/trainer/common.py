"""What all variants have in common, and how they are timed.

Invariant: every variant sees the same prompts and replies, takes one step per agent, with the same
rank and the same Adam, in float32 on the CPU. A step that is not timed warms it up. Timed
are the whole update (values, old log-probabilities, steps) and, beside it, the steps alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marft_agents.schema import Episode, Turn

RANK, ALPHA, RATE = 8, 16, 1e-4
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
VARIANTS = ("ours-ppo", "ours-awr", "grpo", "copies")


now = time.process_time
"""Seconds of processor time: what else runs on the machine hardly changes them."""


@dataclass(frozen=True)
class Timed:
    """Seconds of one whole update and of its steps; tokens of the turns, prompts included."""

    tokens: int
    seconds: float
    step_seconds: float


@dataclass
class Clock:
    """Adds up the time spent inside a function."""

    seconds: float = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = now()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += now() - started

        return timed


def turns_of(episodes: Sequence[Episode], agent: str | None = None) -> list[Turn]:
    return [t for e in episodes for t in e.turns if agent is None or t.agent == agent]


def token_count(episodes: Sequence[Episode]) -> int:
    return sum(len(t.prompt_token_ids or ()) + len(t.token_ids or ()) for t in turns_of(episodes))


def padded(rows: Sequence[Sequence[int]], pad: int, *, left: bool) -> tuple[Tensor, Tensor]:
    """Ids and mask (B, T)."""
    width = max(len(row) for row in rows)
    blank = [[pad] * (width - len(row)) for row in rows]
    ids = [b + list(r) if left else list(r) + b for b, r in zip(blank, rows, strict=True)]
    mask = [[0] * len(b) + [1] * len(r) for b, r in zip(blank, rows, strict=True)]
    ones = mask if left else [m[::-1] for m in mask]
    return torch.tensor(ids), torch.tensor(ones)
