"""Reported log-probabilities are those of the distribution that was sampled."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# reason: transformers ships no complete types
from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from marft_agents.serving.local.protocol import Settings
from marft_agents.serving.local.sampling import (
    draw,
    generator_for,
    processed_logprobs,
    sample,
    score,
)

VOCAB = 50
CASES = [
    Settings(9),
    Settings(9, temperature=0.7),
    Settings(9, temperature=1.3, top_p=0.9),
    Settings(9, temperature=0.8, top_k=10),
    Settings(9, top_k=5, top_p=0.6),
    Settings(9, top_k=10 * VOCAB),
    Settings(9, min_p=0.1, temperature=0.9),
    Settings(9, top_p=1e-6),
    Settings(9, temperature=0.0, top_k=3, top_p=0.5, min_p=0.5),
]


def _logits(rows: int) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(7))


def _expected(logits: torch.Tensor, s: Settings) -> torch.Tensor:
    if s.greedy:
        return torch.log_softmax(logits, -1)
    wrappers: list[Any] = [TemperatureLogitsWarper(s.temperature)] if s.temperature != 1 else []
    wrappers += [MinPLogitsWarper(s.min_p)] if s.min_p else []
    wrappers += [TopKLogitsWarper(s.top_k)] if s.top_k else []
    wrappers += [TopPLogitsWarper(s.top_p)] if s.top_p < 1 else []
    row = logits[None]
    for wrapper in wrappers:
        row = wrapper(torch.zeros(1, 1, dtype=torch.long), row)
    return torch.log_softmax(row[0], -1)


def test_a_mixed_batch_equals_transformers_row_by_row() -> None:
    logits = _logits(len(CASES))
    got = processed_logprobs(logits, CASES)
    for row, settings in enumerate(CASES):
        torch.testing.assert_close(got[row], _expected(logits[row], settings), atol=1e-5, rtol=0)


def test_the_input_is_left_alone() -> None:
    logits = _logits(len(CASES))
    before = logits.clone()
    processed_logprobs(logits, CASES)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("settings", [CASES[1], CASES[4]])
def test_draws_follow_the_distribution(settings: Settings) -> None:
    count = 4000
    logprobs = processed_logprobs(_logits(1).expand(count, -1), [settings] * count)
    generators = [generator_for(seed) for seed in range(count)]
    tokens = draw(logprobs, [settings] * count, generators)
    seen = torch.bincount(tokens, minlength=VOCAB) / count
    probs = logprobs[0].exp()
    assert float((seen - probs).abs().max()) < 0.04
    assert float(seen[probs == 0].sum()) == 0.0


def test_a_row_draws_the_same_in_any_batch() -> None:
    logits = _logits(4)
    settings = [Settings(9, temperature=0.9)] * 4
    alone = sample(logits[2:3], settings[:1], [generator_for(5)])[0]
    mates = [generator_for(seed) for seed in (1, None, 5, 9)]
    assert sample(logits, settings, mates)[2] == alone


def test_the_logprob_is_the_chosen_tokens_and_tops_are_sorted() -> None:
    settings = [Settings(9, temperature=0.7, top_k=4, top_logprobs=3)]
    got = sample(_logits(1), settings, [generator_for(0)])[0]
    assert got is not None
    assert got.logprob == processed_logprobs(_logits(1), settings)[0, got.token_id].item()
    values = [value for _, value in got.top]
    assert len(values) == 3 and values == sorted(values, reverse=True)


def test_logits_that_are_not_numbers_give_no_token() -> None:
    logits = _logits(2)
    logits[1, 3] = float("nan")
    good, bad = sample(logits, [Settings(9)] * 2, [generator_for(1), generator_for(1)])
    assert good is not None and bad is None


def test_scores_are_raw_with_one_based_ranks() -> None:
    logits = _logits(2)
    best = int(logits[0].argmax())
    worst = int(logits[1].argmin())
    first, second = score(logits, [best, worst], 2)
    assert (first.rank, second.rank) == (1, VOCAB)
    assert first.top[0] == (best, first.logprob)
    assert first.logprob == pytest.approx(torch.log_softmax(logits[0], -1)[best].item())
