"""The models of one run in memory: frozen base, its adapters, tokenizer; and what is asked of them.

Invariant: loaded once, on the configuration's device. Whether prompts can share prefixes is tried
out on this model, not assumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from marft_agents.registry import Registry
from marft_agents.training._trl import use_adapter
from marft_agents.training.adapters import attach_adapters, base_dtype, load_base, load_tokenizer
from marft_agents.training.advantages import Credits
from marft_agents.training.config import MarftConfig
from marft_agents.training.critic import CriticSettings, FittedCritic, fit_critic
from marft_agents.training.effect import EffectMeter, best_and_worst
from marft_agents.training.features import read_features
from marft_agents.training.plan import AdapterPlan, NewAdapter, Plan, context_length
from marft_agents.training.replay import Replayer, replay_lines
from marft_agents.training.scoring import sharing_is_exact
from marft_agents.training.transcript import tokenise


class Session:
    """One base model with one adapter per plan."""

    def __init__(
        self,
        plan: Plan,
        registry: Registry,
        config: MarftConfig,
        scratch: Path,
        say: Callable[[str], None],
    ) -> None:
        started = time.monotonic()
        self.plan, self.registry, self.config, self.say = plan, registry, config, say
        base = load_base(plan.model_dir, base_dtype(config.dtype, config.device), config.device)
        self.tokenizer = load_tokenizer(plan.model_dir)
        new = NewAdapter(config.lora_rank, config.lora_alpha, config.lora_target_modules)
        self.model: Any = attach_adapters(base, plan, registry, new, config.seed, scratch)
        rows = [plan.data.rows[i] for a in plan.adapters for i in a.rows]
        self.share = sharing_is_exact(self.model, rows, config.pack_tokens)
        names = ", ".join(a.adapter for a in plan.adapters)
        say(
            f"loaded {plan.base.name} with {names} on {config.device.type}"
            f" in {time.monotonic() - started:.0f} s"
        )
        if not self.share:
            say("note: no shared prefixes with this model or log; turns are scored one by one")

    def replay(self) -> None:
        """Check that the recorded log-probabilities are this model's.

        Raises:
            ReplayError: when they are not.
        """
        config = self.config
        if config.replay_turns == 0:
            self.say("WARNING: the replay check is switched off (replay_turns: 0)")
            return
        replayer = Replayer(
            self.model,
            self.plan,
            self.registry,
            pack_tokens=config.pack_tokens,
            share=self.share,
        )
        checked = replayer.check(
            turns=config.replay_turns, tolerance=config.replay_tolerance, seed=config.seed
        )
        replay_lines(checked, self.say)

    def critic(self) -> FittedCritic:
        """Cross-fitted values of every episode of the plan."""
        config, episodes = self.config, self.plan.data.episodes
        started = time.monotonic()
        encode = self.tokenizer.encode
        transcripts = [
            tokenise(e.lines, lambda text: encode(text, add_special_tokens=False)) for e in episodes
        ]
        tokens = sum(len(t.ids) for t in transcripts)
        self.say(f"value model: reading {len(episodes)} transcripts, {tokens} tokens")
        window = min(config.critic_max_length, context_length(self.plan.model_dir) or 1 << 30)
        longer = sum(len(t.ids) > window for t in transcripts)
        with use_adapter(self.model, None):
            features = read_features(
                self.model.get_base_model().base_model,
                transcripts,
                max_length=window,
                pack_tokens=config.pack_tokens if self.share else 0,
            )
        critic = fit_critic(episodes, features, critic_settings(config))
        windowed = f"; {longer} transcripts over {window} tokens, in windows" if longer else ""
        self.say(
            f"value model: explains {critic.explained_variance:.0%} of the variance of returns it"
            f" has not seen{windowed}; {time.monotonic() - started:.0f} s"
        )
        return critic

    def meter(self, adapter: AdapterPlan, credits: Credits) -> EffectMeter:
        """Measures the adapter's best and worst turns, now and later."""
        good, bad = best_and_worst(adapter.rows, credits.advantage, self.config.effect_turns)
        rows = self.plan.data.rows
        return EffectMeter(
            self.model,
            adapter.adapter,
            [rows[i] for i in good],
            [rows[i] for i in bad],
            pack_tokens=self.config.pack_tokens,
            share=self.share,
        )


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
    )
