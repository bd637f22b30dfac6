"""The team's critic on a real model: its transcripts, its values, its adapter."""

from __future__ import annotations

import copy
import dataclasses
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from marft_agents.errors import ConfigError
from marft_agents.training.config import MarftConfig
from marft_agents.training.critic import CentralCritic, critic_settings, episode_chain
from marft_agents.training.dataset import EpisodeView, TurnRow
from marft_agents.training.features import Reader, Text
from marft_agents.training.lora_critic import CRITIC_ADAPTER
from marft_agents.training.transcript import Line, tokenise
from tests.training.synthetic import TinyModel

AGENTS = ("router", "writer")


def config(**settings: Any) -> MarftConfig:
    given: dict[str, Any] = {
        "critic_epochs": 20,
        "critic_update_epochs": 5,
        "critic_folds": 2,
        "critic_learning_rate": 5e-3,
    }
    return MarftConfig(use_cpu=True, **(given | settings))


@pytest.fixture
def model(tiny: TinyModel) -> Any:
    torch.manual_seed(0)
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft = get_peft_model(copy.deepcopy(tiny.model), lora, adapter_name="router")
    peft.add_adapter("writer", lora)
    peft.set_adapter("router")
    peft.set_requires_grad(["router", "writer"], True)
    return peft.eval()


def episode(n: int, reward: float, *, truncated: bool = False, name: str = "e") -> EpisodeView:
    word = "billing" if reward else "shipping"
    return EpisodeView(
        episode_id=f"{name}{n}",
        task=None,
        agents_K=list(AGENTS),
        turn_ids_K=[f"{name}{n}.{agent}" for agent in AGENTS],
        steps_K=[0, 0],
        team_reward_K=[0.0, reward],
        own_reward_K=[0.0, 0.0],
        depends_K=[[], [0]],
        truncated=truncated,
        lines=[
            Line("task", f"customer {n % 4} asks: {word}?"),
            Line("router", word, action=True),
            Line("writer", "please answer", action=True),
        ],
    )


def row(tiny: TinyModel, n: int, k: int, text: str) -> TurnRow:
    prompt = tiny.prompt_ids([{"role": "user", "content": f"{AGENTS[k]}: customer {n % 4} {text}"}])
    ids = tiny.reply_ids(f" {text} team")
    return TurnRow(
        episode=n,
        k=k,
        turn_id=f"e{n}.{k}",
        agent=AGENTS[k],
        prompt_ids=array("q", prompt),
        token_ids=array("q", ids),
        logprobs=array("d", [-1.0] * len(ids)),
        temperature=1.0,
        incomparable=None,
        compare_at=1.0,
        adapter=None,
    )


def team(
    tiny: TinyModel, count: int, *, truncated: bool = False, name: str = "e"
) -> tuple[list[EpisodeView], list[TurnRow]]:
    rewards = [float(n % 3 == 0) for n in range(count)]
    episodes = [episode(n, r, truncated=truncated, name=name) for n, r in enumerate(rewards)]
    rows = [
        row(tiny, n, k, "billing" if r else "no") for n, r in enumerate(rewards) for k in (0, 1)
    ]
    return episodes, rows


def critic(model: Any, tiny: TinyModel, **settings: Any) -> CentralCritic:
    return CentralCritic(model, tiny.tokenizer, config(**settings), share=True, window=512)


def parameters(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in others(model)}


def flags(model: Any) -> dict[str, bool]:
    return {name: p.requires_grad for name, p in others(model)}


def others(model: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """All parameters but the critic's; a module that gets its adapter is wrapped."""
    return [
        (name.replace(".base_layer", ""), p)
        for name, p in model.named_parameters()
        if CRITIC_ADAPTER not in name
    ]


@pytest.mark.parametrize("kind", ["head", "lora"])
def test_it_explains_returns_that_the_transcript_tells(
    model: Any, tiny: TinyModel, kind: str
) -> None:
    mine = critic(model, tiny, critic=kind, critic_epochs=60)
    report = mine.evaluate(*team(tiny, 24), seed=0)
    assert report.explained_variance > 0.6
    assert len(report.values) == 24 and all(len(v.values_K) == 2 for v in report.values)
    assert all(v.values_KL is None and v.final_value == 0 for v in report.values)
    assert 0.5 < report.largest_value < 2 and 0 <= report.loss < 0.5
    assert "24 transcripts" in report.lines[0]


@pytest.mark.parametrize("kind", ["head", "lora"])
def test_agents_adapters_and_base_stay_as_they_were(model: Any, tiny: TinyModel, kind: str) -> None:
    before, trainable = parameters(model), flags(model)
    mine = critic(model, tiny, critic=kind, level="token")
    for _ in range(2):
        mine.evaluate(*team(tiny, 6), seed=0)
    assert model.active_adapter == "router" and flags(model) == trainable
    after = parameters(model)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not any(p.requires_grad for n, p in model.named_parameters() if CRITIC_ADAPTER in n)


@pytest.mark.parametrize("kind", ["head", "lora"])
def test_no_episodes_values_know_its_own_reward(model: Any, tiny: TinyModel, kind: str) -> None:
    episodes, rows = team(tiny, 6)
    earlier = team(tiny, 6, name="earlier")
    values: list[list[list[float]]] = []
    for reward in (0.0, 50.0):
        mine = critic(model, tiny, critic=kind)
        mine.evaluate(*earlier, seed=0)
        episodes[2].team_reward_K[1] = reward
        shrunk = mine.evaluate(episodes, rows, seed=1)
        values.append([v.values_K for v in shrunk.values])
    near = [abs(a - b) for a, b in zip(values[0][2], values[1][2], strict=True)]
    others = [abs(a - b) for a, b in zip(values[0][1], values[1][1], strict=True)]
    assert max(others) > 1
    assert max(near) < 0.5


@pytest.mark.parametrize("kind", ["head", "lora"])
@pytest.mark.parametrize("level", ["action", "token"])
def test_a_saved_critic_continues_bit_for_bit(
    model: Any, tiny: TinyModel, kind: str, level: str
) -> None:
    one = critic(model, tiny, critic=kind, level=level)
    one.evaluate(*team(tiny, 6), seed=0)
    state = {name: tensor.clone() for name, tensor in one.state().items()}
    other = critic(model, tiny, critic=kind, level=level)
    other.load_state(state)
    for seed in (1, 2):
        now = team(tiny, 6, name=f"later{seed}")
        assert one.evaluate(*now, seed=seed).values == other.evaluate(*now, seed=seed).values
    ends = [c.state() for c in (one, other)]
    assert ends[0].keys() == ends[1].keys() == state.keys()
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())
    steps = [name for name in state if name.endswith(".step")]
    assert steps and all(ends[0][name] > state[name] for name in steps)
    moved = [name for name in state if not torch.equal(state[name], ends[0][name])]
    assert any("lora_B" in name for name in moved) == (kind == "lora")


def test_a_state_of_another_kind_of_critic_is_refused(model: Any, tiny: TinyModel) -> None:
    lora, head = critic(model, tiny, critic="lora"), critic(model, tiny)
    lora.evaluate(*team(tiny, 4), seed=0)
    head.evaluate(*team(tiny, 4), seed=0)
    with pytest.raises(ConfigError, match=r"lora\..* no such tensor here"):
        head.load_state(lora.state())
    with pytest.raises(ConfigError, match="no such tensor there"):
        lora.load_state(head.state())
    larger = critic(model, tiny, critic_hidden=8)
    with pytest.raises(ConfigError, match=r"shape \[64\] there and shape \[8\] here"):
        larger.load_state(head.state())


def test_the_critics_adapter_learns_what_the_base_does_not_show(
    model: Any, tiny: TinyModel
) -> None:
    mine = critic(model, tiny, critic="lora", critic_lora_learning_rate=1e-2)
    mine.evaluate(*team(tiny, 12), seed=0)
    state = mine.state()
    assert any(float(t.abs().max()) > 0 for n, t in state.items() if n.endswith("lora_B.weight"))
    assert all(t.is_contiguous() for t in state.values())
    assert {t.dtype for t in state.values()} == {torch.float32, torch.int64}


def test_token_values_stand_before_each_sampled_token(model: Any, tiny: TinyModel) -> None:
    episodes, rows = team(tiny, 16, truncated=True)
    mine = critic(model, tiny, level="token", critic_epochs=60)
    report = mine.evaluate(episodes, rows[1:], seed=0)
    for n, values in enumerate(report.values):
        assert values.values_KL is not None and values.final_value != 0
        assert values.values_K == [values_L[0] for values_L in values.values_KL]
        wanted = [len(rows[2 * n].token_ids), len(rows[2 * n + 1].token_ids)]
        if n == 0:
            wanted[0] = 1
        assert [len(values_L) for values_L in values.values_KL] == wanted
    assert report.explained_variance > 0.5


def test_ids_outside_the_vocabulary_are_read_as_text(model: Any, tiny: TinyModel) -> None:
    episodes, rows = team(tiny, 4)
    rows[0].token_ids[0] = 10**6
    report = critic(model, tiny, level="token").evaluate(episodes, rows, seed=0)
    values_KL = report.values[0].values_KL
    assert values_KL is not None and [len(v) for v in values_KL] == [1, len(rows[1].token_ids)]


def test_the_places_of_a_chain_are_the_states_before_its_tokens() -> None:
    lines = [Line("a", "x", True), Line("b", "yes", True)]
    borders = tokenise(lines, lambda text: [ord(c) for c in text], [[901, 902, 903], None])
    seen = dataclasses.replace(episode(0, 1.0, truncated=True), lines=lines)
    chain = episode_chain(0, seen, borders, critic_settings(config()).discounts)
    (text,) = chain.texts
    ends = [list(text.ids[: place + 1])[-2:] for place in text.places]
    colon, hash_, line = map(ord, ":#\n")
    assert ends[:4] == [[ord("a"), colon], [colon, 901], [901, 902], [ord("b"), colon]]
    assert ends[4:] == [[hash_, line]] * 3
    assert text.places[4] < text.places[0] < text.places[5] < text.places[3] < text.places[6]
    assert chain.action_P == [0, 0, 0, 1] and chain.opened and chain.final


@pytest.mark.parametrize("window", [512, 24])
def test_a_value_is_that_of_the_transcript_up_to_there(
    model: Any, tiny: TinyModel, window: int
) -> None:
    """The features of one pass equal those of each prefix read alone, at every token border."""
    episodes, rows = team(tiny, 1, truncated=True)
    sampled = [r.token_ids for r in rows]
    borders = tokenise(episodes[0].lines, _encode(tiny), sampled)
    chain = episode_chain(0, episodes[0], borders, critic_settings(config()).discounts)
    (text,) = chain.texts
    assert chain.rows == len(text.places) == sum(map(len, sampled)) + 2 + 1
    reader = Reader(model, True, window, 1000)
    states = reader.read(chain.texts)
    if window == 512:
        for state, place in zip(states, text.places, strict=True):
            alone = Reader(model, False, 512, 1).read([Text(text.ids[: place + 1], [place])])[0]
            assert torch.allclose(state, alone, atol=1e-4)
    else:
        assert len(text.ids) > window and torch.isfinite(states).all()


def _encode(tiny: TinyModel) -> Callable[[str], list[int]]:
    def encode(text: str) -> list[int]:
        return tiny.tokenizer.encode(text, add_special_tokens=False)

    return encode
