"""Every setting of a training run.

Invariant: a ``MarftConfig`` that exists is valid; whatever is wrong with a value was a
``ConfigError`` naming the field. Names and meanings of ``transformers.TrainingArguments`` are kept
where it has them (``learning_rate``, ``num_train_epochs``, ``per_device_train_batch_size`` …).
"""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass, field, fields
from typing import Any

from marft_agents.credit import NORMALISATIONS
from marft_agents.errors import ConfigError
from marft_agents.registry import DEFAULT_ALPHA, DEFAULT_RANK, DEFAULT_TARGET_MODULES
from marft_agents.training._trl import BaseConfig
from marft_agents.training.options import CHOICES, refuse_managed

DTYPES = ("auto", "float32", "bfloat16", "float16")
ACTION_NORMS = ("token", "word", "sum")
ORDERS = ("dependency", "random")
KL_REFERENCES = ("start", "base")
SAMPLING_CORRECTIONS = (
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "none",
)  # fmt: skip
CRITICS = ("head", "lora")
ADAPTER_SETTINGS = ("learning_rate", "lora_rank", "lora_alpha", "lora_target_modules")
_CHOICES: dict[str, tuple[str, ...]] = {
    **CHOICES,
    "normalise": NORMALISATIONS,
    "dtype": DTYPES,
    "action_norm": ACTION_NORMS,
    "order": ORDERS,
    "kl_reference": KL_REFERENCES,
    "importance_sampling_mode": SAMPLING_CORRECTIONS,
    "critic": CRITICS,
}
_ABOVE_ZERO = (
    "learning_rate", "num_train_epochs", "awr_temperature", "awr_weight_max", "lora_rank",
    "lora_alpha", "max_lora_rank", "critic_hidden", "critic_epochs", "critic_learning_rate",
    "critic_max_length", "replay_tolerance", "per_device_train_batch_size",
    "gradient_accumulation_steps", "effect_turns", "preference_beta", "epsilon",
    "importance_sampling_clip_max", "iterations", "episodes_per_iteration", "group_size",
    "at_once", "episode_timeout", "update_epochs", "online_learning_rate", "critic_rank",
    "critic_lora_learning_rate", "critic_update_epochs", "critic_max_grad_norm", "target_kl",
    "value_limit",
)  # fmt: skip
_NOT_NEGATIVE = (
    "replay_turns", "max_nonfinite_steps", "weight_decay", "entropy_coef", "beta", "max_resample",
    "max_staleness", "max_guard_trips", "entropy_floor",
)  # fmt: skip
_INFINITE_IS_OFF = frozenset({
    "epsilon", "epsilon_high", "importance_sampling_clip_max", "replay_tolerance", "target_kl",
    "value_limit",
})  # fmt: skip
"""Limits that an infinite value switches off; everywhere else it would be a mistake."""


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class MarftConfig(BaseConfig):
    """Settings of a run, offline and online; see each field's help."""

    # what transformers has, with defaults that fit small adapters and few logs
    learning_rate: float = _setting(5e-4, "Adam's step size for the adapters.")
    num_train_epochs: float = _setting(4.0, "Passes over each adapter's turns, one after another.")
    per_device_train_batch_size: int = _setting(8, "Turns scored together.")
    lr_scheduler_type: str = _setting("constant", "Schedule over all agents' steps together.")
    gradient_checkpointing: bool = _setting(False, "Trade compute for memory.")
    bf16: bool | None = _setting(False, "Kept off; `dtype` sets the base's type.")
    disable_tqdm: bool | None = _setting(True, "No progress bars; progress is printed as lines.")
    save_strategy: str = _setting("steps", "`no` writes no checkpoint for --resume.")
    save_steps: float = _setting(50, "Optimizer steps between two checkpoints.")
    save_total_limit: int | None = _setting(2, "Checkpoints kept.")
    logging_steps: float = _setting(5, "Steps between two reports to the trackers.")
    project: str = _setting("marft-agents", "The trackers' project (report_to, run_name).")
    remove_unused_columns: bool = _setting(False, "Kept off: rows are ours.")
    dataloader_pin_memory: bool = _setting(False, "Rows are packed on the fly.")

    # whose turns
    agents: dict[str, str] = field(
        default_factory=dict[str, str],
        metadata={
            "help": "Agent to adapter name, `frozen` or `external`; others get their own adapter."
        },
    )
    adapters: dict[str, Any] = field(
        default_factory=dict[str, Any],
        metadata={
            "help": "Adapter to settings of its own: learning_rate, lora_rank, lora_alpha,"
            " lora_target_modules."
        },
    )
    max_length: int | None = _setting(
        None, "Longest turn (prompt and reply, tokens) to train on; default: the model's context."
    )

    # what is optimised, and how
    offline: str = _setting("awr", "Method for logs: awr, ppo, sft, kto, dpo or none.")
    estimator: str = _setting("marft", "Advantages: marft, group, ippo or single (one policy).")
    level: str = _setting("action", "MARFT-A (action) or MARFT-T (token).")
    schedule: str = _setting("sequential", "Agents: sequential, alternate or simultaneous.")
    order: str = _setting("dependency", "Order of sequential updates: dependency or random.")

    # credit
    gamma: float = _setting(1.0, "Discount at an environment transition; a hand-off has none.")
    lam: float = _setting(0.95, "GAE's lambda, over the turns of all agents.")
    gamma_w: float = _setting(1.0, "Discount between tokens of one action (token level).")
    lam_w: float = _setting(1.0, "GAE's lambda between tokens of one action (token level).")
    normalise: str = _setting("agent", "Scale of advantages: agent, team or none.")

    # advantage-weighted regression
    awr_temperature: float = _setting(0.5, "tau: small imitates only the best actions.")
    awr_weight_max: float = _setting(20.0, "Largest weight of one action.")
    awr_skip_share: float = _setting(0.1, "Skip the lightest turns, up to this share of weight.")

    # supervised and preference methods
    sft_threshold: float | None = _setting(
        None, "sft: lowest reward of an episode to imitate; default: above the mean."
    )
    preference_beta: float = _setting(0.1, "kto, dpo: strength of the pull to the start.")

    # policy gradient with clipping
    action_norm: str = _setting("token", "Action's log-ratio: per token, per word, or the sum.")
    epsilon: float = _setting(0.2, "Clip range of the ratio, downwards (and upwards).")
    epsilon_high: float | None = _setting(None, "Clip range upwards, when it is another.")
    compound_clip: float = _setting(2.0, "Bound c of the compound ratio: 1/c to c.")
    entropy_coef: float = _setting(0.0, "Weight of the entropy bonus.")
    beta: float = _setting(0.0, "Weight of the KL term; 0: no reference is kept.")
    kl_reference: str = _setting("start", "KL to the adapter of the start, or to the base.")
    importance_sampling_mode: str = _setting(
        "token_truncate", "Correction for stale or mismatched samplers, names as in TRL; or none."
    )
    importance_sampling_clip_max: float = _setting(2.0, "Largest correction.")
    importance_sampling_clip_min: float | None = _setting(None, "Smallest correction.")

    # online
    iterations: int = _setting(10, "Times of collecting and training.")
    episodes_per_iteration: int = _setting(64, "Episodes collected in an iteration.")
    group_size: int = _setting(1, "Episodes of each task in an iteration.")
    at_once: int = _setting(8, "Episodes run at the same time.")
    episode_timeout: float = _setting(600.0, "Longest run of one episode, seconds.")
    dynamic_sampling: bool = _setting(True, "Replace groups of episodes that earned the same.")
    max_resample: int = _setting(2, "Rounds of replacing per iteration.")
    replay_share: float = _setting(0.0, "Earlier episodes to learn from again, per fresh one.")
    max_staleness: int = _setting(2, "Oldest trained call, in versions behind the current one.")
    update_epochs: int = _setting(2, "Passes over each iteration's turns.")
    online_learning_rate: float = _setting(1e-4, "Adam's step size online.")

    # adapters
    lora_rank: int = _setting(DEFAULT_RANK, "Rank of an adapter that does not exist yet.")
    lora_alpha: int = _setting(DEFAULT_ALPHA, "Alpha of an adapter that does not exist yet.")
    lora_target_modules: list[str] = field(
        default_factory=lambda: list(DEFAULT_TARGET_MODULES),
        metadata={"help": "Modules of an adapter that does not exist yet."},
    )
    max_lora_rank: int = _setting(16, "The server's --max-lora-rank, when no --server is given.")
    dtype: str = _setting("auto", "Type of the base's weights: auto, float32, bfloat16, float16.")

    load_in_4bit: bool = _setting(False, "Quantise the frozen base (needs bitsandbytes).")

    # critic
    critic: str = _setting("head", "Value head on the frozen base, or on a LoRA adapter: lora.")
    critic_rank: int = _setting(8, "Rank of the critic's adapter.")
    critic_lora_learning_rate: float = _setting(1e-4, "Adam's step size for that adapter.")
    critic_hidden: int = _setting(64, "Width of the value head.")
    critic_epochs: int = _setting(60, "Passes over all turn borders in the first fit.")
    critic_update_epochs: int = _setting(20, "Passes in later fits of the same run.")
    critic_value_clip: float | None = _setting(
        None, "Largest change of a value in a later fit, in deviations of the returns."
    )
    critic_max_grad_norm: float = _setting(1.0, "Clip of the critic's gradient, its own.")
    critic_learning_rate: float = _setting(1e-3, "Adam's step size for the value head.")
    critic_weight_decay: float = _setting(0.1, "Weight decay of the value head.")
    critic_folds: int = _setting(5, "Values of an episode come from a head that never saw it.")
    critic_max_length: int = _setting(4096, "Longest transcript window, tokens.")

    # guards and speed
    replay_turns: int = _setting(8, "Turns per adapter version to replay first; 0: no check.")
    replay_tolerance: float = _setting(0.05, "Largest mean |difference| of log-probabilities.")
    max_nonfinite_steps: int = _setting(3, "Stop after this many losses that are not finite.")
    target_kl: float = _setting(
        0.1, "Mean KL per token to the iteration's start that ends an agent's passes."
    )
    entropy_floor: float = _setting(
        0.05, "Entropy below this share of the first update's, with worse rewards: a collapse."
    )
    value_limit: float = _setting(10.0, "Values beyond this many times the returns: explosion.")
    max_guard_trips: int = _setting(3, "Stop after this many restores of the last good state.")
    pack_tokens: int = _setting(768, "Tokens of one forward pass; prompts share prefixes in it.")
    effect_turns: int = _setting(8, "Best and worst turns per adapter measured before and after.")

    def __post_init__(self) -> None:
        if self.output_dir is None:  # the loop's scratch folder; adapters go to the registry
            self.output_dir = os.path.join(tempfile.gettempdir(), "marft-agents")
        if self.save_strategy in (False, "False"):  # what YAML makes of `no`
            self.save_strategy = "no"
        self._check()
        try:
            super().__post_init__()
        except (ValueError, TypeError, OSError) as error:
            raise ConfigError(f"a setting was refused: {str(error).splitlines()[0]}") from error

    def _check(self) -> None:
        refuse_managed(self)
        for name in ("gamma", "lam", "gamma_w", "lam_w", "replay_share"):
            self._must(name, 0 <= getattr(self, name) <= 1, "between 0 and 1")
        self._must("awr_skip_share", 0 <= self.awr_skip_share < 1, "from 0 to below 1")
        for name in _ABOVE_ZERO:
            self._must(name, getattr(self, name) > 0, "above 0")
        for name in ("save_steps", "logging_steps"):  # a share would be of no known total
            self._must(name, getattr(self, name) >= 1, "1 or more")
        for name in _NOT_NEGATIVE:
            self._must(name, getattr(self, name) >= 0, "0 or more")
        for known in fields(self):
            value = getattr(self, known.name)
            if isinstance(value, float) and not math.isfinite(value):
                off = known.name in _INFINITE_IS_OFF and value > 0
                self._must(known.name, off, "a finite number")
        for name in ("max_grad_norm", "critic_weight_decay"):
            self._must(name, getattr(self, name) >= 0, "0 or more")
        self._must("awr_weight_max", self.awr_weight_max <= 1e9, "at most 1e9")
        limit = self.save_total_limit
        self._must("save_total_limit", limit is None or limit > 0, "above 0, or left out")
        self._must("seed", 0 <= self.seed < 2**32, "between 0 and 4294967295")
        self._must("critic_folds", self.critic_folds >= 2, "2 or more")
        self._must("pack_tokens", self.pack_tokens >= 16, "16 or more")
        self._must("max_length", self.max_length is None or self.max_length > 1, "above 1")
        for name, choices in _CHOICES.items():
            self._must(name, getattr(self, name) in choices, f"one of {', '.join(choices)}")
        self._must("compound_clip", self.compound_clip >= 1, "1 or more")
        for name in ("epsilon_high", "importance_sampling_clip_min", "critic_value_clip"):
            value = getattr(self, name)
            self._must(name, value is None or value > 0, "above 0, or left out")
        least, most = self.importance_sampling_clip_min, self.importance_sampling_clip_max
        what = f"at most importance_sampling_clip_max ({most:g})"
        self._must("importance_sampling_clip_min", least is None or least <= most, what)
        self._must("lora_target_modules", bool(self.lora_target_modules), "at least one module")
        self._check_adapters()

    def _check_adapters(self) -> None:
        for adapter, settings in self.adapters.items():
            if not isinstance(settings, dict):
                raise ConfigError(
                    f"adapters: {adapter} is {settings!r}; it must be a mapping of settings"
                )
            for name, value in settings.items():
                if name not in ADAPTER_SETTINGS:
                    raise ConfigError(
                        f"adapters: {adapter}: unknown setting {name!r}; one of"
                        f" {', '.join(ADAPTER_SETTINGS)}"
                    )
                if name == "lora_target_modules":
                    good = isinstance(value, list) and bool(value)
                else:
                    good = isinstance(value, int | float) and 0 < value < math.inf
                if not good or isinstance(value, bool):
                    raise ConfigError(f"adapters: {adapter}: {name} is {value!r}")

    def of_adapter(self, adapter: str, name: str) -> Any:
        """A setting of one adapter: its own value, or the one for all."""
        return self.adapters.get(adapter, {}).get(name, getattr(self, name))

    def _must(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be {what}")
