"""Fold the events of one episode into an ``Episode``.

Invariant: the result does not depend on which file an event came from. A turn recorded twice is
recognised by (response id, choice index) and by nothing else, so the same words said twice stay two
turns. Replies from a cache carry an older id on purpose and are kept: they are part of what the
other agents saw, and are never trained on.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    """Fold (event, file) pairs, in the order of their appearance.

    The first ``episode_started`` counts, and the ``episode_ended`` with the latest time.
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
                started = started or event
            case EpisodeEnded():
                ended = event if ended is None or event.time >= ended.time else ended
    kept, same_as = _without_duplicates(sorted(turns, key=lambda turn: (turn.index, turn.time)))
    episode = Episode(
        episode_id=episode_id,
        started=started,
        turns=_edited([_with_known_dependencies(turn, same_as) for turn in kept], edits, same_as),
        tools=tools,
        humans=humans,
        rewards=[_with_known_turn(reward, same_as) for reward in rewards],
        ended=ended,
        sources=list(sources),
    )
    return Folded(episode, len(turns) - len(kept))


def _without_duplicates(turns: list[Turn]) -> tuple[list[Turn], dict[str, str]]:
    """The turns without repetitions, and for each id that went the id that stayed."""
    first: dict[tuple[str, int], Turn] = {}
    kept: list[Turn] = []
    same_as: dict[str, str] = {}
    for turn in turns:
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


def _with_known_dependencies(turn: Turn, same_as: dict[str, str]) -> Turn:
    if same_as.keys().isdisjoint(turn.depends_on):
        return turn
    names = dict.fromkeys(same_as.get(name, name) for name in turn.depends_on)
    return turn.model_copy(update={"depends_on": list(names)})


def _with_known_turn(reward: RewardEvent, same_as: dict[str, str]) -> RewardEvent:
    if reward.turn_id not in same_as:
        return reward
    return reward.model_copy(update={"turn_id": same_as[reward.turn_id]})
