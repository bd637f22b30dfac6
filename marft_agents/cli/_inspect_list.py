"""One line an episode, to find the one to look at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from marft_agents.cli._text import number, printable, table
from marft_agents.log import LogReader
from marft_agents.schema import Episode

_TASK_LENGTH = 48


def listed(episode: Episode) -> dict[str, Any]:
    """What the list says of one episode."""
    return {
        "episode_id": episode.episode_id,
        "reward": episode.team_reward,
        "agent_rewards": episode.agent_rewards,
        "turns": len(episode.turns),
        "ended": episode.ended.reason if episode.ended else None,
        "left_out": episode.untrainable_reason,
        "task": episode.task,
    }


def list_json(reader: LogReader) -> dict[str, Any]:
    """Every episode, in order of first appearance."""
    return {"episodes": [listed(episode) for episode in reader.episodes()]}


def list_lines(reader: LogReader) -> Iterator[str]:
    """The same for people."""
    rows: list[tuple[str, ...]] = []
    reasons: list[str] = []
    for seen in map(listed, reader.episodes()):
        task = printable(" ".join(str(seen["task"] if seen["task"] is not None else "-").split()))
        short = task if len(task) <= _TASK_LENGTH else task[: _TASK_LENGTH - 1] + "…"
        rows.append(
            (
                seen["episode_id"],
                number(seen["reward"]),
                str(seen["turns"]),
                seen["ended"] or "not ended",
                short,
            )
        )
        if seen["left_out"]:
            reasons.append(f"{seen['episode_id']} is left out: {seen['left_out']}")
    yield from table(("episode", "reward", "turns", "ended", "task"), rows, right=(1, 2))
    if reasons:
        yield ""
        yield from reasons
