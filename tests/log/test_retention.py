"""Old segments go when told so: oldest first, never one in use, and never silently."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import ConfigError
from marft_agents.log import LogReader, LogWriter, Retention
from marft_agents.log import retention as retention_module
from marft_agents.log.segment import LineFile, in_use
from marft_agents.schema import EpisodeEnded, EpisodeStarted, Event, RewardEvent
from tests.log.events import turn

DAY_S = 86_400.0
DEAD = 2**22 + 1
"""A process number beyond the largest that Linux gives."""


def segment(
    folder: Path, number: int, *events: Event, age_days: float = 0, pid: int = DEAD
) -> Path:
    """A closed segment of a process that is no more (or of ``pid``)."""
    with LogWriter(folder / "made") as writer:
        for event in events:
            writer.write(event)
        made = writer.path
    assert made is not None
    host = made.name.split("Z-", 1)[1].rsplit("-", 2)[0]
    path = folder / f"events-20260101T000000Z-{host}-{pid}-{number:08x}.jsonl"
    made.rename(path)
    made.parent.rmdir()
    old = time.time() - age_days * DAY_S - 100 + number
    os.utime(path, (old, old))
    return path


def whole(name: str, **ended: Any) -> list[Event]:
    return [
        EpisodeStarted(episode_id=name),
        turn(0, episode=name),
        RewardEvent(episode_id=name, value=1.0),
        EpisodeEnded(episode_id=name, **ended),
    ]


def write_one(folder: Path, retention: Retention | None, event: Event | None = None) -> None:
    with LogWriter(folder, retention=retention) as writer:
        writer.write(event or EpisodeStarted(episode_id="new"))


def removed(folder: Path) -> list[dict[str, Any]]:
    path = folder / "removed.ndjson"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_nothing_is_removed_unless_asked(tmp_path: Path) -> None:
    old = segment(tmp_path, 1, *whole("a"), age_days=1000)
    write_one(tmp_path, None)
    write_one(tmp_path, Retention())
    assert old.exists() and removed(tmp_path) == []


def test_by_age_and_it_is_said_what_went(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = segment(tmp_path, 1, *whole("a"), *whole("b")[:2], age_days=31)
    size = old.stat().st_size
    young = segment(tmp_path, 2, *whole("c"), age_days=29)
    with caplog.at_level(logging.WARNING):
        write_one(tmp_path, Retention(max_age_days=30))
    assert not old.exists() and young.exists()
    (record,) = removed(tmp_path)
    assert record["file"] == old.name and record["bytes"] == size
    assert (record["episodes"], record["unscored"], record["torn"]) == (["a", "b"], 1, [])
    assert record["reason"] == "older than 30 days"
    (said,) = caplog.records
    assert "removed 1 old segments" in said.getMessage() and "removed.ndjson" in said.getMessage()
    names = {e.episode_id for e in LogReader(tmp_path).episodes()}
    assert names == {"c", "new"}, "the list of what went is no log"


def test_by_size_oldest_first_and_no_more_than_needed(tmp_path: Path) -> None:
    paths = [segment(tmp_path, n, *whole(f"e{n}")) for n in range(4)]
    limit = sum(p.stat().st_size for p in paths[2:]) + 10
    write_one(tmp_path, Retention(max_bytes=limit))
    assert [p.exists() for p in paths] == [False, False, True, True]
    assert [r["file"] for r in removed(tmp_path)] == [p.name for p in paths[:2]]


def test_a_segment_that_a_living_process_writes_stays(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as other:
        other.write(turn(0))
        assert other.path is not None and in_use(other.path)
        os.utime(other.path, (1, 1))
        write_one(tmp_path, Retention(max_age_days=1, max_bytes=1))
        assert other.path.exists()
        path = other.path
    assert not in_use(path)
    write_one(tmp_path, Retention(max_age_days=1))
    assert not path.exists()


def test_the_current_segment_and_alien_files_stay(tmp_path: Path) -> None:
    for name in ("imported.jsonl", "events-mine.jsonl", "notes.txt"):
        (tmp_path / name).write_text("x" * 1000)
        os.utime(tmp_path / name, (1, 1))
    write_one(tmp_path, Retention(max_age_days=1, max_bytes=1))
    assert len(list(tmp_path.iterdir())) == 4 and removed(tmp_path) == []


def test_a_running_episode_of_a_living_process_keeps_its_segments(tmp_path: Path) -> None:
    running = segment(tmp_path, 1, *whole("a")[:2], age_days=9, pid=os.getpid())
    dead = segment(tmp_path, 2, *whole("b")[:2], age_days=9)
    write_one(tmp_path, Retention(max_age_days=1))
    assert running.exists() and not dead.exists()
    write_one(tmp_path, None, EpisodeEnded(episode_id="a"))
    write_one(tmp_path, Retention(max_age_days=1))
    assert not running.exists()


def test_segments_of_another_machine_must_have_been_silent_for_a_day(tmp_path: Path) -> None:
    here = segment(tmp_path, 1, *whole("a"), age_days=0.5)
    away = tmp_path / "events-20260101T000000Z-elsewhere-1-00000001.jsonl"
    here.rename(away)
    write_one(tmp_path, Retention(max_age_days=0.1))
    assert away.exists()
    os.utime(away, (1, 1))
    write_one(tmp_path, Retention(max_age_days=0.1))
    assert not away.exists()


def test_a_torn_episode_is_said_to_be_incomplete(tmp_path: Path) -> None:
    segment(tmp_path, 1, *whole("a")[:2], age_days=9)
    segment(tmp_path, 2, turn(1, episode="a"), *whole("a", reason="truncated", detail="limit")[2:])
    write_one(tmp_path, Retention(max_age_days=1))
    (record,) = removed(tmp_path)
    assert record["torn"] == ["a"]
    left = LogReader(tmp_path).episode("a")
    assert left.ended is not None and left.ended.dropped_events == 2
    assert (left.ended.reason, left.ended.detail) == ("truncated", "limit")
    assert [t.turn_id for t in left.turns] == ["t1"]


def test_an_episode_torn_twice_counts_both(tmp_path: Path) -> None:
    segment(tmp_path, 1, *whole("a")[:1], age_days=9)
    segment(tmp_path, 2, turn(0, episode="a"), age_days=8)
    segment(tmp_path, 3, turn(1, episode="a"), *whole("a")[2:])
    write_one(tmp_path, Retention(max_age_days=1))
    left = LogReader(tmp_path).episode("a")
    assert left.ended is not None and left.ended.dropped_events == 2


def test_a_reward_that_comes_after_its_episode_went_harms_nothing(tmp_path: Path) -> None:
    segment(tmp_path, 1, *whole("a"), age_days=9)
    write_one(tmp_path, Retention(max_age_days=1), RewardEvent(episode_id="a", value=1.0))
    left = LogReader(tmp_path).episode("a")
    assert left.untrainable_reason == "no model call was recorded"


def test_odd_lines_in_an_old_segment_are_no_obstacle(tmp_path: Path) -> None:
    old = segment(tmp_path, 1, *whole("a"))
    with old.open("ab") as file:
        file.write(b'{"episode_id":"z","type":"episode_started"}\nnot json\n\0\0\n{"torn')
    os.utime(old, (1, 1))
    write_one(tmp_path, Retention(max_age_days=1))
    assert removed(tmp_path)[0]["episodes"] == ["a", "z"]


def test_a_failure_to_remove_never_stops_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    segment(tmp_path, 1, *whole("a"), age_days=9)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(retention_module, "_remove", refuse)
    with caplog.at_level(logging.WARNING):
        write_one(tmp_path, Retention(max_age_days=1))
    assert "not yours" in caplog.text
    assert {e.episode_id for e in LogReader(tmp_path).episodes()} == {"a", "new"}


def test_a_segment_is_followed_by_another_when_it_has_grown(tmp_path: Path) -> None:
    with LogWriter(tmp_path, segment_bytes=5_000) as writer:
        for number in range(10):
            writer.write(turn(number, text="x" * 2_000))
    reader = LogReader(tmp_path)
    assert len(reader.files) == 5
    assert max(p.stat().st_size for p in reader.files) < 10_000
    (episode,) = reader.episodes()
    assert [t.index for t in episode.turns] == list(range(10))


def test_where_no_new_segment_can_be_begun_the_old_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: LineFile, *_: Any, **__: Any) -> None:
        raise PermissionError("read-only")

    with LogWriter(tmp_path, segment_bytes=10) as writer:
        writer.write(turn(0))
        with monkeypatch.context() as patch:
            patch.setattr(LineFile, "__init__", refuse)
            writer.write(turn(1))
        writer.write(turn(2))
    reader = LogReader(tmp_path)
    assert len(list(reader.events())) == 3 and len(reader.files) == 2


def test_the_limit_holds_while_a_process_writes_on(tmp_path: Path) -> None:
    limit = 40_000
    with LogWriter(tmp_path, retention=Retention(max_bytes=limit)) as writer:
        for number in range(100):
            for event in whole(f"e{number}"):
                writer.write(event)
        sizes = [p.stat().st_size for p in tmp_path.glob("events-*.jsonl")]
    assert len(sizes) > 3 and sum(sizes) <= limit * 1.25
    kept = list(LogReader(tmp_path).episodes())
    gone = {name for record in removed(tmp_path) for name in record["episodes"]}
    assert {e.episode_id for e in kept} | gone == {f"e{n}" for n in range(100)}
    torn = [e for e in kept if e.ended and e.ended.dropped_events]
    assert all(len(e.turns) == 1 and e.started for e in kept if e not in torn and e.ended)


@pytest.mark.parametrize("limits", [{"max_age_days": 0}, {"max_bytes": -1}])
def test_limits_are_positive(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="give a positive number"):
        Retention(**limits)
