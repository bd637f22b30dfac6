"""The order of rows: adapter by adapter, whole steps, every row in every pass."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from marft_agents.training.sampler import AgentBlockSampler


def make(
    counts: dict[str, int], *, block: int = 4, epochs: float = 2, seed: int = 0
) -> AgentBlockSampler:
    rows: dict[str, list[int]] = {}
    first = 0
    for name, count in counts.items():
        rows[name] = list(range(first, first + count))
        first += count
    fillers = {name: first + n for n, name in enumerate(counts)}
    lengths = [(7 * i) % 13 for i in range(first + len(counts))]
    return AgentBlockSampler(rows, fillers, lengths, block=block, epochs=epochs, seed=seed)


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 40), min_size=1),
    st.integers(1, 8),
    st.integers(1, 3),
)
def test_every_step_is_one_adapter_and_every_pass_has_every_row_once(
    counts: dict[str, int], block: int, epochs: int
) -> None:
    sampler = make(counts, block=block, epochs=epochs)
    order = list(sampler)
    assert len(order) == len(sampler)
    owner: dict[int, str] = {}
    first, filler = 0, sum(counts.values())
    for n, (name, count) in enumerate(counts.items()):
        owner |= dict.fromkeys(range(first, first + count), name)
        owner[filler + n] = name
        first += count
    steps = [order[i : i + block] for i in range(0, len(order), block)]
    names = [{owner[i] for i in step} for step in steps]
    assert all(len(name) == 1 for name in names)
    changes = [a for a, b in zip(names, [set(), *names], strict=False) if a != b]
    assert [next(iter(name)) for name in changes] == list(counts), "one adapter after another"
    seen = Counter(i for i in order if i < filler)
    assert seen == dict.fromkeys(range(filler), epochs)


def test_part_of_a_pass() -> None:
    assert len(list(make({"a": 16}, epochs=0.5))) == 8
    assert len(list(make({"a": 16}, epochs=2.25))) == 36


def test_rows_of_a_step_are_of_like_length_and_the_seed_decides_the_order() -> None:
    order = list(make({"a": 32}, epochs=1))
    lengths = [(7 * i) % 13 for i in order]
    spans = [max(lengths[i : i + 4]) - min(lengths[i : i + 4]) for i in range(0, 32, 4)]
    assert max(spans) <= 3
    assert order == list(make({"a": 32}, epochs=1)) != list(make({"a": 32}, epochs=1, seed=1))
