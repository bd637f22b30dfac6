"""Playing relays: all episodes at once, agent after agent.

Invariant: what is recorded is what was sampled. The ids are the sampled ones, the log-probabilities
those of the very distribution they were drawn from: the whole vocabulary at temperature 1. The next
agent reads the decoded words.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.learning.relay import Task, opening, verdict
from benchmarks.learning.words import Words
from marft_agents.schema import (
    Episode,
    EpisodeEnded,
    EpisodeStarted,
    RewardEvent,
    Sampling,
    Turn,
)

MOST_TOKENS = 4
_SAMPLING = Sampling(temperature=1.0)


@dataclass
class Reply:
    """Sampled ids (L,) and their log-probabilities (L,); the end token is one of them."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])


@torch.no_grad()
def _sample_alike(model: Any, prompts: Tensor, end: int, generator: torch.Generator) -> list[Reply]:
    """Replies to prompts (B, P) of one length."""
    replies = [Reply() for _ in prompts]
    going, ids, cache = [True] * len(prompts), prompts, None
    for _ in range(MOST_TOKENS):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        table = torch.log_softmax(out.logits[:, -1].float(), dim=-1)
        ids = torch.multinomial(table.exp(), 1, generator=generator)
        logp = table.gather(1, ids)[:, 0].tolist()
        for b, token in enumerate(ids[:, 0].tolist()):
            if going[b]:
                replies[b].token_ids.append(token)
                replies[b].logprobs.append(logp[b])
                going[b] = token != end
        if not any(going):
            break
    return replies


def sample(
    model: Any, prompts: Sequence[Sequence[int]], end: int, generator: torch.Generator
) -> list[Reply]:
    """Replies of the active adapter, in the order of the prompts; nothing is padded."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for b, prompt in enumerate(prompts):
        by_length[len(prompt)].append(b)
    out = [Reply()] * len(prompts)
    for rows in by_length.values():
        alike = torch.tensor([list(prompts[b]) for b in rows])
        for b, reply in zip(rows, _sample_alike(model, alike, end, generator), strict=True):
            out[b] = reply
    return out


@dataclass
class Relay:
    """One task being played."""

    task: Task
    prompts: list[list[int]] = field(default_factory=list[list[int]])
    replies: list[Reply] = field(default_factory=list[Reply])
    said: list[str] = field(default_factory=list[str])

    @property
    def reward(self) -> float:
        return verdict(self.task, self.said)


def play(
    model: Any,
    words: Words,
    tasks: Sequence[Task],
    adapters: Mapping[str, str],
    generator: torch.Generator,
) -> list[Relay]:
    """All tasks (of one team size), with one adapter per agent name."""
    relays = [Relay(task) for task in tasks]
    for agent, name in enumerate(tasks[0].names):
        model.set_adapter(adapters[name])
        for r in relays:
            r.prompts.append(words.prompt(r.task, agent, r.said[-1] if agent else opening(r.task)))
        replies = sample(model, [r.prompts[-1] for r in relays], words.end, generator)
        for r, reply in zip(relays, replies, strict=True):
            r.replies.append(reply)
            r.said.append(words.decode(reply.token_ids))
    return relays


def success(relays: Sequence[Relay]) -> float:
    return sum(r.reward for r in relays) / len(relays)


def as_episode(relay: Relay, name: str, adapters: Mapping[str, str], version: int) -> Episode:
    """The relay as the recorder would have written it: one step, hand-offs, one verdict."""
    turns = [
        Turn(
            episode_id=name,
            turn_id=f"{name}.{k}",
            agent=agent,
            index=k,
            text=relay.said[k],
            sampling=_SAMPLING,
            prompt_token_ids=relay.prompts[k],
            token_ids=relay.replies[k].token_ids,
            logprobs=relay.replies[k].logprobs,
            logprob_mode="processed",
            adapter_start=f"{adapters[agent]}@v{version}",
            adapter_end=f"{adapters[agent]}@v{version}",
            depends_on=[f"{name}.{k - 1}"] if k else [],
        )
        for k, agent in enumerate(relay.task.names)
    ]
    return Episode(
        episode_id=name,
        started=EpisodeStarted(episode_id=name, task=relay.task.text),
        turns=turns,
        rewards=[RewardEvent(episode_id=name, value=relay.reward)],
        ended=EpisodeEnded(episode_id=name),
    )
