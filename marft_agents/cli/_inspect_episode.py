"""One episode, turn by turn.

Invariant: a number that is not known is ``-`` (``null`` in JSON), never 0. Values and advantages
belong to a training run and are joined from its ``credit.jsonl`` by (episode id, turn id).
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from marft_agents.cli._text import number, table
from marft_agents.errors import LogError
from marft_agents.schema import Episode, HumanEvent, ToolEvent, Turn

_CREDIT_FIELDS = ("value", "advantage", "delta")
_HEADER = (
    "#", "agent", "kind", "step", "after", "prompt", "tokens", "log-prob sum", "reward",
    "value", "advantage", "trainable",
)  # fmt: skip


@dataclass
class Credit:
    """Value, advantage and delta per turn id, and where they come from or why there are none."""

    turns: dict[str, dict[str, float | None]] = field(
        default_factory=dict[str, dict[str, float | None]]
    )
    note: str = (
        "value, advantage: not known; training computes them: give the credit.jsonl that"
        " `marft-agents finetune` wrote with --credit"
    )

    def of(self, turn: Turn) -> Mapping[str, float | None]:
        return self.turns.get(turn.turn_id, dict.fromkeys(_CREDIT_FIELDS))


def read_credit(path: Path, episode_id: str) -> Credit:
    """Credit of one episode; the last line about a turn counts.

    Raises:
        LogError: ``path`` (or ``path/credit.jsonl``, when it is a folder) cannot be read.
    """
    path = path / "credit.jsonl" if path.is_dir() else path
    credit = Credit()
    skipped = 0
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    record: Any = json.loads(line)
                except (ValueError, RecursionError):
                    skipped += 1
                    continue
                if isinstance(record, dict):
                    _join(credit, cast("dict[str, Any]", record), episode_id)
    except OSError as error:
        raise LogError(f"cannot read the credit file {path}: {error.strerror}") from error
    credit.note = f"value, advantage: from {path}"
    if not credit.turns:
        credit.note = f"value, advantage: not known; {path} has no line about this episode"
    if skipped:
        credit.note += f" ({skipped} unreadable lines skipped)"
    return credit


def _join(credit: Credit, record: dict[str, Any], episode_id: str) -> None:
    turn_id = record.get("turn_id")
    if record.get("episode_id") == episode_id and isinstance(turn_id, str):
        credit.turns[turn_id] = {name: _finite(record.get(name)) for name in _CREDIT_FIELDS}


def _finite(value: Any) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def _logprob_sum(turn: Turn) -> float | None:
    return None if turn.logprobs is None else _finite(sum(turn.logprobs))


def episode_json(episode: Episode, credit: Credit) -> dict[str, Any]:
    """The episode as one document; messages and prompts are left to the log itself."""
    return {
        "episode_id": episode.episode_id,
        "started": episode.started,
        "ended": episode.ended,
        "scored": episode.scored,
        "rewards": {
            "team": episode.team_reward,
            "agents": episode.agent_rewards,
            "turns": episode.turn_rewards,
            "refused": [reward.refused for reward in episode.refused_rewards],
        },
        "trainable": episode.untrainable_reason is None,
        "untrainable_reason": episode.untrainable_reason,
        "credit": credit.note,
        "turns": [_turn_json(turn, episode, credit) for turn in episode.turns],
        "tools": episode.tools,
        "humans": episode.humans,
        "sources": episode.sources,
    }


def _turn_json(turn: Turn, episode: Episode, credit: Credit) -> dict[str, Any]:
    seen = turn.model_dump(exclude={"messages", "prompt_token_ids", "schema_version", "type"})
    return {
        **seen,
        "prompt_tokens": len(turn.prompt_token_ids or ()),
        "tokens": len(turn.token_ids or ()),
        "logprob_sum": _logprob_sum(turn),
        "reward": episode.turn_rewards.get(turn.turn_id),
        **credit.of(turn),
        "trainable": turn.trainable,
        "untrainable_reason": turn.untrainable_reason,
    }


def episode_lines(episode: Episode, credit: Credit, *, tokens: bool) -> Iterator[str]:
    """The episode, for people."""
    yield from _head_lines(episode, credit)
    yield ""
    yield from _turn_table(episode, credit)
    places = {turn.turn_id: place for place, turn in enumerate(episode.turns)}
    world = sorted([*episode.tools, *episode.humans], key=lambda event: event.time)
    for event in heapq.merge(episode.turns, world, key=lambda event: event.time):
        yield ""
        if isinstance(event, Turn):
            yield from _said_lines(event, places[event.turn_id], tokens=tokens)
        else:
            yield from _world_lines(event)


def _head_lines(episode: Episode, credit: Credit) -> Iterator[str]:
    yield f"episode {episode.episode_id}"
    if episode.started:
        parent = episode.started.parent_id
        yield f"started    {episode.started.time.isoformat()}" + (
            f", inside episode {parent}" if parent else ""
        )
    if episode.task is not None:
        yield "task       " + (
            episode.task if isinstance(episode.task, str) else _short(episode.task)
        )
    if episode.metadata:
        yield f"metadata   {_short(episode.metadata)}"
    yield f"ended      {_ending(episode)}"
    yield f"reward     {_reward(episode)}"
    yield f"trainable  {_why(episode.untrainable_reason)}"
    yield credit.note


def _ending(episode: Episode) -> str:
    if episode.ended is None:
        return "not recorded"
    detail = f" ({episode.ended.detail})" if episode.ended.detail else ""
    dropped = episode.ended.dropped_events
    lost = f"; incomplete: {dropped} events could not be recorded" if dropped else ""
    return f"{episode.ended.reason}{detail}{lost}"


def _reward(episode: Episode) -> str:
    parts = [f"team {number(episode.team_reward)}"]
    parts += [f"{agent} {number(value)}" for agent, value in episode.agent_rewards.items()]
    parts += [f"refused: {reward.refused}" for reward in episode.refused_rewards]
    return ", ".join(parts)


def _turn_table(episode: Episode, credit: Credit) -> list[str]:
    places = {turn.turn_id: str(place) for place, turn in enumerate(episode.turns)}
    rows = [
        (
            str(place),
            turn.agent,
            turn.kind,
            str(turn.step),
            _saw(turn, places),
            str(len(turn.prompt_token_ids or ())),
            str(len(turn.token_ids or ())),
            number(_logprob_sum(turn)),
            number(episode.turn_rewards.get(turn.turn_id)),
            number(credit.of(turn)["value"]),
            number(credit.of(turn)["advantage"]),
            _why(turn.untrainable_reason),
        )
        for place, turn in enumerate(episode.turns)
    ]
    return table(_HEADER, rows, right=(0, 3, 5, 6, 7, 8, 9, 10))


def _saw(turn: Turn, places: Mapping[str, str]) -> str:
    names = [places.get(name, f"unknown turn {name}") for name in turn.depends_on]
    return ",".join(names if turn.depends_on_complete else [*names, "older?"]) or "-"


def _said_lines(turn: Turn, place: int, *, tokens: bool) -> Iterator[str]:
    answered = turn.adapter_end or turn.adapter_start or turn.model or "unknown model"
    finish = turn.finish_reason or "-"
    yield f"#{place} {turn.agent} (turn {turn.turn_id}, {answered}, finish: {finish})"
    if turn.error is not None:
        yield from _indented(f"error: {turn.error}")
    if turn.text is not None:
        yield from _indented(turn.text)
    for call in turn.tool_calls or ():
        yield from _indented(f"calls {_short(call.get('function', call))}")
    if turn.edited_text is not None:
        yield from _indented(f"edited by a human to: {turn.edited_text}")
    if tokens:
        yield from _indented(f"token ids: {turn.token_ids}")
        yield from _indented(f"log-probs: {turn.logprobs} ({turn.logprob_mode or 'mode unknown'})")


def _world_lines(event: ToolEvent | HumanEvent) -> Iterator[str]:
    if isinstance(event, HumanEvent):
        yield f"human {event.name or ''}".rstrip()
        yield from _indented(event.text or "")
        return
    yield f"tool {event.name}{'' if event.ok else ' (failed)'}"
    yield from _indented(f"arguments: {_short(event.arguments)}")
    yield from _indented(event.result if isinstance(event.result, str) else _short(event.result))


def _indented(text: str) -> Iterator[str]:
    yield from (f"    {line}" for line in text.split("\n"))


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _why(reason: str | None) -> str:
    return "yes" if reason is None else f"no: {reason}"
