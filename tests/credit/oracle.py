"""A second way to the same numbers, and random episodes to compare on.

Advantages are written as mixtures of n-step returns, each an explicit sum of discounted rewards and
one value; no δ and no recursion:

    Â_t = Σ_n w_n G^(n)_t - V_t
    G^(n)_t = Σ_{l=t..n} (Π_{u=t..l-1} g_u) r_l + (Π_{u=t..n} g_u) V_{n+1}
    w_n = (Π_{u=t..n-1} λ_u)(1 - λ_n), at the last n without the factor (1 - λ_n)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st


@dataclass(frozen=True)
class Chain:
    """One decision process; each list is (N,): reward, value, discount and trace after each n."""

    reward: list[float]
    value: list[float]
    discount: list[float]
    trace: list[float]
    final: float

    def n_step_return(self, t: int, n: int) -> float:
        earned = (math.prod(self.discount[t:m]) * self.reward[m] for m in range(t, n + 1))
        ahead = [*self.value, self.final][n + 1]
        return math.fsum([*earned, math.prod(self.discount[t : n + 1]) * ahead])

    def advantage(self, t: int) -> float:
        last = len(self.reward) - 1
        mixed = (
            math.prod(self.trace[t:n])
            * (1 if n == last else 1 - self.trace[n])
            * self.n_step_return(t, n)
            for n in range(t, last + 1)
        )
        return math.fsum([*mixed, -self.value[t]])

    def advantages(self) -> list[float]:
        return [self.advantage(t) for t in range(len(self.reward))]


@dataclass(frozen=True)
class Episode:
    """A random episode; ``value_KL`` has one value a token."""

    agents: list[str]
    team: list[float]
    own: list[float]
    value_KL: list[list[float]]
    steps: list[int]
    final: float

    @property
    def reward(self) -> list[float]:
        return [t + o for t, o in zip(self.team, self.own, strict=True)]

    @property
    def value_K(self) -> list[float]:
        return [values[0] for values in self.value_KL]

    def only(self, agent: str) -> Episode:
        """What ``agent`` would have recorded if it were alone, the team's reward paid in full."""
        mine = [k for k, owner in enumerate(self.agents) if owner == agent]
        paid = [0.0] * len(mine)
        for k, value in enumerate(self.team):
            before = [n for n, m in enumerate(mine) if m <= k]
            paid[before[-1] if before else 0] += value
        return Episode(
            agents=[agent] * len(mine),
            team=paid,
            own=[self.own[k] for k in mine],
            value_KL=[self.value_KL[k] for k in mine],
            steps=[self.steps[k] for k in mine],
            final=self.final,
        )

    def _after(self, k: int, gamma: float) -> float:
        """Discount after action k."""
        return 1.0 if k + 1 < len(self.steps) and self.steps[k] == self.steps[k + 1] else gamma

    def actions(self, gamma: float, lam: float) -> Chain:
        size = range(len(self.steps))
        discount = [self._after(k, gamma) for k in size]
        return Chain(self.reward, self.value_K, discount, [lam for _ in size], self.final)

    def tokens(self, gamma: float, lam: float, gamma_w: float, lam_w: float) -> Chain:
        """The episode with every token as a step of its own."""
        chain = Chain([], [], [], [], self.final)
        for k, values in enumerate(self.value_KL):
            inside = len(values) - 1
            chain.reward.extend([0.0] * inside + [self.reward[k]])
            chain.value.extend(values)
            chain.discount.extend([gamma_w] * inside + [self._after(k, gamma)])
            chain.trace.extend([lam_w] * inside + [lam])
        return chain


NUMBER = st.floats(-5, 5, allow_nan=False)
SHARE = st.floats(0, 1)


@st.composite
def episodes(draw: st.DrawFn, agents: Sequence[str] = ("a", "b", "c")) -> Episode:
    size = draw(st.integers(1, 7))
    numbers = st.lists(NUMBER, min_size=size, max_size=size)
    tokens = st.lists(NUMBER, min_size=1, max_size=4)
    jumps = draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    return Episode(
        agents=draw(st.lists(st.sampled_from(agents), min_size=size, max_size=size)),
        team=draw(numbers),
        own=draw(numbers),
        value_KL=draw(st.lists(tokens, min_size=size, max_size=size)),
        steps=[sum(jumps[: k + 1]) for k in range(size)],
        final=draw(NUMBER),
    )
