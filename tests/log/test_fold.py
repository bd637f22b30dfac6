"""An episode is the same whichever file its events came from."""

from __future__ import annotations

import itertools

from marft_agents.log.fold import fold
from marft_agents.schema import AnyEvent, EpisodeEnded, EpisodeStarted, HumanEvent, ToolEvent
from tests.log.events import at, turn


def test_the_order_of_files_does_not_matter() -> None:
    files: list[list[AnyEvent]] = [
        [
            EpisodeStarted(episode_id="e", time=at(0), task="of the app"),
            turn(0),
            ToolEvent(episode_id="e", time=at(1), name="first", index=1),
        ],
        [
            ToolEvent(episode_id="e", time=at(2), name="second", index=1),
            HumanEvent(episode_id="e", time=at(3), text="a", index=1),
            turn(1),
            EpisodeEnded(episode_id="e", time=at(9), reason="terminated"),
        ],
        [
            EpisodeStarted(episode_id="e", time=at(4), task=None, runtime="gateway"),
            HumanEvent(episode_id="e", time=at(5), text="b", index=2),
            turn(2),
            EpisodeEnded(episode_id="e", time=at(6), reason="failed"),
        ],
    ]
    seen: list[str] = []
    for order in itertools.permutations(files):
        episode = fold("e", [(event, "f") for file in order for event in file]).episode
        assert episode.task == "of the app"
        assert episode.ended is not None and episode.ended.reason == "terminated"
        assert [t.name for t in episode.tools] == ["first", "second"]
        assert [h.text for h in episode.humans] == ["a", "b"]
        seen.append(episode.model_dump_json())
    assert len(set(seen)) == 1
