"""Fold the events of one episode into an ``Episode``.

Invariant: the result does not depend on which file an event came from. A turn recorded twice is
recognised by (response id, choice index) and by nothing else, so the same words said twice stay two
turns. Replies from a cache carry an older id on purpose and are kept: they are part of what the
other agents saw, and are never trained on.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from marft_agents.schema import (
    AnyEvent,
    EditEvent,
    Episode,
    EpisodeEnded,
    EpisodeStarted,
    HumanEvent,
    RewardEvent,
    ToolEvent,
    Turn,
)


class Folded(NamedTuple):
    """An episode and the number of duplicate turns that were left out of it."""

    episode: Episode
    duplicates: int


def fold(episode_id: str, events: Iterable[tuple[AnyEvent, str]]) -> Folded:
    """Fold (event, file) pairs; their order decides only between events of the same time.

    The earliest ``episode_started`` counts, and the latest ``episode_ended``.
    """
    turns: list[Turn] = []
    tools: list[ToolEvent] = []
    humans: list[HumanEvent] = []
    rewards: list[RewardEvent] = []
    edits: list[EditEvent] = []
    started: EpisodeStarted | None = None
    ended: EpisodeEnded | None = None
    sources: dict[str, None] = {}
    for event, source in events:
        sources[source] = None
        match event:
            case Turn():
                turns.append(event)
            case ToolEvent():
                tools.append(event)
            case HumanEvent():
                humans.append(event)
            case RewardEvent():
                rewards.append(event)
            case EditEvent():
                edits.append(event)
            case EpisodeStarted():
                started = event if started is None or event.time < started.time else started
            case EpisodeEnded():
                ended = event if ended is None or event.time >= ended.time else ended
    kept, same_as = without_duplicates(turns)
    episode = Episode(
        episode_id=episode_id,
        started=started,
        turns=_edited(
            [with_known_turns(t, same_as) for t in kept] if same_as else kept, edits, same_as
        ),
        tools=sorted(tools, key=_place),
        humans=sorted(humans, key=_place),
        rewards=[with_known_turn(reward, same_as) for reward in rewards],
        ended=ended,
        sources=list(sources),
    )
    return Folded(episode, len(turns) - len(kept))


def _place(event: Turn | ToolEvent | HumanEvent) -> tuple[int, datetime]:
    return event.index, event.time


def without_duplicates(turns: Iterable[Turn]) -> tuple[list[Turn], dict[str, str]]:
    """The turns by (index, time) without repetitions; for each id that went the one that stayed."""
    first: dict[tuple[str, int], Turn] = {}
    kept: list[Turn] = []
    same_as: dict[str, str] = {}
    for turn in sorted(turns, key=_place):
        if turn.response_id is None or turn.cached:
            kept.append(turn)
            continue
        original = first.setdefault((turn.response_id, turn.choice_index), turn)
        if original is turn:
            kept.append(turn)
        elif original.turn_id != turn.turn_id:
            same_as[turn.turn_id] = original.turn_id
    return kept, same_as


def _edited(turns: list[Turn], edits: list[EditEvent], same_as: dict[str, str]) -> list[Turn]:
    """The turns with the text that somebody put in place of theirs; the latest edit counts."""
    latest = {
        same_as.get(edit.turn_id, edit.turn_id): edit.text
        for edit in sorted(edits, key=lambda edit: edit.time)
    }
    if not latest:
        return turns
    return [
        turn.model_copy(update={"edited_text": latest[turn.turn_id]})
        if turn.turn_id in latest
        else turn
        for turn in turns
    ]


def with_known_turns(turn: Turn, same_as: dict[str, str]) -> Turn:
    """The turn naming the turns that stayed in place of those that went."""
    if not same_as:
        return turn
    named = {turn.selected_by, turn.parent_turn, *turn.depends_on}
    if same_as.keys().isdisjoint(named):
        return turn
    changes: dict[str, object] = {
        "depends_on": list(dict.fromkeys(same_as.get(name, name) for name in turn.depends_on))
    }
    for field in ("selected_by", "parent_turn"):
        name = getattr(turn, field)
        changes[field] = same_as.get(name, name)
    return turn.model_copy(update=changes)


def with_known_turn(reward: RewardEvent, same_as: dict[str, str]) -> RewardEvent:
    """The reward of the turn that stayed in place of one that went."""
    if reward.turn_id not in same_as:
        return reward
    return reward.model_copy(update={"turn_id": same_as[reward.turn_id]})
