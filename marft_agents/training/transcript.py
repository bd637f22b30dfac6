"""The team's joint transcript: what the critic reads.

Invariant: a line is written once, in order, so one causal pass over the whole transcript sees
before each border exactly what the team had seen by then. A border has two places: after the
separator (who speaks next is not known) and after the speaker's name (it is).

Text is tokenised here; that is harmless, because no token of it is ever trained on. Where values
before every token are wanted, an action stands there with the ids that were sampled.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from marft_agents.credit import is_action
from marft_agents.schema import Episode, HumanEvent, ToolEvent, Turn

SEPARATOR = "\n###\n"


class Line(NamedTuple):
    """One thing said; ``action`` marks the actions of the advantage recursion."""

    speaker: str
    text: str
    action: bool = False


@dataclass(frozen=True)
class Borders:
    """Token ids (T,) of one transcript and where its borders are.

    ``open_K`` and ``named_K`` (K,) index the last token before action k without and with the
    speaker's name; ``final`` indexes the last separator, after everything was said. The state
    before token j of an action lies j - 1 tokens after its named border; ``length_K`` says how many
    such states there are: the sampled tokens, or 1 for an action given as text.
    """

    ids: array[int]
    open_K: list[int]
    named_K: list[int]
    final: int
    length_K: list[int] = field(default_factory=list[int])


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _spoken(turn: Turn) -> str:
    text = turn.edited_text if turn.edited_text is not None else turn.text
    if not turn.tool_calls:
        return text or ""
    calls = [_as_text(call.get("function", call)) for call in turn.tool_calls]
    return "\n".join(part for part in (text or "", *calls) if part)


def transcript_lines(episode: Episode, order: Sequence[Turn]) -> list[Line]:
    """Task, turns in credit order, and before each turn what the environment said until then.

    Failed calls and speaker selections are left out: nobody in the team read them.
    """
    lines = [Line("task", _as_text(episode.task))] if episode.task is not None else []
    others: list[ToolEvent | HumanEvent] = [*episode.tools, *episode.humans]
    waiting = sorted(others, key=lambda event: event.time)
    for turn in order:
        if turn.error is not None or turn.kind == "select":
            continue
        while waiting and waiting[0].time < turn.time:
            lines.append(_environment(waiting.pop(0)))
        lines.append(Line(turn.agent, _spoken(turn), is_action(turn)))
    return lines + [_environment(event) for event in waiting]


def _environment(event: ToolEvent | HumanEvent) -> Line:
    if isinstance(event, ToolEvent):
        return Line(f"tool {event.name}", _as_text(event.result))
    return Line(event.name or "human", event.text or "")


def tokenise(
    lines: Sequence[Line],
    encode: Callable[[str], list[int]],
    sampled_K: Sequence[Sequence[int] | None] = (),
) -> Borders:
    """Token ids of the transcript; pieces are encoded one by one, so a border is a token's end.

    Where ``sampled_K`` has the ids of an action, they stand in it instead of its text.
    """
    separator = encode(SEPARATOR)
    out = Borders(array("q"), [], [], 0, [])
    ids = out.ids
    for line in lines:
        ids.extend(separator)
        if line.action:
            out.open_K.append(len(ids) - 1)
        ids.extend(encode(f"{line.speaker}:"))
        sampled = None
        if line.action:
            k = len(out.named_K)
            sampled = sampled_K[k] if sampled_K else None
            out.named_K.append(len(ids) - 1)
            out.length_K.append(len(sampled) if sampled else 1)
        ids.extend(iter(sampled or encode(f" {line.text}")))  # arrays of another width too
    ids.extend(separator)
    return replace(out, final=len(ids) - 1)
