"""What a critic is fitted on: chains of places in texts, and the returns there.

A chain is one advantage recursion: an episode's actions or tokens, or one agent's own. Before each
of its places p the critic has a value V_p; R̂_p is the target there:

    R̂_p = r_p + g_p ((1 - l_p) V_{p+1} + l_p R̂_{p+1})        g: discount, l: λ towards place p + 1

This is R̂ = Â + V of the recursion per action or per token. A place without a value of its own is
left out as one whose value is what follows it, V_p := r_p + g_p V_{p+1}: its reward, discount and λ
go to the place before it. Where λ_w = 1 that changes no target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from marft_agents.credit.gae import step_discounts
from marft_agents.training.features import Text


@dataclass(frozen=True)
class Links:
    """From each place to the next one (the last: to the end); each list is (P,)."""

    reward_P: list[float]
    discount_P: list[float]
    trace_P: list[float]


@dataclass(frozen=True)
class Discounts:
    """Discounts and λ between actions, and between the tokens of one action."""

    gamma: float
    lam: float
    gamma_w: float = 1.0
    lam_w: float = 1.0


@dataclass(frozen=True)
class Chain:
    """One recursion and its rows: P places, then one more before each action if ``opened``, then
    the state after a truncated end if ``final``. The rows are the places of the texts in order."""

    episode: int
    """Number of the episode: what must be held out together."""
    texts: list[Text]
    links: Links
    action_P: list[int]
    """To which action each place belongs, ascending."""
    opened: bool = False
    final: bool = False

    @property
    def places(self) -> int:
        return len(self.action_P)

    @property
    def rows(self) -> int:
        return sum(len(text.places) for text in self.texts)

    def starts(self) -> list[int]:
        """The first place of each action."""
        return [p for p, a in enumerate(self.action_P) if p == 0 or a != self.action_P[p - 1]]

    def weight_P(self) -> list[float]:
        """Every action weighs 1, spread over its places."""
        count: dict[int, int] = {}
        for action in self.action_P:
            count[action] = count.get(action, 0) + 1
        return [1 / count[action] for action in self.action_P]


def make_links(
    reward_K: Sequence[float],
    steps_K: Sequence[int],
    length_K: Sequence[int],
    discounts: Discounts,
) -> Links:
    """Links of a chain in which action k has ``length_K[k]`` places."""
    out = Links([], [], [])
    gamma_K = step_discounts(steps_K, discounts.gamma)
    for reward, length, gamma in zip(reward_K, length_K, gamma_K, strict=True):
        inner = length - 1
        out.reward_P.extend([0.0] * inner + [reward])
        out.discount_P.extend([discounts.gamma_w] * inner + [gamma])
        out.trace_P.extend([discounts.lam_w] * inner + [discounts.lam])
    return out


def leave_out(links: Links, kept: Sequence[int]) -> Links:
    """The links between the places ``kept`` (ascending) alone."""
    out = Links([], [], [])
    ends = [*kept[1:], len(links.reward_P)]
    for start, end in zip(kept, ends, strict=True):
        reward, discount, trace = 0.0, 1.0, 1.0
        for p in range(start, end):
            reward += discount * links.reward_P[p]
            discount *= links.discount_P[p]
            trace *= links.trace_P[p]
        out.reward_P.append(reward)
        out.discount_P.append(discount)
        out.trace_P.append(trace)
    return out


def fill_in(links: Links, known: dict[int, float], final: float) -> list[float]:
    """Values (P,) where some are known: elsewhere what follows, r_p + g_p V_{p+1}."""
    out = [0.0] * len(links.reward_P)
    following = final
    for p in reversed(range(len(out))):
        here = known.get(p)
        following = links.reward_P[p] + links.discount_P[p] * following if here is None else here
        out[p] = following
    return out


def lambda_returns(links: Links, value_P: Sequence[float], final: float) -> list[float]:
    """R̂ (P,), the targets."""
    out = [0.0] * len(value_P)
    following, run = final, final
    for p in reversed(range(len(out))):
        trace = links.trace_P[p]
        run = links.reward_P[p] + links.discount_P[p] * ((1 - trace) * following + trace * run)
        following = value_P[p]
        out[p] = run
    return out


def rewards_to_go(links: Links) -> list[float]:
    """Discounted rewards from each place on (P,); nothing is bootstrapped."""
    out = [0.0] * len(links.reward_P)
    run = 0.0
    for p in reversed(range(len(out))):
        run = links.reward_P[p] + links.discount_P[p] * run
        out[p] = run
    return out


def thin(chain: Chain, most: int) -> tuple[Chain, list[int]]:
    """At most ``most`` places of each action, the first one among them; and which rows are left."""
    rows = list(range(chain.rows))
    if min(chain.weight_P(), default=1.0) * most >= 1:
        return chain, rows
    kept: list[int] = []
    starts = chain.starts()
    for start, end in zip(starts, [*starts[1:], chain.places], strict=True):
        count = min(most, end - start)
        kept += [start + i * (end - start) // count for i in range(count)]
    rows = [*kept, *rows[chain.places :]]
    action_P = [chain.action_P[p] for p in kept]
    texts = _only(chain.texts, set(rows))
    links = leave_out(chain.links, kept)
    return replace(chain, texts=texts, links=links, action_P=action_P), rows


def _only(texts: Sequence[Text], rows: set[int]) -> list[Text]:
    """The texts with only these of their places, numbered through."""
    out: list[Text] = []
    row = 0
    for text in texts:
        places = [p for i, p in enumerate(text.places, row) if i in rows]
        row += len(text.places)
        if places:
            out.append(Text(text.ids, places))
    return out
