"""TRL's GRPOTrainer on the same turns: one adapter for all of them, advantages given.

Invariant: generation is replaced by the recorded turns and nothing else is; splitting, scoring,
loss, clipping and Adam are TRL's own, with its padding to the longest turn of the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from benchmarks.trainer.common import (
    ALPHA,
    RANK,
    RATE,
    TARGETS,
    Clock,
    Timed,
    now,
    padded,
    token_count,
    turns_of,
)
from benchmarks.trainer.logs import ROWS, make_episodes
from marft_agents.schema import Turn


class _Recorded(GRPOTrainer):
    """Recorded turns in place of fresh completions."""

    turns: Sequence[Turn] = ()
    pad = 0

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        prompts, prompt_mask = padded(
            [t.prompt_token_ids or [] for t in self.turns], self.pad, left=True
        )
        replies, reply_mask = padded([t.token_ids or [] for t in self.turns], self.pad, left=False)
        advantages = [1.0 if n % 2 else -1.0 for n in range(len(self.turns))]
        return {
            "prompt_ids": prompts,
            "prompt_mask": prompt_mask,
            "completion_ids": replies,
            "completion_mask": reply_mask,
            "advantages": torch.tensor(advantages),
            "num_items_in_batch": reply_mask.sum(),
        }


class _Laps(TrainerCallback):
    """When each step ended, and the time inside steps until then."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.at: list[float] = []
        self.in_steps: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at.append(now())
        self.in_steps.append(self._clock.seconds)


def run(model_dir: Path, agents: int, scratch: Path) -> Timed:
    """A step to warm up, then ``agents`` steps that are timed."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    base: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, task_type="CAUSAL_LM")
    episodes = make_episodes(tokenizer, agents, "u1-")
    turns = turns_of(episodes)
    args = GRPOConfig(
        output_dir=str(scratch),
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=ROWS,
        steps_per_generation=agents,
        num_generations=2,
        max_steps=agents + 1,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        beta=0.0,
        loss_type="grpo",
        importance_sampling_level="sequence",
        logging_steps=1000,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = _Recorded(
        model=get_peft_model(base, lora),
        reward_funcs=_no_reward,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "-"}] * len(turns)),
        processing_class=tokenizer,
    )
    trainer.turns, trainer.pad = turns, tokenizer.pad_token_id or 0
    clock = Clock()
    trainer.training_step = clock.around(trainer.training_step)
    laps = _Laps(clock)
    trainer.add_callback(laps)
    trainer.train()
    return Timed(
        token_count(episodes),
        laps.at[-1] - laps.at[0],
        laps.in_steps[-1] - laps.in_steps[0],
    )


def _no_reward(completions: Sequence[Any], **_: Any) -> list[float | None]:
    """Compulsory, and never asked: advantages are given."""
    return [0.0] * len(completions)
