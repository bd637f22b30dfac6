"""The value head: what it learns, and that no episode's values know its own reward."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

import pytest
import torch

from marft_agents.training.critic import (
    CriticSettings,
    cross_fit,
    fit_critic,
    fit_head,
    returns_to_go,
)
from marft_agents.training.dataset import EpisodeView
from marft_agents.training.features import EpisodeFeatures

SETTINGS = CriticSettings(
    hidden=16,
    epochs=30,
    learning_rate=5e-3,
    weight_decay=0.1,
    folds=4,
    gamma=1.0,
    lam=0.95,
    seed=0,
)
WIDTH = 12


def view(name: str, reward: float, size: int = 2, *, truncated: bool = False) -> EpisodeView:
    return EpisodeView(
        episode_id=name,
        task=None,
        agents_K=["a"] * size,
        turn_ids_K=[f"{name}.{k}" for k in range(size)],
        steps_K=list(range(size)),
        team_reward_K=[0.0] * (size - 1) + [reward],
        own_reward_K=[0.0] * size,
        depends_K=[list(range(k)) for k in range(size)],
        truncated=truncated,
        lines=[],
    )


def random_features(size: int, generator: torch.Generator) -> EpisodeFeatures:
    draw = torch.randn(2 * size + 1, WIDTH, generator=generator)
    return EpisodeFeatures(draw[:size], draw[size:-1], draw[-1])


def world(
    count: int, *, informative: bool, truncated: bool = False
) -> tuple[list[EpisodeView], list[EpisodeFeatures]]:
    """Episodes whose reward is written into the features, or not."""
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    episodes: list[EpisodeView] = []
    features: list[EpisodeFeatures] = []
    for n in range(count):
        reward = float(draw.random() < 0.5)
        at = random_features(2, generator)
        if informative:
            for tensor in (at.open_K, at.named_K):
                tensor[:, 0] = 3 * reward - 1.5
        episodes.append(view(f"e{n}", reward, truncated=truncated))
        features.append(at)
    return episodes, features


def test_a_critic_that_can_know_explains_the_returns() -> None:
    critic = fit_critic(*world(80, informative=True), SETTINGS)
    assert critic.explained_variance > 0.7
    assert critic.shrinkage > 0.7


def test_a_critic_that_cannot_know_becomes_a_constant_baseline() -> None:
    episodes, features = world(80, informative=False)
    critic = fit_critic(episodes, features, SETTINGS)
    assert 0 <= critic.explained_variance < 0.1
    mean = math.fsum(e.total_reward for e in episodes) / len(episodes)
    worst = max(abs(v - mean) for e in critic.values for v in e.values_K)
    assert critic.shrinkage < 0.4 and worst < 0.4


def test_no_episodes_values_know_its_own_reward() -> None:
    episodes, features = world(12, informative=True)
    before = cross_fit(episodes, features, SETTINGS)
    for i, episode in enumerate(episodes[:4]):
        changed: Sequence[EpisodeView] = [
            *episodes[:i],
            dataclasses.replace(episode, team_reward_K=[0.0, 100.0]),
            *episodes[i + 1 :],
        ]
        after = cross_fit(changed, features, SETTINGS)
        assert after[i] == before[i]
        assert after != before


def test_a_terminated_end_is_worth_nothing_and_a_truncated_one_its_transcript() -> None:
    done = fit_critic(*world(20, informative=True), SETTINGS)
    cut = fit_critic(*world(20, informative=True, truncated=True), SETTINGS)
    assert all(e.final_value == 0 for e in done.values)
    assert any(e.final_value != 0 for e in cut.values)


def test_the_head_starts_at_the_mean_return() -> None:
    episodes, features = world(20, informative=True)
    head = fit_head(episodes, features, dataclasses.replace(SETTINGS, epochs=0))
    mean = math.fsum(e.total_reward for e in episodes) / len(episodes)
    assert head(features[0].named_K).tolist() == pytest.approx([mean, mean])


def test_fitting_is_repeatable_and_leaves_the_global_seed_alone() -> None:
    state = torch.random.get_rng_state()
    runs = [fit_critic(*world(12, informative=True), SETTINGS) for _ in range(2)]
    assert runs[0].values == runs[1].values
    assert torch.equal(torch.random.get_rng_state(), state)


def test_two_episodes_are_enough() -> None:
    critic = fit_critic(*world(2, informative=False), SETTINGS)
    assert all(math.isfinite(v) for e in critic.values for v in e.values_K)


def test_returns_to_go_discount_at_environment_transitions() -> None:
    assert returns_to_go(view("e", 1.0, 3), 0.5) == [0.25, 0.5, 1.0]
