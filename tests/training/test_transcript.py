"""The joint transcript and its borders."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from marft_agents.credit import dependency_order
from marft_agents.schema import Episode, EpisodeStarted, HumanEvent, ToolEvent, Turn
from marft_agents.training.transcript import SEPARATOR, Line, tokenise, transcript_lines

START = datetime(2025, 1, 1, tzinfo=UTC)


def at(second: int) -> datetime:
    return START + timedelta(seconds=second)


def said(index: int, agent: str, text: str | None, **fields: Any) -> Turn:
    return Turn(
        episode_id="e",
        turn_id=f"t{index}",
        agent=agent,
        index=index,
        text=text,
        time=at(10 * index),
        **fields,
    )


def characters(text: str) -> list[int]:
    return [ord(c) for c in text]


def test_everything_the_team_read_is_there_in_order() -> None:
    episode = Episode(
        episode_id="e",
        started=EpisodeStarted(episode_id="e", task="sort 3 1 2"),
        turns=[
            said(0, "planner", "use a tool"),
            said(1, "selector", "coder", kind="select"),
            said(2, "coder", None, error="timeout"),
            said(3, "coder", "1 2 3", edited_text="1, 2, 3"),
            said(4, "coder", "done", kind="summary"),
        ],
        tools=[ToolEvent(episode_id="e", name="run", result={"ok": 1}, time=at(5))],
        humans=[HumanEvent(episode_id="e", name="ann", text="thanks", time=at(99))],
    )
    lines = transcript_lines(episode, dependency_order(episode.turns))
    assert lines == [
        Line("task", "sort 3 1 2"),
        Line("planner", "use a tool", action=True),
        Line("tool run", '{"ok": 1}'),
        Line("coder", "1, 2, 3", action=True),
        Line("coder", "done"),
        Line("ann", "thanks"),
    ]


def test_borders_lie_before_the_action_without_and_with_the_speaker() -> None:
    borders = tokenise([Line("task", "x"), Line("a", "yes", True)], characters)
    text = "".join(map(chr, borders.ids))
    assert text == f"{SEPARATOR}task: x{SEPARATOR}a: yes{SEPARATOR}"
    assert text[: borders.open_K[0] + 1] == f"{SEPARATOR}task: x{SEPARATOR}"
    assert text[: borders.named_K[0] + 1] == f"{SEPARATOR}task: x{SEPARATOR}a:"
    assert borders.final == len(text) - 1


def test_sampled_ids_stand_in_an_action_instead_of_its_text() -> None:
    lines = [Line("a", "yes", True), Line("b", "no", True)]
    borders = tokenise(lines, characters, [None, [900, 901, 902]])
    assert borders.length_K == [1, 3]
    named = borders.named_K[1]
    assert list(borders.ids[named + 1 : named + 4]) == [900, 901, 902]
    assert "".join(map(chr, borders.ids[named + 4 :])) == SEPARATOR
    assert "".join(map(chr, borders.ids[: borders.named_K[0] + 1])) == f"{SEPARATOR}a:"
