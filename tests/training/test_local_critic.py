"""Each agent's own critic: it reads what the agent was shown, and nothing else."""

from __future__ import annotations

import copy
import dataclasses
from array import array
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from marft_agents.credit import independent_gae, own_turns
from marft_agents.errors import ConfigError
from marft_agents.training.chains import Discounts, lambda_returns, make_links
from marft_agents.training.config import MarftConfig
from marft_agents.training.critic import CriticReport
from marft_agents.training.dataset import EpisodeView, TurnRow
from marft_agents.training.features import Reader, Text
from marft_agents.training.local_critic import LocalCritics, own_chain
from tests.training.synthetic import TinyModel

AGENTS = ["router", "writer", "router"]
DISCOUNTS = Discounts(0.9, 0.8, 0.7, 0.6)


@pytest.fixture(scope="module")
def model(tiny: TinyModel) -> Any:
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    return get_peft_model(copy.deepcopy(tiny.model), lora, adapter_name="router").eval()


def critics(model: Any, tiny: TinyModel, **settings: Any) -> LocalCritics:
    given: dict[str, Any] = {"critic_epochs": 60, "critic_folds": 2, "critic_learning_rate": 5e-3}
    config = MarftConfig(use_cpu=True, estimator="ippo", **(given | settings))
    return LocalCritics(model, tiny.tokenizer, config, share=True, window=512)


def view(n: int, reward: float, *, truncated: bool = False, name: str = "e") -> EpisodeView:
    return EpisodeView(
        episode_id=f"{name}{n}",
        task=None,
        agents_K=AGENTS,
        turn_ids_K=[f"{name}{n}.{k}" for k in range(3)],
        steps_K=[0, 0, 1],
        team_reward_K=[0.0, 0.0, reward],
        own_reward_K=[0.0, 0.0, 0.0],
        depends_K=[[], [0], [1]],
        truncated=truncated,
        lines=[],
    )


def row(tiny: TinyModel, n: int, k: int, text: str) -> TurnRow:
    prompt = tiny.prompt_ids([{"role": "user", "content": f"{k} customer {n % 4} {text}"}])
    ids = tiny.reply_ids(" team")
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
    """Only the router's prompts tell the reward."""
    rewards = [float(n % 3 == 0) for n in range(count)]
    episodes = [view(n, r, truncated=truncated, name=name) for n, r in enumerate(rewards)]
    rows = [
        row(tiny, n, k, ("billing" if r else "no") if k != 1 else "")
        for n, r in enumerate(rewards)
        for k in range(3)
    ]
    return episodes, rows


def errors(report: CriticReport, episodes: list[EpisodeView], k: int) -> float:
    pairs = zip(report.values, episodes, strict=True)
    return sum(abs(v.values_K[k] - e.team_reward_K[2]) for v, e in pairs) / len(episodes)


def test_an_agent_knows_what_its_own_prompts_tell(model: Any, tiny: TinyModel) -> None:
    episodes, rows = team(tiny, 24)
    report = critics(model, tiny).evaluate(episodes, rows, seed=0)
    assert errors(report, episodes, 0) < 0.25 and errors(report, episodes, 2) < 0.25
    assert errors(report, episodes, 1) > 0.4
    assert 0.3 < report.explained_variance < 0.95
    assert all(v.values_KL is None for v in report.values)
    assert all(v.final_by_agent == {} for v in report.values)
    assert "2 agents' own, read 72 prompts" in report.lines[0]


def test_what_others_were_shown_changes_nothing(model: Any, tiny: TinyModel) -> None:
    episodes, rows = team(tiny, 8)
    before = critics(model, tiny).evaluate(episodes, rows, seed=0)
    changed = [
        dataclasses.replace(r, prompt_ids=array("q", [5, 6, 7])) if r.k == 1 else r for r in rows
    ]
    after = critics(model, tiny).evaluate(episodes, changed, seed=0)
    for one, other in zip(before.values, after.values, strict=True):
        assert [one.values_K[k] for k in (0, 2)] == [other.values_K[k] for k in (0, 2)]


def test_no_episodes_values_know_its_own_reward(model: Any, tiny: TinyModel) -> None:
    episodes, rows = team(tiny, 6)
    kept: list[list[float]] = []
    others: list[list[float]] = []
    for reward in (0.0, 50.0):
        episodes[2].team_reward_K[2] = reward
        report = critics(model, tiny).evaluate(episodes, rows, seed=1)
        kept.append(report.values[2].values_K)
        others.append(report.values[1].values_K)
    assert max(abs(a - b) for a, b in zip(*kept, strict=True)) < 1
    assert max(abs(a - b) for a, b in zip(*others, strict=True)) > 2


def test_token_values_and_a_truncated_end(model: Any, tiny: TinyModel) -> None:
    episodes, rows = team(tiny, 8, truncated=True)
    report = critics(model, tiny, level="token").evaluate(episodes, rows, seed=0)
    for values in report.values:
        assert values.values_KL is not None and values.final_by_agent is not None
        assert [len(v) for v in values.values_KL] == [len(rows[0].token_ids)] * 3
        assert set(values.final_by_agent) == {"router", "writer"}


def test_states_are_those_of_the_agents_own_tokens(model: Any, tiny: TinyModel) -> None:
    episode = view(0, 1.0, truncated=True)
    rows = [row(tiny, 0, k, "billing") for k in range(3)]
    mine = [rows[0], None, rows[2]]
    own = own_chain(0, 0, episode, mine, "router", DISCOUNTS, True)
    size = len(rows[0].token_ids)
    assert own.index == [0, 2] and own.length == [size, size] and own.chain.rows == 2 * size + 1
    states = Reader(model, True, 512, 1000).read(own.chain.texts)
    reader = Reader(model, False, 512, 1)
    wanted = [[*r.prompt_ids, *r.token_ids[:j]] for r in (rows[0], rows[2]) for j in range(size)]
    wanted.append([*rows[2].prompt_ids, *rows[2].token_ids])
    for state, ids in zip(states, wanted, strict=True):
        alone = reader.read([Text(ids, [len(ids) - 1])])[0]
        assert torch.allclose(state, alone, atol=1e-4)


def test_a_turn_without_a_prompt_is_worth_what_follows_it(tiny: TinyModel) -> None:
    episode = view(0, 1.0)
    rows: list[TurnRow | None] = [None, None, row(tiny, 0, 2, "")]
    own = own_chain(0, 0, episode, rows, "router", DISCOUNTS, False)
    assert own.chain.rows == 1 and own.kept == [1]
    assert own.values_NL([0.4]) == [[pytest.approx(0.9 * 0.4)], [0.4]]
    rows = [row(tiny, 0, 0, ""), None, None]
    own = own_chain(0, 0, episode, rows, "router", DISCOUNTS, False)
    assert own.values_NL([0.4]) == [[0.4], [1.0]]
    assert own.chain.links.reward_P == [pytest.approx(0.9)]


def test_links_give_the_advantages_of_the_agents_own_recursion() -> None:
    episode = view(0, 1.0)
    values_K = [0.3, -0.2, 0.6]
    credit = independent_gae(
        AGENTS,
        episode.team_reward_K,
        episode.own_reward_K,
        values_K,
        episode.steps_K,
        gamma=0.9,
        lam=0.8,
    )
    for agent in ("router", "writer"):
        own = own_turns(AGENTS, episode.team_reward_K, episode.own_reward_K, episode.steps_K, agent)
        links = make_links(own.reward, own.steps, [1] * len(own.index), DISCOUNTS)
        returns = lambda_returns(links, [values_K[k] for k in own.index], 0.0)
        assert returns == pytest.approx([credit.return_K[k] for k in own.index])


def test_saved_critics_continue_bit_for_bit(model: Any, tiny: TinyModel) -> None:
    one = critics(model, tiny)
    one.evaluate(*team(tiny, 6), seed=0)
    state = one.state()
    assert {name.rpartition("/")[0] for name in state} == {"router", "writer"}
    other = critics(model, tiny)
    other.load_state(state)
    now = team(tiny, 6, name="later")
    assert one.evaluate(*now, seed=1).values == other.evaluate(*now, seed=1).values
    assert all(torch.equal(t, other.state()[name]) for name, t in one.state().items())


def test_states_and_settings_that_do_not_fit_are_refused(model: Any, tiny: TinyModel) -> None:
    one = critics(model, tiny)
    one.evaluate(*team(tiny, 6), seed=0)
    state = one.state()
    with pytest.raises(ConfigError, match="belongs to no agent"):
        one.load_state({"fits": torch.tensor(1)})
    with pytest.raises(ConfigError, match=r"shape \[64\] there and shape \[8\] here"):
        critics(model, tiny, critic_hidden=8).load_state(state)
    with pytest.raises(ConfigError, match="use critic: head"):
        critics(model, tiny, critic="lora")


def test_an_agent_nobody_recorded_gets_zeros(model: Any, tiny: TinyModel) -> None:
    episodes, rows = team(tiny, 6)
    report = critics(model, tiny).evaluate(episodes, [r for r in rows if r.k != 1], seed=0)
    assert all(v.values_K[1] == 0 for v in report.values)
    assert "1 agents' own" in report.lines[0]
