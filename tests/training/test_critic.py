"""The critic: what it learns, and that no episode's values know its own reward."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from marft_agents.errors import ConfigError
from marft_agents.training import cross_fitting
from marft_agents.training.chains import Chain, Links
from marft_agents.training.cross_fitting import Shelf, deal
from marft_agents.training.shrinking import shrink
from marft_agents.training.value_head import HeadFit, Read, ValueHead, lessons
from tests.training.critic_worlds import (
    SETTINGS,
    WIDTH,
    names,
    new_critic,
    shrunk_values,
    values_of,
    world,
)


def with_reward(chain: Chain, reward: float) -> Chain:
    rewards = [0.0] * (chain.places - 1) + [reward]
    links = Links(rewards, chain.links.discount_P, chain.links.trace_P)
    return dataclasses.replace(chain, links=links)


@pytest.mark.parametrize("lengths", [(1, 1), (2, 12)])
def test_a_critic_that_can_know_explains_the_returns(lengths: tuple[int, ...]) -> None:
    table, chains, _ = world(80, informative=True, lengths=lengths)
    shrunk = shrunk_values(new_critic(), table, chains)
    assert shrunk.explained_variance > 0.7
    assert shrunk.shrinkage > 0.7


def test_a_critic_that_cannot_know_becomes_a_constant_baseline() -> None:
    table, chains, rewards = world(80, informative=False)
    shrunk = shrunk_values(new_critic(), table, chains)
    assert 0 <= shrunk.explained_variance < 0.1
    mean = math.fsum(rewards) / len(rewards)
    worst = max(abs(v - mean) for row in shrunk.values for v in row)
    assert shrunk.shrinkage < 0.4 and worst < 0.4


@pytest.mark.parametrize("carried", [False, True])
def test_no_episodes_values_know_its_own_reward(carried: bool) -> None:
    table, chains, _ = world(12, informative=True)
    earlier_table, earlier, _ = world(10, informative=True, seed=1)

    def evaluate(now: list[Chain]) -> list[list[float]]:
        critic = new_critic()
        if carried:
            values_of(critic, earlier_table, earlier, "earlier")
        return values_of(critic, table, now)

    before = evaluate(chains)
    for i, chain in enumerate(chains[:4]):
        after = evaluate([*chains[:i], with_reward(chain, 100.0), *chains[i + 1 :]])
        assert after[i] == before[i]
        assert after != before


def test_episodes_that_the_carried_critic_knows_are_valued_by_one_that_does_not() -> None:
    table, chains, _ = world(12, informative=False)
    first = [with_reward(chain, float(100 * n)) for n, chain in enumerate(chains)]
    values: list[list[list[float]]] = []
    for changed in (0.0, 1000.0):
        critic = new_critic()
        again = [with_reward(first[0], changed), *first[1:]]
        values_of(critic, table, again)
        values.append(values_of(critic, table, again, seed=1))
    assert values[0][0] == values[1][0]


def test_shrinking_takes_mean_and_factor_from_the_other_episodes() -> None:
    _, chains, rewards = world(6, informative=True)
    raw = [[float(n % 3)] * chain.rows for n, chain in enumerate(chains)]
    shrunk = shrink(chains, raw)
    for i, chain in enumerate(chains):
        others = rewards[:i] + rewards[i + 1 :]
        m = math.fsum(others) / len(others)
        v = [float(n % 3) for n in range(len(chains)) if n != i]
        u = math.fsum(v) / len(v)
        cross = math.fsum((x - u) * (g - m) for x, g in zip(v, others, strict=True))
        c = min(max(cross / math.fsum((x - u) ** 2 for x in v), 0.0), 1.0)
        assert shrunk.values[i] == pytest.approx([m + c * (raw[i][0] - u)] * chain.rows)
    changed = [with_reward(chains[0], 77.0), *chains[1:]]
    assert shrink(changed, raw).values[0] == shrunk.values[0]


def test_every_episode_is_held_out_once() -> None:
    for seen in ([False] * 7, [True] * 7, [True, False, True, True, False, False, True]):
        for carried in (False, True):
            folds = deal(seen, 3, carried=carried, seed=0)
            held = sorted(e for fold in folds for e in fold.held_out)
            assert held == list(range(7))
            for fold in folds:
                assert all(fold.fresh or (carried and not seen[e]) for e in fold.held_out)


def test_a_truncated_end_is_worth_its_transcript() -> None:
    table, chains, _ = world(20, informative=True, truncated=True)
    shrunk = shrunk_values(new_critic(), table, chains)
    assert any(abs(row[-1]) > 0.1 for row in shrunk.values)
    assert all(len(row) == 5 for row in shrunk.values)


def test_truncated_ends_do_not_add_up() -> None:
    table, chains, _ = world(20, informative=True, truncated=True)
    shrunk = shrunk_values(new_critic(dataclasses.replace(SETTINGS, epochs=100)), table, chains)
    assert all(-0.1 <= v <= 1.1 for row in shrunk.values for v in row)
    assert shrunk.explained_variance > 0.5


def test_a_truncated_end_is_bootstrapped_from_the_head_before_the_fit() -> None:
    table, chains, rewards = world(20, informative=True, truncated=True)
    head = HeadFit(WIDTH, SETTINGS)
    reads = [Read(chain, table.read(chain.texts)) for chain in chains]
    mean = math.fsum(rewards) / len(rewards)
    prepared = head.prepare(reads)
    assert [read.final for read in prepared] == pytest.approx([mean] * 20)
    head.train(prepared, epochs=10, seed=0)
    ends = [read.final for read in head.prepare(reads)]
    assert ends == pytest.approx([float(head.values(r.features[-1:])) for r in reads])
    assert max(ends) - min(ends) > 0.1
    target = lessons(prepared[:1], head.values)[1].tolist()
    assert target == pytest.approx([rewards[0] + mean] * 4, abs=0.2)


def test_the_head_starts_at_the_mean_return() -> None:
    table, chains, rewards = world(20, informative=True)
    head = HeadFit(WIDTH, SETTINGS)
    reads = [Read(chain, table.read(chain.texts)) for chain in chains]
    head.fit(reads, epochs=0, seed=0)
    mean = math.fsum(rewards) / len(rewards)
    assert head.values(reads[0].features).tolist() == pytest.approx([mean] * chains[0].rows)


def test_fitting_is_repeatable_and_leaves_the_global_seed_alone() -> None:
    state = torch.random.get_rng_state()
    table, chains, _ = world(12, informative=True)
    runs = [values_of(new_critic(), table, chains) for _ in range(2)]
    assert runs[0] == runs[1]
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("count", [1, 2])
def test_few_episodes_are_enough(count: int) -> None:
    table, chains, rewards = world(count, informative=False, seed=3)
    shrunk = shrunk_values(new_critic(), table, chains)
    assert all(math.isfinite(v) for row in shrunk.values for v in row)
    if count == 2:
        assert [row[0] for row in shrunk.values] == pytest.approx(rewards[::-1])


def test_one_new_episode_gets_the_carried_critics_values() -> None:
    table, chains, _ = world(40, informative=True)
    critic = new_critic()
    values_of(critic, table, chains)
    new_table, new, rewards = world(1, informative=True, seed=9)
    (row,) = values_of(critic, new_table, new, "new")
    assert row[0] == pytest.approx(rewards[0], abs=0.3)


def test_a_second_fit_starts_from_the_first() -> None:
    settings = dataclasses.replace(SETTINGS, update_epochs=1)
    critic = new_critic(settings)
    table, chains, _ = world(80, informative=True)
    values_of(critic, table, chains)
    later_table, later, _ = world(16, informative=True, seed=2)
    carried = shrink(later, values_of(critic, later_table, later, "later"))
    anew = new_critic(dataclasses.replace(settings, epochs=1))
    from_nothing = shrink(later, values_of(anew, later_table, later))
    assert carried.explained_variance > 0.6 > from_nothing.explained_variance


def test_a_value_clip_bounds_what_a_later_fit_changes() -> None:
    table, chains, rewards = world(30, informative=True)
    turned = [with_reward(c, 1 - r) for c, r in zip(chains, rewards, strict=True)]
    moved: list[float] = []
    for clip in (None, 0.05):
        head = HeadFit(WIDTH, dataclasses.replace(SETTINGS, value_clip=clip))
        reads = [Read(chain, table.read(chain.texts)) for chain in chains]
        head.fit(reads, epochs=20, seed=0)
        before = head.values(table.rows)
        reads = [Read(chain, read.features) for chain, read in zip(turned, reads, strict=True)]
        head.fit(reads, epochs=60, seed=0)
        change = head.values(table.rows) - before
        moved.append(float(change.std()))
    assert moved[0] > 0.6 and moved[1] < 0.2


def test_returns_that_rose_as_a_whole_need_no_learning() -> None:
    table, chains, _ = world(60, informative=True)
    head = HeadFit(WIDTH, SETTINGS)
    reads = [Read(chain, table.read(chain.texts)) for chain in chains]
    head.fit(reads, epochs=30, seed=0)
    before = head.values(table.rows)
    risen = [with_reward(chain, chain.links.reward_P[-1] + 7) for chain in chains]
    reads = [Read(chain, read.features) for chain, read in zip(risen, reads, strict=True)]
    head.fit(reads, epochs=0, seed=0)
    assert torch.allclose(head.values(table.rows), before + 7, atol=0.1)


def test_new_units_change_no_value() -> None:
    head = ValueHead(4, 8)
    features = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        head.last.weight.fill_(0.7)
        head.rescale(2.0, 3.0)
        before = head(features)
        head.rescale(-1.0, 0.01)
        assert torch.allclose(head(features), before, atol=1e-4)


def test_first_returns_without_spread_do_not_spoil_later_fits() -> None:
    table, chains, _ = world(60, informative=True)
    critic = new_critic(dataclasses.replace(SETTINGS, update_epochs=30))
    values_of(critic, table, [with_reward(chain, 1.0) for chain in chains])
    later_table, later, _ = world(60, informative=True, seed=4)
    shrunk = shrink(later, values_of(critic, later_table, later, "later"))
    assert shrunk.explained_variance > 0.7


def test_a_saved_critic_continues_bit_for_bit() -> None:
    table, chains, _ = world(16, informative=True)
    later_table, later, _ = world(16, informative=True, seed=1)
    critic = new_critic()
    values_of(critic, table, chains)
    state = {name: tensor.clone() for name, tensor in critic.state().items()}
    other = new_critic()
    other.load_state(state)
    for part in (later, later):
        runs = [values_of(c, later_table, part, "later", seed=5) for c in (critic, other)]
        assert runs[0] == runs[1]
    for name, tensor in critic.state().items():
        assert torch.equal(tensor, other.state()[name]), name


def test_a_state_holds_plain_tensors_under_flat_names() -> None:
    table, chains, _ = world(6, informative=True)
    critic = new_critic()
    values_of(critic, table, chains)
    state = critic.state()
    assert {"net.0.weight", "net.0.weight.exp_avg", "net.0.weight.step", "fits", "seen"} < {*state}
    assert all(t.is_contiguous() for t in state.values())
    assert {t.dtype for t in state.values()} == {torch.float32, torch.int64}
    assert len(state["seen"]) == 6 and int(state["fits"]) == 1


def test_a_state_of_another_critic_is_refused_whole() -> None:
    table, chains, _ = world(6, informative=True)
    critic = new_critic()
    values_of(critic, table, chains)
    small = new_critic(dataclasses.replace(SETTINGS, hidden=8))
    before = small.state()
    with pytest.raises(ConfigError, match=r"net\.0\.bias has shape \[16\] there and shape \[8\]"):
        small.load_state(critic.state())
    damaged = critic.state()
    del damaged["net.2.bias.exp_avg"]
    with pytest.raises(ConfigError, match="no such tensor there"):
        new_critic().load_state(damaged)
    assert all(torch.equal(tensor, before[name]) for name, tensor in small.state().items())


@pytest.mark.parametrize("rows", [24, 200, 500])
def test_little_memory_thins_what_is_fitted_and_values_all_the_same(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, chains, _ = world(24, informative=True, lengths=(10, 20))
    monkeypatch.setattr(cross_fitting, "_MEMORY", rows * 4 * WIDTH)
    shelf = Shelf(table, chains, 0)
    kept = shelf.reads(range(len(chains)))
    assert len(kept) >= 2 and sum(read.chain.rows for read in kept) <= rows
    assert not shelf.whole
    raw, _ = new_critic().evaluate(Shelf(table, chains, 0), names(chains), seed=0)
    assert [len(row) for row in raw] == [32] * 24
    if rows >= 200:
        assert shrink(chains, raw).explained_variance > 0.5
