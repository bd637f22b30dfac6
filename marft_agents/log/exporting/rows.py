"""One flat row a turn, for tables: what the ``hf`` and ``parquet`` exports hold.

``return`` is what came to the turn's agent from this turn on: the team's reward, the agent's own,
and the rewards of this and later turns; null when the episode was never scored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

from marft_agents.schema import Episode, JsonDict, Turn

TEXT, INT, FLOAT, BOOL, TIME = "string", "int64", "float64", "bool", "timestamp"
INTS, FLOATS, TEXTS, MESSAGES = "ints", "floats", "strings", "messages"
COLUMNS: dict[str, str] = {
    "episode_id": TEXT,
    "turn_id": TEXT,
    "agent": TEXT,
    "kind": TEXT,
    "index": INT,
    "step": INT,
    "time": TIME,
    "task": TEXT,
    "metadata": TEXT,
    "runtime": TEXT,
    "messages": MESSAGES,
    "text": TEXT,
    "reasoning": TEXT,
    "tool_calls": TEXT,
    "prompt_token_ids": INTS,
    "token_ids": INTS,
    "logprobs": FLOATS,
    "logprob_mode": TEXT,
    "temperature": FLOAT,
    "top_p": FLOAT,
    "finish_reason": TEXT,
    "model": TEXT,
    "adapter_start": TEXT,
    "adapter_end": TEXT,
    "response_id": TEXT,
    "choice_index": INT,
    "depends_on": TEXTS,
    "selected_by": TEXT,
    "parent_agent": TEXT,
    "parent_turn": TEXT,
    "latency_s": FLOAT,
    "cached": BOOL,
    "edited_text": TEXT,
    "error": TEXT,
    "trainable": BOOL,
    "left_out": TEXT,
    "turn_reward": FLOAT,
    "agent_reward": FLOAT,
    "team_reward": FLOAT,
    "return": FLOAT,
    "ended": TEXT,
}
MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id")


def turn_rows(episodes: Iterable[Episode]) -> Iterator[JsonDict]:
    """A row for every turn, with every column."""
    for episode in episodes:
        for turn in episode.turns:
            yield _row(episode, turn)


def _row(episode: Episode, turn: Turn) -> JsonDict:
    why = turn.untrainable_reason or episode.untrainable_reason
    known: JsonDict = {
        "task": as_text(episode.task),
        "metadata": _json(episode.metadata),
        "runtime": episode.started.runtime if episode.started else None,
        "messages": [
            {name: as_text(message.get(name)) for name in MESSAGE_FIELDS}
            for message in turn.messages
        ],
        "tool_calls": _json(turn.tool_calls),
        "temperature": turn.sampling.temperature,
        "top_p": turn.sampling.top_p,
        "trainable": why is None,
        "left_out": why,
        "turn_reward": episode.turn_rewards.get(turn.turn_id),
        "agent_reward": episode.agent_rewards.get(turn.agent),
        "team_reward": episode.team_reward,
        "return": return_of(episode, turn),
        "ended": episode.ended.reason if episode.ended else None,
    }
    return {name: known[name] if name in known else getattr(turn, name) for name in COLUMNS}


def return_of(episode: Episode, turn: Turn) -> float | None:
    """Rewards from this turn on that are the team's or its agent's; ``None`` if never scored."""
    if not episode.scored:
        return None
    given = episode.turn_rewards
    later = [given.get(t.turn_id, 0.0) for t in episode.turns if t.index >= turn.index]
    own = episode.agent_rewards.get(turn.agent, 0.0)
    return math.fsum([episode.team_reward or 0.0, own, *later])


def as_text(value: Any) -> str | None:
    """Text as it is, anything else as JSON."""
    return value if value is None or isinstance(value, str) else _json(value)


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False, default=str)
