"""Hidden states at places: those of the text before them, however they are read."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from marft_agents.training.features import Reader, Text, adapter_alone, cut, windows
from tests.training.synthetic import TinyModel

IDS = [3 + (7 * n) % 300 for n in range(90)]
TEXTS = [
    Text(IDS[:30], [4, 29, 12]),
    Text([5, *IDS[:20]], [20]),
    Text([*IDS[:25], 9, 9, 9], [24, 27]),
    Text(IDS[:10], []),
    Text(IDS[40:80], [0, 39]),
]


@pytest.fixture(scope="module")
def model(tiny: TinyModel) -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft = get_peft_model(copy.deepcopy(tiny.model), config, adapter_name="one")
    peft.add_adapter("two", config)
    peft.set_adapter("one")
    return peft.eval()


@torch.no_grad()
def alone(backbone: Any, ids: Sequence[int]) -> Tensor:
    return backbone(torch.tensor([list(ids)])).last_hidden_state[0, -1]


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("tokens", [1, 40, 1000])
def test_a_state_is_that_of_the_text_before_its_place(
    model: Any, tiny: TinyModel, share: bool, tokens: int
) -> None:
    states = Reader(model, share, 512, tokens).read(TEXTS)
    wanted = [text.ids[: place + 1] for text in TEXTS for place in text.places]
    assert len(states) == len(wanted)
    for state, ids in zip(states, wanted, strict=True):
        assert torch.allclose(state, alone(tiny.model.model, ids), atol=1e-4)


def test_later_text_changes_no_earlier_state(model: Any) -> None:
    reader = Reader(model, False, 512, 1)
    before = reader.read([Text(IDS[:40], [10, 20])])
    after = reader.read([Text([*IDS[:21], *range(100, 130)], [10, 20, 50])])
    assert torch.allclose(after[:2], before, atol=1e-5)


def test_an_adapter_can_be_read_with_and_everything_is_as_it_was(model: Any) -> None:
    model.set_requires_grad(["one", "two"], True)
    wanted = {name: p.requires_grad for name, p in model.named_parameters()}
    assert any(".two." in name and on for name, on in wanted.items())
    reader = Reader(model, True, 512, 1000)
    bare, two = reader.read(TEXTS), reader.read(TEXTS, "two")
    assert not torch.allclose(bare, two, atol=1e-3)
    assert model.active_adapter == "one"
    assert {name: p.requires_grad for name, p in model.named_parameters()} == wanted
    with pytest.raises(RuntimeError), adapter_alone(model, "two"):
        raise RuntimeError
    assert model.active_adapter == "one"
    assert {name: p.requires_grad for name, p in model.named_parameters()} == wanted


def test_windows_cover_every_token_once_with_text_before_it() -> None:
    for length in range(1, 60):
        served: list[int] = []
        for start, end, first in windows(length, 10):
            assert end - start <= 10 and (first == 0 or first - start >= 5)
            served += range(first, end)
        assert served == list(range(length))


def test_a_text_longer_than_the_window_is_read_in_windows(model: Any, tiny: TinyModel) -> None:
    places = [6, 52, *range(60, 90)]
    pieces = list(cut([Text(IDS, places)], 20))
    assert sorted(row for piece in pieces for row in piece.rows) == list(range(len(places)))
    states = Reader(model, True, 20, 1000).read([Text(IDS, places)])
    assert torch.allclose(states[0], alone(tiny.model.model, IDS[:7]), atol=1e-4)
    both = Reader(model, True, 20, 1000).read([Text(IDS, places), Text(IDS, [3, 70])])
    assert torch.allclose(both[: len(places)], states, atol=1e-4)
    assert torch.allclose(both[-1], states[places.index(70)], atol=1e-4)
    starts = {row: IDS.index(piece.prompt_ids[0]) for piece in pieces for row in piece.rows}
    for row, place in enumerate(places):
        window = IDS[starts[row] : place + 1]
        assert len(window) >= min(place + 1, 10)
        assert torch.allclose(states[row], alone(tiny.model.model, window), atol=1e-4)


def test_common_beginnings_are_read_once(model: Any) -> None:
    pair = [Text(IDS[:50], [49]), Text([*IDS[:49], 7], [49])]
    assert [len(group) for group in Reader(model, True, 512, 51).groups(pair)] == [2]
    assert [len(group) for group in Reader(model, True, 512, 50).groups(pair)] == [1, 1]
    assert [len(group) for group in Reader(model, False, 512, 51).groups(pair)] == [1, 1]
