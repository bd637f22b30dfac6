from __future__ import annotations

import random

import pytest

from marft_agents.errors import ConfigError
from marft_agents.evaluation import compare, proportion


def test_wilson_interval_matches_the_textbook_value() -> None:
    # 8 of 20: Wilson's 95 % interval is [0.2188, 0.6134].
    result = proportion([True] * 8 + [False] * 12)
    assert (result.rate, result.n) == (0.4, 20)
    assert result.low == pytest.approx(0.2188, abs=5e-4)
    assert result.high == pytest.approx(0.6134, abs=5e-4)


@pytest.mark.parametrize("value", [True, False])
def test_interval_of_a_certain_outcome_holds_its_rate(value: bool) -> None:
    result = proportion([value] * 7)
    assert 0.0 <= result.low <= result.rate <= result.high <= 1.0
    assert result.high - result.low > 0.1


def test_a_clear_gain_is_better_and_its_mirror_is_worse() -> None:
    before, after = [0.0] * 40 + [1.0] * 10, [1.0] * 35 + [0.0] * 5 + [1.0] * 10
    gain, loss = compare(before, after), compare(after, before)
    assert gain.better and not gain.worse
    assert loss.worse and not loss.better
    assert gain.difference == pytest.approx(0.7)
    assert gain.low == pytest.approx(-loss.high, abs=0.03)


def test_no_change_is_neither() -> None:
    same = compare([0.0, 1.0, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0])
    assert (same.difference, same.low, same.high) == (0.0, 0.0, 0.0)
    assert not same.better and not same.worse


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng, covered = random.Random(1), 0
    for trial in range(60):
        before = [float(rng.random() < 0.4) for _ in range(60)]
        after = [float(rng.random() < 0.6) for _ in range(60)]
        result = compare(before, after, resamples=400, seed=trial)
        covered += result.low <= 0.2 <= result.high
    assert covered >= 51  # 85 %; 95 % are expected


def test_unpaired_or_empty_lists_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 before and 2 after"):
        compare([0.0, 0.0, 1.0], [1.0, 1.0])
    with pytest.raises(ConfigError, match="held-out tasks is empty"):
        proportion([])
