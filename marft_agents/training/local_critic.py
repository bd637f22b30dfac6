"""Each agent's own critic (IPPO): V of what the agent itself was shown.

Invariant: an agent's values depend on its own prompts and replies only, and come from a head that
never saw the episode. One head an agent on the frozen base; its state before an action is the last
token of the recorded prompt, before a later token of the action the token before that. After a
truncated end it is the end of the agent's last reply: it was shown nothing after that.

A turn whose prompt is not recorded has no state to read. In its agent's recursion it is worth what
follows it; an agent of whom nothing is recorded in an episode gets zeros there.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor

from marft_agents.credit import own_turns
from marft_agents.errors import ConfigError
from marft_agents.training.chains import Chain, Discounts, Links, fill_in, leave_out, make_links
from marft_agents.training.config import MarftConfig
from marft_agents.training.critic import CriticReport, EpisodeValues, critic_settings
from marft_agents.training.cross_fitting import CrossFitted, HeadEstimator, Shelf
from marft_agents.training.dataset import EpisodeView, TurnRow
from marft_agents.training.features import Reader, Text
from marft_agents.training.shrinking import Shrunk, shrink


@dataclass(frozen=True)
class OwnChain:
    """One agent's recursion in one episode, and the part of it that can be read."""

    episode: int
    index: list[int]
    """Places of the agent's turns among the episode's actions, (N,)."""
    length: list[int]
    """Places of each of them in the recursion, (N,)."""
    links: Links
    kept: list[int]
    """The places of the recursion that the chain has."""
    chain: Chain

    def values_NL(self, row: Sequence[float]) -> list[list[float]]:
        """Values of every turn's places, from those of the chain's rows."""
        final = row[-1] if self.chain.final else 0.0
        flat = fill_in(self.links, dict(zip(self.kept, row, strict=False)), final)
        ends = list(accumulate(self.length))
        return [flat[end - size : end] for end, size in zip(ends, self.length, strict=True)]


class LocalCritics:
    """One critic an agent, kept from round to round; see ``CentralCritic``."""

    def __init__(
        self, model: Any, tokenizer: Any, config: MarftConfig, *, share: bool, window: int
    ) -> None:
        if config.critic == "lora":
            raise ConfigError(
                "critic: lora reads the team's transcript, but estimator ippo has a critic for each"
                " agent's own prompts; use critic: head, or estimator: marft"
            )
        self._config, self._settings = config, critic_settings(config)
        window = min(window, config.critic_max_length)
        self._reader = Reader(model, share, window, config.pack_tokens)
        self._agents: dict[str, CrossFitted] = {}

    def evaluate(
        self, episodes: Sequence[EpisodeView], rows: Sequence[TurnRow], *, seed: int
    ) -> CriticReport:
        """Values of every agent's turns, from heads that never saw them; then learn from them."""
        started = time.monotonic()
        by_turn = {(row.episode, row.k): row for row in rows}
        values_KL = [[[0.0] for _ in episode.agents_K] for episode in episodes]
        finals: list[dict[str, float]] = [{} for _ in episodes]
        found: list[tuple[Shrunk, float]] = []
        for agent in dict.fromkeys(agent for e in episodes for agent in e.agents_K):
            chains = self._chains(agent, episodes, by_turn)
            names = [episodes[own.episode].episode_id for own in chains]
            if not chains:
                continue
            fitted = self._agents.setdefault(agent, self._new())
            shelf = Shelf(self._reader, [own.chain for own in chains], seed)
            raw, loss = fitted.evaluate(shelf, names, seed=seed)
            shrunk = shrink(shelf.chains, raw)
            found.append((shrunk, loss))
            for own, row in zip(chains, shrunk.values, strict=True):
                if own.chain.final:
                    finals[own.episode][agent] = row[-1]
                for k, values_L in zip(own.index, own.values_NL(row), strict=True):
                    values_KL[own.episode][k] = values_L
        values = [self._values(*pair) for pair in zip(values_KL, finals, strict=True)]
        return _report(values, found, len(by_turn), time.monotonic() - started)

    def _new(self) -> CrossFitted:
        settings, width = self._settings, self._reader.width
        return CrossFitted(lambda: HeadEstimator(width, settings), settings)

    def _values(self, values_KL: list[list[float]], finals: dict[str, float]) -> EpisodeValues:
        tokens = values_KL if self._config.level == "token" else None
        return EpisodeValues([values_L[0] for values_L in values_KL], 0.0, tokens, finals)

    def _chains(
        self,
        agent: str,
        episodes: Sequence[EpisodeView],
        by_turn: Mapping[tuple[int, int], TurnRow],
    ) -> list[OwnChain]:
        out: list[OwnChain] = []
        tokens = self._config.level == "token"
        for n, episode in enumerate(episodes):
            turns = [
                by_turn.get((n, k)) if owner == agent else None
                for k, owner in enumerate(episode.agents_K)
            ]
            if any(turns):
                out.append(
                    own_chain(n, len(out), episode, turns, agent, self._settings.discounts, tokens)
                )
        return out

    def state(self) -> dict[str, Tensor]:
        """Every agent's critic, under ``<agent>/<tensor>``."""
        return {
            f"{agent}/{name}": tensor
            for agent, fitted in self._agents.items()
            for name, tensor in fitted.state().items()
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state; agents that it does not name start anew.

        Raises:
            ConfigError: when it does not fit this base and these settings; nothing is changed.
        """
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in state.items():
            agent, slash, rest = name.rpartition("/")
            if not slash:
                raise ConfigError(
                    f"the saved critic has a tensor {name!r} that belongs to no agent; it is that"
                    " of another estimator than ippo"
                )
            parts.setdefault(agent, {})[rest] = tensor
        agents = {agent: self._new() for agent in parts}
        for agent, fitted in agents.items():
            fitted.load_state(parts[agent])
        self._agents = agents


def own_chain(
    episode_number: int,
    number: int,
    episode: EpisodeView,
    rows_K: Sequence[TurnRow | None],
    agent: str,
    discounts: Discounts,
    tokens: bool,
) -> OwnChain:
    """The recursion over one agent's turns; ``rows_K`` has those that can be read."""
    own = own_turns(
        episode.agents_K, episode.team_reward_K, episode.own_reward_K, episode.steps_K, agent
    )
    rows = [rows_K[k] for k in own.index]
    length = [len(row.token_ids) if tokens and row is not None else 1 for row in rows]
    links = make_links(own.reward, own.steps, length, discounts)
    kept: list[int] = []
    action_P: list[int] = []
    texts: list[Text] = []
    start = 0
    for n, (row, size) in enumerate(zip(rows, length, strict=True)):
        if row is not None:
            kept += range(start, start + size)
            action_P += [n] * size
            texts.append(_text(row, size))
        start += size
    if episode.truncated:
        last = next(row for row in reversed(rows) if row is not None)
        texts[-1] = Text(last.prompt_ids + last.token_ids, [*texts[-1].places, last.length - 1])
    chain = Chain(number, texts, leave_out(links, kept), action_P, final=episode.truncated)
    return OwnChain(episode_number, own.index, length, links, kept, chain)


def _text(row: TurnRow, size: int) -> Text:
    last = len(row.prompt_ids) - 1
    ids: array[int] = row.prompt_ids + row.token_ids[: size - 1]
    return Text(ids, range(last, last + size))


def _report(
    values: list[EpisodeValues], found: Sequence[tuple[Shrunk, float]], turns: int, seconds: float
) -> CriticReport:
    total = math.fsum(shrunk.total for shrunk, _ in found)
    left = math.fsum(shrunk.left for shrunk, _ in found)
    explained = 1 - left / total if total > 0 else 0.0
    count = max(len(found), 1)
    return CriticReport(
        values,
        explained,
        math.fsum(shrunk.shrinkage for shrunk, _ in found) / count,
        math.fsum(loss for _, loss in found) / count,
        max((abs(v) for shrunk, _ in found for row in shrunk.values for v in row), default=0.0),
        [
            f"value models: {len(found)} agents' own, read {turns} prompts; explain"
            f" {explained:.0%} of the variance of returns they have not seen; {seconds:.0f} s"
        ],
    )
