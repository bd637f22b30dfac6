"""Columns for the trainers: recorded ids, loss on replies only, references by reply."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from marft_agents.training.examples import (
    IGNORED,
    Said,
    dpo_examples,
    kto_examples,
    kto_weights,
    sft_examples,
)
from marft_agents.training.preferences import Labelled, MethodRow, Preference


def row(prompt: int, reply: int, advantage: float = 0.0) -> MethodRow:
    return MethodRow([1, prompt], [reply, 2], 0, 0.0, advantage)


def score(replies: Sequence[Said]) -> list[float]:
    """A reference that can be read off the ids."""
    assert len(set(replies)) == len(replies), "every reply is scored once"
    return [-(r.prompt_ids[-1] + r.token_ids[0] / 100) for r in replies]


def labelled(*turns: tuple[int, int, bool]) -> list[Labelled]:
    return [Labelled(row(prompt, reply), good) for prompt, reply, good in turns]


def test_every_token_of_the_reply_has_loss_and_none_of_the_prompt() -> None:
    """Pad and end token are the same id 2; nothing is masked by its id."""
    (example,) = sft_examples([MethodRow([1, 2, 3, 2], [5, 2, 6, 2], 0, 0.0)])
    assert example == {
        "input_ids": [1, 2, 3, 2, 5, 2, 6, 2],
        "labels": [IGNORED] * 4 + [5, 2, 6, 2],
    }


def test_a_pair_carries_both_replies_and_their_references() -> None:
    pairs = [
        Preference(row(7, 10), row(7, 20)),
        Preference(row(7, 10), row(7, 30)),
    ]
    one, other = dpo_examples(pairs, score)
    assert one == {
        "prompt_ids": [1, 7],
        "chosen_ids": [10, 2],
        "rejected_ids": [20, 2],
        "ref_chosen_logps": -7.1,
        "ref_rejected_logps": -7.2,
    }
    assert (other["ref_chosen_logps"], other["ref_rejected_logps"]) == (-7.1, -7.3)


def test_a_mismatched_reply_answered_another_prompt_and_is_scored_under_this_one() -> None:
    turns = labelled((3, 10, True), (3, 10, False), (4, 20, True), (4, 20, False))
    examples = kto_examples(turns, score, batch=4, seed=0)
    for example in examples:
        prompt, other = example["prompt_ids"][1], example["KL_completion_ids"][0]
        assert other == {3: 20, 4: 10}[prompt]
        assert example["ref_KL_logps"] == -(prompt + other / 100)
        assert example["ref_logps"] == -(prompt + example["completion_ids"][0] / 100)


def test_both_labels_are_spread_evenly_over_the_batches() -> None:
    turns = labelled(*[(n, 10 + n, n < 4) for n in range(12)])
    examples = kto_examples(turns, score, batch=3, seed=1)
    batches = [examples[first : first + 3] for first in range(0, 12, 3)]
    assert [sum(e["label"] for e in batch) for batch in batches] == [1, 1, 1, 1]
    assert sorted(e["prompt_ids"][1] for e in examples) == list(range(12))
    assert examples == kto_examples(turns, score, batch=3, seed=1)
    assert examples != kto_examples(turns, score, batch=3, seed=2)


def test_a_batch_of_one_at_the_end_takes_its_mismatch_from_the_others() -> None:
    turns = labelled((3, 10, True), (4, 20, False), (5, 30, True))
    last = kto_examples(turns, score, batch=2, seed=0)[-1]
    assert last["KL_completion_ids"] != last["completion_ids"]


def test_one_prompt_and_one_reply_still_give_something_to_compare_with() -> None:
    examples = kto_examples(labelled((3, 10, True), (3, 10, False)), score, batch=2, seed=0)
    assert [e["KL_completion_ids"] for e in examples] == [[10, 2], [10, 2]]
    two = kto_examples(labelled((3, 10, True), (3, 11, False)), score, batch=2, seed=0)
    assert all(e["KL_completion_ids"] != e["completion_ids"] for e in two)


def test_each_label_has_half_of_the_weight() -> None:
    turns = labelled(*[(n, 10 + n, n < 2) for n in range(8)])
    good, bad = kto_weights(turns)
    assert (2 * good, 6 * bad) == (pytest.approx(4), pytest.approx(4))
