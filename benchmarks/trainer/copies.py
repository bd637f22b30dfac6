"""What a direct implementation does: every agent a model of its own, and a critic besides.

Written for this comparison. One copy of the base per agent with its adapter, one more for the
critic; the critic reads the prompt of each turn again, one pass a turn; batches are padded and give
logits at every place. The loss is the same clipped surrogate per action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.trainer.common import (
    ALPHA,
    RANK,
    RATE,
    TARGETS,
    Timed,
    now,
    padded,
    token_count,
    turns_of,
)
from benchmarks.trainer.logs import agent_names, make_episodes
from marft_agents.credit import action_gae, normalise
from marft_agents.schema import Episode, Turn

_CLIP, _CRITIC_PASSES = 0.2, 60


@dataclass
class _Agent:
    model: Any
    optimizer: torch.optim.Optimizer


class _Critic:
    """A head on a base of its own."""

    def __init__(self, model_dir: Path) -> None:
        self.base: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        width = self.base.config.hidden_size
        self.head = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, 1))
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=1e-3)

    @torch.no_grad()
    def read(self, turn: Turn) -> Tensor:
        """Hidden state (H,) at the end of a turn's prompt."""
        ids = torch.tensor([turn.prompt_token_ids])
        return self.base.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, -1]

    def values(self, episode: Episode) -> list[float]:
        """V before each turn; then the head learns from the episode's reward."""
        features = torch.stack([self.read(turn) for turn in episode.turns])
        values: list[float] = self.head(features)[:, 0].tolist()
        target = torch.full((len(values),), episode.team_reward or 0.0)
        for _ in range(_CRITIC_PASSES):
            loss = nn.functional.huber_loss(self.head(features)[:, 0], target)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return values


def _agent(model_dir: Path) -> _Agent:
    base: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, task_type="CAUSAL_LM")
    model: Any = get_peft_model(base, lora)
    trained = [p for p in model.parameters() if p.requires_grad]
    return _Agent(model, torch.optim.AdamW(trained, lr=RATE))


def _logp(model: Any, turns: Sequence[Turn], pad: int) -> tuple[Tensor, Tensor]:
    """log π of the replies' tokens (B, L) and their mask."""
    prompts, before = padded([t.prompt_token_ids or [] for t in turns], pad, left=True)
    replies, mask = padded([t.token_ids or [] for t in turns], pad, left=False)
    logits = model(
        input_ids=torch.cat([prompts, replies], 1),
        attention_mask=torch.cat([before, mask], 1),
        use_cache=False,
    ).logits[:, prompts.shape[1] - 1 : -1]
    return torch.log_softmax(logits, -1).gather(2, replies[..., None])[..., 0], mask


def _step(agent: _Agent, turns: Sequence[Turn], advantages: Sequence[float], pad: int) -> None:
    with torch.no_grad():
        old, _ = _logp(agent.model, turns, pad)
    logp, mask = _logp(agent.model, turns, pad)
    ratio = (((logp - old) * mask).sum(1) / mask.sum(1)).exp()
    advantage = torch.tensor(advantages)
    clipped = ratio.clamp(1 - _CLIP, 1 + _CLIP)
    loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
    agent.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(agent.model.parameters(), 1.0)
    agent.optimizer.step()


def run(model_dir: Path, agents: int, scratch: Path) -> Timed:
    """One agent's step to warm up, then an update of all of them."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    team = {name: _agent(model_dir) for name in agent_names(agents)}
    critic, timed = _Critic(model_dir), list[Timed]()
    for update, count in enumerate((1, agents)):
        episodes = make_episodes(tokenizer, count, f"u{update}-")
        started = now()
        advantage: dict[str, float] = {}
        for episode in episodes:
            values = critic.values(episode)
            rewards = [0.0] * (len(values) - 1) + [episode.team_reward or 0.0]
            credit = action_gae(rewards, values, [0] * len(values), gamma=1.0, lam=0.95)
            ids = [turn.turn_id for turn in episode.turns]
            advantage |= dict(zip(ids, credit.advantage_K, strict=True))
        in_steps = now()
        for name in agent_names(count):
            agent, turns = team[name], turns_of(episodes, name)
            scaled = normalise([advantage[t.turn_id] for t in turns], [name] * len(turns), "agent")
            _step(agent, turns, scaled, tokenizer.pad_token_id or 0)
        ended = now()
        timed.append(Timed(token_count(episodes), ended - started, ended - in_steps))
    return timed[-1]
