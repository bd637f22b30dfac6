"""Which critic an estimator uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from marft_agents.training.config import MarftConfig
from marft_agents.training.critic import CentralCritic, CriticReport
from marft_agents.training.dataset import EpisodeView, TurnRow
from marft_agents.training.local_critic import LocalCritics
from marft_agents.training.session import Session


class Critics:
    """The team's critic, or each agent's own (``ippo``); made when first asked."""

    def __init__(self, session: Session, config: MarftConfig) -> None:
        self._session, self._config = session, config
        self._critic: CentralCritic | None = None
        self._loaded: Mapping[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}

    def _make(self) -> CentralCritic:
        session, config = self._session, self._config
        kind: Any = CentralCritic
        if config.estimator == "ippo":
            kind = LocalCritics
        window = min(config.critic_max_length, session.context)
        critic = kind(session.model, session.tokenizer, config, share=session.share, window=window)
        if self._loaded:
            critic.load_state(self._loaded)
        return critic

    def evaluate(
        self, episodes: Sequence[EpisodeView], rows: Sequence[TurnRow], *, seed: int
    ) -> CriticReport:
        """Values of these episodes; the critic has then learned from them."""
        if self._critic is None:
            self._critic = self._make()
        self._before = self._critic.state()
        return self._critic.evaluate(episodes, rows, seed=seed)

    def restore(self) -> None:
        """Give back what was there before the last ``evaluate``."""
        if self._before and self._critic is not None:
            self._critic.load_state(self._before)
        else:
            self._critic = None

    def state(self) -> dict[str, Tensor]:
        """Tensors by flat name; empty before the first use."""
        return dict(self._loaded) if self._critic is None else self._critic.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self._loaded = dict(state)
        self._critic = None
