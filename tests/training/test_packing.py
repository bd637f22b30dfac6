"""Turns scored together must be scored as if alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MistralConfig, MistralForCausalLM

from marft_agents.training._quiet import quiet
from marft_agents.training.packing import Pack, pack_turns
from marft_agents.training.scoring import score, score_turns, sharing_is_exact, tree_mask
from tests.training.synthetic import TinyModel


@dataclass(frozen=True)
class Piece:
    prompt_ids: list[int]
    token_ids: list[int]


SMALL = st.lists(st.integers(0, 2), min_size=1, max_size=6)
PIECES = st.lists(st.builds(Piece, SMALL, SMALL), min_size=1, max_size=6)
TURNS = [
    Piece([1, 40, 41, 42], [50, 51, 2]),
    Piece([1, 40, 41, 43], [50, 2]),
    Piece([1, 40, 41, 42], [50, 52, 53, 2]),
    Piece([1, 60], [61]),
    Piece([1, 40, 41, 42, 50], [51, 2]),
]


def ancestors(pack: Pack, node: int) -> list[int]:
    """Nodes from the root to ``node``, read from the mask."""
    return tree_mask(pack)[node].nonzero().flatten().tolist()


@settings(deadline=None)
@given(PIECES, st.integers(1, 20))
def test_every_turn_is_a_path_of_the_tree(pieces: list[Piece], limit: int) -> None:
    packs = pack_turns(pieces, limit)
    assert sorted(row for pack in packs for row in pack.rows) == list(range(len(pieces)))
    for pack in packs:
        assert len(pack.ids) <= limit or len(pack.rows) == 1
        for row, predictors, targets in zip(pack.rows, pack.predictors, pack.targets, strict=True):
            piece = pieces[row]
            assert targets == piece.token_ids
            path = ancestors(pack, predictors[-1])
            assert [pack.ids[n] for n in path] == [*piece.prompt_ids, *piece.token_ids[:-1]]
            assert [pack.depth[n] for n in path] == list(range(len(path)))
            assert predictors == path[len(piece.prompt_ids) - 1 :]


@settings(deadline=None)
@given(PIECES)
def test_no_prefix_is_there_twice(pieces: list[Piece]) -> None:
    pack = pack_turns(pieces, 1000)[0]
    paths = [tuple(pack.ids[n] for n in ancestors(pack, node)) for node in range(len(pack.ids))]
    assert len(paths) == len(set(paths))


def test_common_prompts_are_computed_once() -> None:
    assert len(pack_turns(TURNS, 1000)[0].ids) == 1 + 3 + 2 + 2 + 2 + 1
    assert [len(p.ids) for p in pack_turns(TURNS, 1000, share=False)] == [6, 7, 6, 5, 2]


@pytest.mark.parametrize("limit", [4, 8, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_scores_equal_those_of_a_plain_forward_pass(
    tiny: TinyModel, limit: int, temperature: float
) -> None:
    got = score_turns(tiny.model, TURNS, [temperature] * len(TURNS), pack_tokens=limit, share=True)
    for piece, logps in zip(TURNS, got, strict=True):
        alone = tiny.logprobs(piece.prompt_ids, piece.token_ids, temperature)
        assert logps == pytest.approx(alone, abs=2e-4)


def test_case_10_pad_and_end_token_are_seen_in_prompts_and_scored_in_replies(
    tiny: TinyModel,
) -> None:
    """Case 10: id 2 pads, ends and closes turns; a plain pass that sees everything agrees."""
    assert tiny.tokenizer.pad_token_id == tiny.tokenizer.eos_token_id == 2
    turns = [Piece([1, 40, 2, 1, 41], [50, 2]), Piece([1, 40, 2, 1, 42], [2])]
    turns.append(Piece([1, 40, 2, 1, 41], [50, 51, 52]))
    got = score_turns(tiny.model, turns, [1.0] * 3, pack_tokens=1000, share=True)
    assert [len(logps) for logps in got] == [2, 1, 3]
    for piece, logps in zip(turns, got, strict=True):
        alone = tiny.logprobs(piece.prompt_ids, piece.token_ids)
        assert logps == pytest.approx(alone, abs=2e-4)


def test_each_turn_has_its_own_temperature(tiny: TinyModel) -> None:
    got = score_turns(tiny.model, TURNS[:2], [0.5, 2.0], pack_tokens=1000, share=True)
    for piece, logps, temperature in zip(TURNS, got, (0.5, 2.0), strict=False):
        assert logps == pytest.approx(
            tiny.logprobs(piece.prompt_ids, piece.token_ids, temperature), abs=2e-4
        )


def test_gradients_equal_those_of_single_turns(tiny: TinyModel) -> None:
    weight = tiny.model.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    grads: list[torch.Tensor] = []
    for share in (True, False):
        weight.grad = None
        for pack in pack_turns(TURNS, 1000, share=share):
            score(tiny.model, pack, [1.0] * len(pack.rows)).mean_B(len(pack.rows)).sum().backward()
        assert weight.grad is not None
        grads.append(weight.grad.clone())
    weight.grad = None
    weight.requires_grad_(False)
    assert torch.allclose(grads[0], grads[1], atol=1e-4)


def test_sharing_is_tried_out_on_the_model(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sharing_is_exact(tiny.model, TURNS, 100)
    assert not sharing_is_exact(tiny.model, [TURNS[0]] * 3, 100), "nothing was tried"
    assert not sharing_is_exact(tiny.model, TURNS, 4)

    def plain_causal(pack: Pack) -> torch.Tensor:
        return torch.ones(len(pack.ids), len(pack.ids), dtype=torch.bool).tril()

    monkeypatch.setattr("marft_agents.training.scoring.tree_mask", plain_causal)
    assert not sharing_is_exact(tiny.model, TURNS, 100)


def test_a_sliding_window_shorter_than_a_turn_is_found_out() -> None:
    shape = MistralConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=8,
        initializer_range=0.5,
    )
    with quiet():
        torch.manual_seed(0)
        model = MistralForCausalLM(shape).eval()
        model.set_attn_implementation("sdpa")
    short = [Piece([1, 2], [3]), Piece([1, 2], [4])]
    long = [Piece(list(range(n, 40)), [5, 6]) for n in (1, 2)]
    assert sharing_is_exact(model, short, 100)
    assert not sharing_is_exact(model, short + long, 100)
