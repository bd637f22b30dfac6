"""How an episode that a run opened ends, whatever ``on_end`` does."""

from __future__ import annotations

import pytest

from marft_agents.recording import ConfigError, EpisodeHandle, end_run
from marft_agents.schema import EpisodeEnded, RewardEvent
from tests.recording.kit import recording, sdk


def test_on_end_comes_before_the_end() -> None:
    with recording() as (_, recorder, log):
        live = recorder.open_episode("task", "app 1.0")
        end_run(live, "truncated", "a limit", lambda episode, seen: episode.reward(seen), 0.5)
    kinds = [type(e) for e in log.events if isinstance(e, RewardEvent | EpisodeEnded)]
    assert kinds == [RewardEvent, EpisodeEnded]
    assert log.of(EpisodeEnded)[0].reason == "truncated"


def test_an_exit_in_on_end_ends_the_episode_first() -> None:
    def leave(episode: EpisodeHandle, result: object) -> None:
        raise SystemExit(3)

    with recording() as (_, recorder, log):
        live = recorder.open_episode("task", "app 1.0")
        with pytest.raises(SystemExit):
            end_run(live, "terminated", None, leave, 1)
    assert [e.reason for e in log.of(EpisodeEnded)] == ["terminated"]


def test_what_on_end_leaves_to_await_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async def score(episode: EpisodeHandle) -> None:
        episode.reward(1.0)

    with recording() as (_, recorder, log):
        for _ in range(2):
            live = recorder.open_episode("task", "app 1.0")
            end_run(live, "terminated", None, lambda episode, _: score(episode), 1)
    assert len(log.of(EpisodeEnded)) == 2 and not log.of(RewardEvent)
    assert caplog.text.count("nobody can await it") == 1


@pytest.mark.parametrize("name", ["", "  ", "half \ud800", None, 7])
def test_an_agent_has_a_name(name: str) -> None:
    with recording() as (server, recorder, _), pytest.raises(ConfigError, match="is a name"):
        recorder.attach_client(sdk(server), name)
