"""Losses against numbers worked out by hand, and plain PPO written a second time."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from marft_agents.credit import action_gae, compound_factors
from marft_agents.errors import TrainingError
from marft_agents.training.batch import Batch, TrainRow
from marft_agents.training.losses import (
    action_log_ratio,
    clip_fractions,
    clipped_surrogate,
    importance_weights,
    kl_to_reference,
)
from marft_agents.training.objective import Scale, awr_pack
from marft_agents.training.packing import pack_turns
from marft_agents.training.scoring import Scores, score

CASES = Path(__file__).parents[1] / "cases"
ROW_T = torch.tensor([0, 0, 0, 1])


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def logs(*values: float) -> Tensor:
    return t(*values).log()


# -- advantage-weighted regression and ratios --------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "expected"),
    [(([0.5], [2.0]), (0.5 * 2 + 2 * 4) / 4), (([0.5, 1.0, 0.0], [2.0]), (2.5 / 3 + 2 * 4) / 4)],
    ids=["action", "token"],
)
def test_regression_is_the_weighted_mean_over_a_full_block(
    weights: tuple[list[float], list[float]], expected: float
) -> None:
    """Two rows of a block of four: log-probabilities -1, -2, -3 and -4."""
    rows = [
        TrainRow("a", str(b), [1], [5] * n, [-1.0] * n, 1.0, n, [0.0], weights[b], b, 0)
        for b, n in enumerate((3, 1))
    ]
    batch = Batch("awr", 0, rows, [["a"]], {}, {})
    logp_T = t(-1, -2, -3, -4).requires_grad_()
    pack = awr_pack(batch, [0, 1], Scores(logp_T, ROW_T, None), Scale(4, 2.0))
    pack.loss.backward()
    assert pack.loss.item() == pytest.approx(expected)
    first = weights[0] * 3 if len(weights[0]) == 1 else weights[0]
    assert logp_T.grad is not None
    assert logp_T.grad.tolist() == pytest.approx([*(-w / 3 / 4 for w in first), -2 / 4])
    assert pack.sums["logp"] == (-6.0, 2)


@pytest.mark.parametrize(
    ("count", "expected"),
    [((3, 1), (0.2, -0.5)), ((2, 1), (0.3, -0.5)), ((1, 1), (0.6, -0.5))],
    ids=["token", "word", "sum"],
)
def test_action_log_ratio_by_tokens_words_and_sum(
    count: tuple[int, int], expected: tuple[float, float]
) -> None:
    got = action_log_ratio(t(0.1, 0.2, 0.3, -0.5), ROW_T, torch.tensor(count))
    assert got.tolist() == pytest.approx(expected)


def test_action_log_ratio_does_not_depend_on_the_order_of_tokens() -> None:
    mixed = action_log_ratio(t(-0.5, 0.3, 0.1, 0.2), torch.tensor([1, 0, 0, 0]), t(3, 1))
    assert mixed.tolist() == pytest.approx([0.2, -0.5])


# -- clipping ----------------------------------------------------------------------------------

RATIOS = (0.5, 1.5, 0.5, 1.5, 1.0, 1.0)
SIGNS = (1.0, 1.0, -1.0, -1.0, 1.0, -1.0)


def test_clipped_surrogate_by_hand() -> None:
    got = clipped_surrogate(logs(*RATIOS), t(*SIGNS), 0.2, 0.3)
    assert got.tolist() == pytest.approx([0.5, 1.3, -0.8, -1.5, 1, -1])


def test_clipping_ends_the_gradient_only_where_it_would_overshoot() -> None:
    log_ratio = logs(*RATIOS).requires_grad_()
    clipped_surrogate(log_ratio, t(*SIGNS), 0.2, 0.3).sum().backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad.tolist() == pytest.approx([0.5, 0, 0, -1.5, 1, -1])


def test_clip_fractions_count_what_is_held() -> None:
    assert clip_fractions(logs(*RATIOS), t(*SIGNS), 0.2, 0.3) == pytest.approx((1 / 6, 1 / 6))
    assert clip_fractions(logs(1.25), t(1), 0.2, 0.3) == (0, 0), "up to 1.3 it may move"
    assert clip_fractions(t(), t(), 0.2, 0.2) == (0, 0)


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("extreme", [1e4, -1e4, math.inf, -math.inf])
def test_extreme_ratios_stay_finite_with_their_gradient(extreme: float, advantage: float) -> None:
    log_ratio = torch.tensor([extreme, 0.0], requires_grad=True)
    value = clipped_surrogate(log_ratio, torch.tensor([advantage, advantage]), 0.2, 0.2)
    value.sum().backward()
    assert log_ratio.grad is not None
    assert bool(value.isfinite().all()) and bool(log_ratio.grad.isfinite().all())
    assert log_ratio.grad[1] == advantage, "the other rows are trained as ever"


def test_not_a_number_is_not_hidden() -> None:
    assert clipped_surrogate(t(math.nan), t(1), 0.2, 0.2).isnan().all()
    assert kl_to_reference(t(math.nan), t(0)).isnan().all()


# -- tabular case 8: one agent is plain PPO ----------------------------------------------------

Array = NDArray[np.float64]


class PlainPPO:
    """PPO with GAE for one agent: linear algebra and derivatives by hand, no autograd.

    A policy is a table of logits (S, V); an action is one to three tokens, each sampled in a
    state of its own, and its probability is their product.
    """

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.size, vocabulary = 30, 5
        self.row = np.repeat(np.arange(self.size), rng.integers(1, 4, self.size))
        self.old = rng.normal(size=(len(self.row), vocabulary))
        self.new = self.old + 0.25 * rng.normal(size=self.old.shape)
        self.token = rng.integers(0, vocabulary, len(self.row))
        self.reward, self.value = rng.normal(size=(2, self.size))
        self.final = float(rng.normal())
        self.gamma, self.lam, self.epsilon = 0.97, 0.9, 0.2

    def advantage(self) -> Array:
        """(I - gamma λ S) Â = r + gamma S V - V with S the shift to the next step."""
        shift = np.eye(self.size, k=1)
        delta = self.reward + self.gamma * shift @ self.value - self.value
        delta[-1] += self.gamma * self.final
        return np.linalg.solve(np.eye(self.size) - self.gamma * self.lam * shift, delta)

    @staticmethod
    def softmax(logits: Array) -> Array:
        power = np.exp(logits - logits.max(axis=1, keepdims=True))
        return power / power.sum(axis=1, keepdims=True)

    def loss_and_gradient(self) -> tuple[float, Array, int]:
        """The clipped loss, its derivative by the new logits, and how many rows are held."""
        place = (np.arange(len(self.token)), self.token)
        new, old = self.softmax(self.new), self.softmax(self.old)
        advantage, loss, held = self.advantage(), 0.0, 0
        gradient = np.zeros_like(self.new)
        for n in range(self.size):
            mine = self.row == n
            ratio = float(np.prod(new[place][mine]) / np.prod(old[place][mine]))
            sign = math.copysign(1, advantage[n])
            bound = 1 + sign * self.epsilon
            inside = sign * ratio < sign * bound
            loss -= (ratio if inside else bound) * advantage[n] / self.size
            held += not inside
            if inside:
                onehot = np.eye(new.shape[1])[self.token[mine]]
                gradient[mine] = -ratio * advantage[n] / self.size * (onehot - new[mine])
        return loss, gradient, held


@pytest.mark.parametrize("seed", range(20))
def test_tabular_8_one_agent_has_loss_and_gradient_of_plain_ppo(seed: int) -> None:
    ppo = PlainPPO(seed)
    expected_loss, expected_gradient, held = ppo.loss_and_gradient()
    assert 0 < held < ppo.size, "both sides of the clip take part"

    steps = list(range(ppo.size))
    credit = action_gae(
        ppo.reward.tolist(),
        ppo.value.tolist(),
        steps,
        gamma=ppo.gamma,
        lam=ppo.lam,
        final_value=ppo.final,
    )
    factors = compound_factors([None] * ppo.size, [[] for _ in steps], steps, limit=2)
    advantage_B = t(*(m * a for m, a in zip(factors, credit.advantage_K, strict=True)))
    assert advantage_B.numpy() == pytest.approx(ppo.advantage(), abs=1e-9)

    logits = torch.tensor(ppo.new, requires_grad=True)
    token_T = torch.tensor(ppo.token)[:, None]
    logp_T = logits.log_softmax(-1).gather(1, token_T)[:, 0]
    old_T = torch.tensor(ppo.old).log_softmax(-1).gather(1, token_T)[:, 0]
    log_ratio_B = action_log_ratio(
        logp_T - old_T, torch.tensor(ppo.row), torch.ones(ppo.size, dtype=torch.float64)
    )
    loss = -clipped_surrogate(log_ratio_B, advantage_B, ppo.epsilon, ppo.epsilon).mean()
    loss.backward()
    assert logits.grad is not None
    assert loss.item() == pytest.approx(expected_loss, abs=1e-9)
    assert logits.grad.numpy() == pytest.approx(expected_gradient, abs=1e-9)
    low, high = clip_fractions(log_ratio_B, advantage_B, ppo.epsilon, ppo.epsilon)
    assert low + high == pytest.approx(held / ppo.size)


# -- case 17: log-probabilities at the sampling temperature ------------------------------------


@dataclass(frozen=True)
class Piece:
    prompt_ids: list[int]
    token_ids: list[int]


class ThreeLogits:
    """A model that answers every question with the same three logits."""

    device = torch.device("cpu")

    def __init__(self, logits: list[float]) -> None:
        self._logits = torch.tensor(logits)

    def __call__(self, *, logits_to_keep: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self._logits.expand(1, len(logits_to_keep), 3))


def test_case_17_the_ratio_is_one_only_at_the_temperature_of_sampling() -> None:
    case = json.loads((CASES / "17-temperature.json").read_text())
    (pack,) = pack_turns([Piece([1, 1], [case["sampled"]])], 64, share=True)
    model = ThreeLogits(case["logits"])

    def ratio(behaviour: float, scored_at: float) -> float:
        logp_T = score(model, pack, [scored_at]).logp_T
        one = torch.ones(1)
        return action_log_ratio(logp_T - behaviour, torch.tensor([0]), one).exp().item()

    tempered, raw, at = case["logprob_T05"], case["logprob_T1"], case["temperature"]
    assert ratio(tempered, at) == pytest.approx(1, abs=1e-3)
    assert ratio(raw, 1.0) == pytest.approx(1, abs=1e-3)
    assert ratio(tempered, 1.0) == pytest.approx(case["ratio_if_mixed"], abs=1e-3)
    assert ratio(raw, at) == pytest.approx(1 / case["ratio_if_mixed"], abs=1e-3)


# -- case 25: the reference of the KL term -----------------------------------------------------


def test_case_25_kl_is_zero_to_the_adapter_of_the_start_and_not_to_the_base() -> None:
    case = json.loads((CASES / "25-kl-reference.json").read_text())
    start, base = t(*case["logp_starting_adapter"]), t(*case["logp_base"])
    at_start = kl_to_reference(start, start.clone())
    assert at_start.tolist() == [0, 0, 0]
    assert at_start.mean().item() == case["want_step0"]["k3"]
    wanted = case["if_base_is_reference"]
    assert (start - base).mean().item() == pytest.approx(wanted["mean_diff"], abs=5e-5)
    assert kl_to_reference(start, base).mean().item() == pytest.approx(wanted["k3"], abs=5e-5)


def test_kl_pulls_towards_the_reference_and_not_at_it() -> None:
    logp = t(-1, -2, -3).requires_grad_()
    reference = t(-2, -2, -1).requires_grad_()
    value = kl_to_reference(logp, reference)
    value.sum().backward()
    assert value.tolist() == pytest.approx([math.exp(-1), 0, math.exp(2) - 3])
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([1 - math.exp(-1), 0, 1 - math.exp(2)])
    assert reference.grad is None, "the reference is never trained"


def test_kl_is_never_negative_near_zero_and_finite_far_away() -> None:
    near = torch.linspace(-1e-3, 1e-3, 2001)
    assert float(kl_to_reference(torch.zeros(2001), near).min()) >= 0
    assert bool(kl_to_reference(torch.zeros(2), torch.tensor([1e4, -math.inf])).isfinite().all())


# -- importance weights ------------------------------------------------------------------------

OLD_T = logs(0.9, 0.2, 0.5, 0.3)
BEHAVIOUR_T = logs(0.3, 0.4, 0.5, 0.4)  # ratios 3, 0.5, 1 (product 1.5) and 0.75


@pytest.mark.parametrize(
    ("mode", "clip_max", "clip_min", "expected"),
    [
        ("token_truncate", 2.0, None, [2, 0.5, 1, 0.75]),
        ("token_truncate", 2.0, 0.8, [2, 0.8, 1, 0.8]),
        ("token_truncate", None, None, [3, 0.5, 1, 0.75]),
        ("token_mask", 2.0, None, [0, 0.5, 1, 0.75]),
        ("token_mask", 2.0, 0.6, [0, 0, 1, 0.75]),
        ("sequence_truncate", 2.0, None, [1.5, 1.5, 1.5, 0.75]),
        ("sequence_truncate", 1.2, 0.8, [1.2, 1.2, 1.2, 0.8]),
        ("sequence_mask", 2.0, 0.8, [1.5, 1.5, 1.5, 0]),
        ("sequence_mask", 1.2, None, [0, 0, 0, 0.75]),
        ("none", 2.0, None, [1, 1, 1, 1]),
    ],
)
def test_importance_weights_by_hand(
    mode: str, clip_max: float | None, clip_min: float | None, expected: list[float]
) -> None:
    old = OLD_T.clone().requires_grad_()
    got = importance_weights(
        old, BEHAVIOUR_T, ROW_T, 2, mode=mode, clip_max=clip_max, clip_min=clip_min
    )
    assert got.tolist() == pytest.approx(expected)
    assert not got.requires_grad, "a weight is no way to the parameters"


def test_unchanged_weights_need_no_correction() -> None:
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        got = importance_weights(OLD_T, OLD_T, ROW_T, 2, mode=mode, clip_max=2)
        assert got.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("missing", [-9999.0, -math.inf])
def test_a_placeholder_gives_a_finite_weight(missing: float) -> None:
    behaviour = t(-1, missing, -1, -1)
    for mode, expected in (("token_truncate", 2), ("token_mask", 0)):
        got = importance_weights(t(-1, -1, -1, -1), behaviour, ROW_T, 2, mode=mode, clip_max=2)
        assert got.tolist() == [1, expected, 1, 1]
    unbounded = importance_weights(
        t(-1, -math.inf, -1, -1), t(-1, -1, -1, missing), ROW_T, 2,
        mode="sequence_truncate", clip_max=None,
    )  # fmt: skip
    assert bool(unbounded.isfinite().all())
    nowhere = t(-1, -math.inf, -1, -1)
    got = importance_weights(nowhere, behaviour, ROW_T, 2, mode="token_truncate", clip_max=2)
    assert got.tolist() == [1, 1, 1, 1], "neither policy gives it: nothing to correct"


def test_a_missing_log_probability_is_never_a_weight_of_one() -> None:
    with pytest.raises(TrainingError, match="1 of 4 log-probabilities are not numbers"):
        importance_weights(
            OLD_T, t(-1, math.nan, -1, -1), ROW_T, 2, mode="token_truncate", clip_max=2
        )


@pytest.mark.parametrize("mode", ["token", "turn_mask", "token_cut"])
def test_an_unknown_correction_is_refused(mode: str) -> None:
    with pytest.raises(ValueError, match="unknown correction"):
        importance_weights(OLD_T, BEHAVIOUR_T, ROW_T, 2, mode=mode, clip_max=2)
