"""Whether the adapter that answers is the one that was trained.

Invariant: an adapter passes only on numbers that the engine served. A trained one must answer
otherwise than the base does; when the trainer left its own log-probabilities, the served ones must
equal them and be nearer to them than to the base's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from marft_agents.errors import SwapError
from marft_agents.schema import Probe

TOLERANCE = 1e-2
MIN_EFFECT = 1e-4
_ANOTHER_MODEL = 0.5
"""Nats; half precision makes less of a difference."""
_BASELINE_TOKENS = 24


@dataclass(frozen=True)
class Baseline:
    """The base's own log-probabilities (L,) on fixed tokens (L + 1,), taken before traffic."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class ProbeReport:
    """What a probe measured; all numbers are largest absolute differences of log-probabilities."""

    against: Literal["trainer", "base"]
    tokens: int
    error: float | None
    """Served against the trainer's; ``None`` when the trainer left none."""
    effect: float
    """Served against the base's."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def baseline_tokens(vocab_size: int) -> tuple[int, ...]:
    """Fixed token ids spread over the vocabulary."""
    step = max(1, vocab_size // 97)
    return tuple((3 + 31 * i * step) % vocab_size for i in range(_BASELINE_TOKENS))


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return max((abs(a - b) for a, b in zip(one, other, strict=True)), default=0.0)


def _check_finite(name: str, served: Sequence[float]) -> None:
    if not all(math.isfinite(x) for x in served):
        raise SwapError(f"{name} answers with log-probabilities that are not finite: {served[:8]}")


def check_probe_makes_sense(name: str, probe: Probe, *, untrained: bool) -> None:
    """Refuse a manifest's probe that could not tell the adapter from the base.

    Raises:
        SwapError: before anything is loaded.
    """
    lengths = {len(probe.token_ids), len(probe.logprobs), len(probe.base_logprobs)}
    if len(lengths) != 1 or not probe.token_ids or not probe.prompt_token_ids:
        raise SwapError(
            f"the probe of {name} has {len(probe.prompt_token_ids)} prompt ids,"
            f" {len(probe.token_ids)} ids, {len(probe.logprobs)} and {len(probe.base_logprobs)}"
            " log-probabilities; it needs a prompt and equal lengths, publish it again"
        )
    effect = _distance(probe.logprobs, probe.base_logprobs)
    if not untrained and not effect > MIN_EFFECT:
        raise SwapError(
            f"{name} has no effect: by its own probe it differs from the base by {effect:.1e} at"
            f" most (needed: more than {MIN_EFFECT:.0e}); the training changed nothing"
        )


def judge_against_trainer(
    name: str,
    probe: Probe,
    served: Sequence[float],
    *,
    untrained: bool,
    tolerance: float = TOLERANCE,
) -> ProbeReport:
    """Compare served log-probabilities (L,) with the trainer's.

    Raises:
        SwapError: with the measured difference.
    """
    _check_finite(name, served)
    error = _distance(served, probe.logprobs)
    effect = _distance(served, probe.base_logprobs)
    if error > tolerance:
        raise SwapError(
            f"{name} does not answer as it was trained: log-probabilities differ by up to"
            f" {error:.3g} (allowed: {tolerance:g}); from the base's they differ by {effect:.3g}."
            f" {_likely_cause(error, effect)}"
        )
    if not untrained and not (effect > MIN_EFFECT and error < effect):
        raise SwapError(
            f"{name} answers as the base does: log-probabilities differ from the base's by"
            f" {effect:.1e} and from the trainer's by {error:.1e}; the adapter is not applied"
        )
    return ProbeReport("trainer", len(served), error, effect)


def _likely_cause(error: float, effect: float) -> str:
    if min(error, effect) > _ANOTHER_MODEL:
        return (
            "So does an engine that runs another base model than the one it was trained on:"
            " start the engine with the weights that --model names"
        )
    return "An engine in half precision needs a higher --probe-tolerance"


def judge_against_base(
    name: str,
    baseline: Baseline,
    served: Sequence[float],
    *,
    untrained: bool,
    tolerance: float = TOLERANCE,
) -> ProbeReport:
    """Compare served log-probabilities (L,) with the base's, for a manifest without a probe.

    Raises:
        SwapError: when a trained adapter has no effect, or an untrained one has any.
    """
    _check_finite(name, served)
    effect = _distance(served, baseline.logprobs)
    if untrained and effect > tolerance:
        raise SwapError(
            f"{name} is untrained and must answer as the base does, yet log-probabilities differ"
            f" by {effect:.3g}"
        )
    if not untrained and not effect > MIN_EFFECT:
        raise SwapError(
            f"{name} answers as the base does (log-probabilities differ by {effect:.1e});"
            " the adapter is not applied"
        )
    return ProbeReport("base", len(served), None, effect)
