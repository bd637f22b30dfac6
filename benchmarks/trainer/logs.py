"""The turns that every variant trains on: a chat of n agents, the same at any time.

Invariant: a function of its arguments, so every process makes the same tokens. In each episode
every agent speaks twice; its second prompt holds the first one and its own reply, as in any chat.
The rewards alternate, so that advantages differ. Log-probabilities are placeholders: no variant's
speed depends on them.
"""

from __future__ import annotations

import random
from typing import Any

from marft_agents.schema import (
    Episode,
    EpisodeEnded,
    EpisodeStarted,
    RewardEvent,
    Sampling,
    Turn,
)

EPISODES = 2
ROUNDS = 2
ROWS = EPISODES * ROUNDS
"""Turns of each agent: one optimizer step of each."""
_WORDS = (
    "the", "order", "was", "shipped", "on", "monday", "but", "two", "parts", "are", "missing",
    "and", "a", "customer", "asks", "for", "refund", "please", "check", "invoice", "then", "answer",
    "in", "one", "short", "line", "with", "plan", "name", "who", "does", "what", "next",
)  # fmt: skip
_SYSTEM, _ASKED, _REPLY, _MORE = 24, 24, 14, 16
"""Words of each part of a chat."""


def agent_names(agents: int) -> list[str]:
    return [f"agent-{n + 1}" for n in range(agents)]


def make_episodes(tokenizer: Any, agents: int, prefix: str = "e") -> list[Episode]:
    """``EPISODES`` scored episodes; agent after agent, round after round."""
    return [_episode(tokenizer, agents, f"{prefix}{n}", float(n % 2)) for n in range(EPISODES)]


def _say(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(_WORDS, k=words))


def _episode(tokenizer: Any, agents: int, name: str, reward: float) -> Episode:
    draw = random.Random(f"{name} {agents}")
    turns: list[Turn] = []
    chats: dict[str, list[dict[str, str]]] = {}
    for round_ in range(ROUNDS):
        for agent in agent_names(agents):
            system = _say(random.Random(agent), _SYSTEM)
            chat = chats.setdefault(agent, [{"role": "system", "content": system}])
            chat.append({"role": "user", "content": _say(draw, _MORE if round_ else _ASKED)})
            turns.append(_turn(tokenizer, draw, name, agent, len(turns), chat))
            chat.append({"role": "assistant", "content": turns[-1].text or ""})
    return Episode(
        episode_id=name,
        started=EpisodeStarted(episode_id=name, task=_say(draw, 12)),
        turns=turns,
        rewards=[RewardEvent(episode_id=name, value=reward)],
        ended=EpisodeEnded(episode_id=name),
    )


def _turn(
    tokenizer: Any,
    draw: random.Random,
    episode: str,
    agent: str,
    index: int,
    chat: list[dict[str, str]],
) -> Turn:
    text = _say(draw, _REPLY)
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    return Turn(
        episode_id=episode,
        turn_id=f"{episode}.{index}",
        agent=agent,
        index=index,
        text=text,
        sampling=Sampling(temperature=1.0),
        prompt_token_ids=tokenizer.encode(prompt, add_special_tokens=False),
        token_ids=ids,
        logprobs=[-2.0] * len(ids),
        logprob_mode="processed",
        depends_on=[f"{episode}.{index - 1}"] if index else [],
    )
