"""A compacted log folds to what its source folds to, and appears whole or not at all."""

from __future__ import annotations

import errno
import os
import random
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import LogError
from marft_agents.log import LogReader, LogWriter
from marft_agents.log.compact import compact
from marft_agents.log.encode import encode_line
from marft_agents.log.living import SILENT_S, writer_of
from marft_agents.log.segment import host_name
from marft_agents.schema import EditEvent, Episode, EpisodeEnded, EpisodeStarted, RewardEvent
from tests.log.events import at, some_line, turn


def read(folder: Path) -> tuple[LogReader, dict[str, Episode]]:
    """Episodes without the names of their files, which differ, and of rewards what counts."""
    reader = LogReader(folder)
    return reader, {e.episode_id: _bare(e) for e in reader.episodes()}


def _bare(episode: Episode) -> Episode:
    counts = episode._latest()  # pyright: ignore[reportPrivateUsage] the rule itself
    rewards = sorted([*counts, *episode.refused_rewards], key=lambda r: r.model_dump_json())
    return episode.model_copy(update={"sources": [], "rewards": rewards})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("seed", range(25))
def test_it_reads_back_as_the_same_episodes(tmp_path: Path, seed: int) -> None:
    """Any mixture of files, episodes, repetitions and damage: fold(compact(x)) == fold(x)."""
    draw, source = random.Random(seed), tmp_path / "source"
    source.mkdir()
    for file in range(draw.randrange(1, 4)):
        lines = [some_line(draw, draw.choice("abc")) for _ in range(draw.randrange(5, 60))]
        (source / f"{file}.jsonl").write_bytes(b"".join(lines))
    before = contents(source)
    done = compact([source], tmp_path / "once", file_bytes=draw.choice([1, 4000, 2**20]))
    reader, episodes = read(source)
    again, compacted = read(tmp_path / "once")
    assert compacted == episodes
    assert {name: (e.team_reward, e.agent_rewards, e.turn_rewards, e.untrainable_reason)
            for name, e in compacted.items()} == {
        name: (e.team_reward, e.agent_rewards, e.turn_rewards, e.untrainable_reason)
        for name, e in episodes.items()
    }  # fmt: skip
    assert (again.duplicates, again.skipped_count) == (0, 0)
    assert done.damaged == reader.skipped_count
    assert contents(source) == before
    compact([tmp_path / "once"], tmp_path / "twice")
    whole = b"".join(contents(tmp_path / "once").values())
    assert b"".join(contents(tmp_path / "twice").values()) == whole


def log(folder: Path, *episodes: str) -> Path:
    with LogWriter(folder) as writer:
        for name in episodes:
            writer.write(EpisodeStarted(episode_id=name, time=at(0)))
            writer.write(turn(0, episode=name))
            writer.write(RewardEvent(episode_id=name, time=at(2), value=0.0))
            writer.write(RewardEvent(episode_id=name, time=at(3), value=1.0))
            writer.write(EpisodeEnded(episode_id=name, time=at(4)))
    return folder


def test_a_reward_of_a_duplicate_supersedes_that_of_the_turn(tmp_path: Path) -> None:
    source = tmp_path / "logs"
    with LogWriter(source) as writer:
        writer.write(turn(0, response_id="r"))
        writer.write(turn(1, turn_id="copy", response_id="r"))
        writer.write(RewardEvent(episode_id="e", time=at(2), value=0.0, turn_id="t0"))
        writer.write(RewardEvent(episode_id="e", time=at(3), value=1.0, turn_id="copy"))
        writer.write(EditEvent(episode_id="e", time=at(2), text="first", turn_id="copy"))
        writer.write(EditEvent(episode_id="e", time=at(3), text="last", turn_id="t0"))
    done = compact([source], tmp_path / "out")
    assert (done.events, done.left_out) == (3, 3)
    (episode,) = read(tmp_path / "out")[1].values()
    assert episode.turn_rewards == {"t0": 1.0}
    assert episode.turns[0].edited_text == "last"


def test_episodes_are_contiguous_in_files_of_the_size_asked_for(tmp_path: Path) -> None:
    first, second = log(tmp_path / "logs", "a", "b"), log(tmp_path / "logs", "a", "c")
    assert first == second
    done = compact([first], tmp_path / "out", file_bytes=1)
    assert (done.files, done.episodes, done.source_files, done.left_out) == (3, 3, 2, 8)
    names = [
        {e.episode_id for e, _ in LogReader(p).events()} for p in LogReader(tmp_path / "out").files
    ]
    assert sorted(map(sorted, names)) == [["a"], ["b"], ["c"]]


def test_a_deleted_episode_leaves_no_byte_in_the_target(tmp_path: Path) -> None:
    source = log(tmp_path / "logs", "keep", "secret-1")
    done = compact([source], tmp_path / "out", delete=["secret-1"])
    assert (done.deleted, done.episodes) == (["secret-1"], 1)
    assert b"secret-1" not in b"".join(contents(tmp_path / "out").values())
    with pytest.raises(LogError, match="no episode 'nobody' to delete; nothing written"):
        compact([source], tmp_path / "other", delete=["nobody", "keep"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["logs", "out"]


def test_only_episodes_that_are_all_older(tmp_path: Path) -> None:
    source = log(tmp_path / "logs", "old")
    with LogWriter(source) as writer:
        writer.write(turn(0, episode="new", time=at(100)))
    done = compact([source], tmp_path / "out", before=at(100))
    assert (done.episodes, done.later) == (1, 1)
    assert done.left_out == 1
    assert compact([source], tmp_path / "all", before=at(101)).episodes == 2


def test_a_segment_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    source = log(tmp_path / "logs", "done")
    with LogWriter(source) as writer:
        writer.write(turn(0, episode="running"))
        done = compact([source], tmp_path / "out")
        assert done.still_written == {str(writer.path): f"process {os.getpid()}"}
        assert list(read(tmp_path / "out")[1]) == ["done"]
        with pytest.raises(LogError, match=r"'running' is in .* still writes; end the app"):
            compact([source], tmp_path / "no", delete=["running"])
        assert writer.path is not None
        with pytest.raises(LogError, match=r"nothing to compact: .* is still written by process"):
            compact([writer.path], tmp_path / "no")
    assert compact([source], tmp_path / "after").episodes == 2


def test_a_segment_of_another_machine_counts_as_written_until_it_is_silent(tmp_path: Path) -> None:
    path = tmp_path / "events-20260101T000000Z-other-7-0123abcd.jsonl"
    path.write_bytes(encode_line(turn(0)))
    assert writer_of(path) == "process 7 on other"
    assert writer_of(path, now=time.time() + SILENT_S + 1) is None
    mine = tmp_path / f"events-20260101T000000Z-{host_name()}-{2**22 + 1}-0123abcd.jsonl"
    mine.write_bytes(encode_line(turn(0)))
    assert writer_of(mine) is None
    assert writer_of(tmp_path / "compacted-00001.jsonl") is None
    assert host_name() in f"-{socket.gethostname()}".replace(".", "-").replace("_", "-")


def test_a_target_in_use_is_refused(tmp_path: Path) -> None:
    source = log(tmp_path / "logs", "a")
    with pytest.raises(LogError, match="logs exists; name another place"):
        compact([source], source)
    (tmp_path / "empty").mkdir()
    assert compact([source], tmp_path / "empty").episodes == 1


def test_a_full_disk_leaves_no_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = log(tmp_path / "logs", "a")
    before = contents(source)

    def full(_: int) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        LogError, match=r"cannot write .*: No space left on device; nothing written"
    ):
        compact([source], tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["logs"]
    assert contents(source) == before


def test_a_target_that_cannot_be_made_is_named_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = log(tmp_path / "logs", "a")
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LogError, match=r"^cannot write file/out: File exists; nothing written"):
        compact([source], Path("file/out"))
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "x").write_text("")
    with pytest.raises(LogError, match=r"^there exists; name another place"):
        compact([source], Path("there"))
