"""The centralised critic V_φ(s_k): what the state before an action, or a token, is worth.

Invariants: one causal pass over an episode's joint transcript gives all its values. Values that
advantages are built on come from a critic that never saw the episode (see ``cross_fitting``), and
are shrunk towards the mean return as far as they predicted nothing (see ``shrinking``). The base is
frozen, and every adapter is afterwards what it was.

V before an action is read behind the name of who speaks next; the head also learns it at the border
before that name. V before token j of an action is read at token j - 1.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from marft_agents.training.chains import Chain, Discounts, make_links
from marft_agents.training.config import MarftConfig
from marft_agents.training.cross_fitting import CrossFitted, Estimator, HeadEstimator, Shelf
from marft_agents.training.dataset import EpisodeView, TurnRow
from marft_agents.training.features import Reader, Text
from marft_agents.training.lora_critic import LoraEstimator
from marft_agents.training.shrinking import shrink
from marft_agents.training.transcript import Borders, tokenise
from marft_agents.training.value_head import CriticSettings


@dataclass(frozen=True)
class EpisodeValues:
    """V_k (K,) before each action and V_{K+1} (0 after a terminated end)."""

    values_K: list[float]
    final_value: float
    values_KL: list[list[float]] | None = None
    """Token level: V before each token of action k; one value where its ids are not known."""
    final_by_agent: dict[str, float] | None = None
    """Local critics: each agent's own V after a truncated end."""


@dataclass(frozen=True)
class CriticReport:
    """Values of the episodes asked for, and how good they are."""

    values: list[EpisodeValues]
    explained_variance: float
    """Share of the returns' variance that the values explain, out of fold."""
    shrinkage: float
    """Factor by which values were pulled towards the mean return; 0: a constant baseline."""
    loss: float
    """Of the carried critic's last pass, in deviations of the returns."""
    largest_value: float
    lines: list[str] = field(default_factory=list[str])
    """What to say about it."""


def critic_settings(config: MarftConfig) -> CriticSettings:
    return CriticSettings(
        hidden=config.critic_hidden,
        epochs=config.critic_epochs,
        learning_rate=config.critic_learning_rate,
        weight_decay=config.critic_weight_decay,
        folds=config.critic_folds,
        gamma=config.gamma,
        lam=config.lam,
        seed=config.seed,
        gamma_w=config.gamma_w,
        lam_w=config.lam_w,
        update_epochs=config.critic_update_epochs,
        value_clip=config.critic_value_clip,
        max_grad_norm=config.critic_max_grad_norm,
    )


class CentralCritic:
    """One critic for the team, kept from round to round.

    ``model`` carries the agents' adapters; ``share`` and ``window`` as in ``Reader``.
    """

    def __init__(
        self, model: Any, tokenizer: Any, config: MarftConfig, *, share: bool, window: int
    ) -> None:
        self._tokenizer, self._config = tokenizer, config
        self._vocabulary: int = model.get_input_embeddings().num_embeddings
        window = min(window, config.critic_max_length)
        self._reader = reader = Reader(model, share, window, config.pack_tokens)
        self._window = window
        self._settings = settings = critic_settings(config)

        def make() -> Estimator:
            if config.critic == "lora":
                return LoraEstimator(reader, config, settings)
            return HeadEstimator(reader.width, settings)

        self._fitted = CrossFitted(make, settings)

    def evaluate(
        self, episodes: Sequence[EpisodeView], rows: Sequence[TurnRow], *, seed: int
    ) -> CriticReport:
        """Values of these episodes, from heads that never saw them; then learn from them.

        At token level an action has values before each token if ``rows`` has it.
        """
        started = time.monotonic()
        borders = self._transcripts(episodes, rows)
        chains = [
            episode_chain(n, episode, at, self._settings.discounts)
            for n, (episode, at) in enumerate(zip(episodes, borders, strict=True))
        ]
        shelf = Shelf(self._reader, chains, seed)
        raw, loss = self._fitted.evaluate(shelf, [e.episode_id for e in episodes], seed=seed)
        shrunk = shrink(chains, raw)
        tokens = self._config.level == "token"
        values = [
            _episode_values(chain, at, row, tokens=tokens)
            for chain, at, row in zip(chains, borders, shrunk.values, strict=True)
        ]
        return CriticReport(
            values,
            shrunk.explained_variance,
            shrunk.shrinkage,
            loss,
            max((abs(v) for row in shrunk.values for v in row), default=0.0),
            self._lines(borders, shrunk.explained_variance, time.monotonic() - started),
        )

    def state(self) -> dict[str, Tensor]:
        """Everything that a later ``load_state`` continues from, as flat named tensors."""
        return self._fitted.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state.

        Raises:
            ConfigError: when it does not fit this base and these settings; nothing is changed.
        """
        self._fitted.load_state(state)

    def _transcripts(
        self, episodes: Sequence[EpisodeView], rows: Sequence[TurnRow]
    ) -> list[Borders]:
        sampled: dict[tuple[int, int], Sequence[int]] = {}
        if self._config.level == "token":
            known = (row for row in rows if max(row.token_ids, default=-1) < self._vocabulary)
            sampled = {(row.episode, row.k): row.token_ids for row in known}

        def encode(text: str) -> list[int]:
            return self._tokenizer.encode(text, add_special_tokens=False)

        return [
            tokenise(
                episode.lines,
                encode,
                [sampled.get((n, k)) for k in range(len(episode.agents_K))],
            )
            for n, episode in enumerate(episodes)
        ]

    def _lines(self, borders: Sequence[Borders], explained: float, seconds: float) -> list[str]:
        lengths = [len(b.ids) for b in borders]
        longer = sum(length > self._window for length in lengths)
        windowed = f", {longer} of them over {self._window} and read in windows" if longer else ""
        return [
            f"value model: read {len(lengths)} transcripts, {sum(lengths)} tokens{windowed};"
            f" explains {explained:.0%} of the variance of returns it has not seen;"
            f" {seconds:.0f} s"
        ]


def episode_chain(number: int, episode: EpisodeView, at: Borders, discounts: Discounts) -> Chain:
    """The recursion over all agents' actions, or tokens, of an episode."""
    tokens = [
        n + j for n, length in zip(at.named_K, at.length_K, strict=True) for j in range(length)
    ]
    places = [*tokens, *at.open_K, *([at.final] if episode.truncated else [])]
    return Chain(
        number,
        [Text(at.ids, places)],
        make_links(episode.reward_K, episode.steps_K, at.length_K, discounts),
        [k for k, length in enumerate(at.length_K) for _ in range(length)],
        opened=True,
        final=episode.truncated,
    )


def _episode_values(
    chain: Chain, at: Borders, row: Sequence[float], *, tokens: bool
) -> EpisodeValues:
    values_KL: list[list[float]] = []
    start = 0
    for length in at.length_K:
        values_KL.append(list(row[start : start + length]))
        start += length
    final = row[-1] if chain.final else 0.0
    return EpisodeValues([v[0] for v in values_KL], final, values_KL if tokens else None)
