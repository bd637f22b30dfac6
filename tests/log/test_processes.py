"""Real processes: killed, many at once, forked. What was acknowledged is in the log, once."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from marft_agents.log import LogReader, LogWriter
from marft_agents.schema import Turn
from tests.log.events import turn

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")


def start(job: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.log.writing", job, str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def names(process: subprocess.Popen[str]) -> list[str]:
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return out.split()


def written(reader: LogReader) -> Counter[str]:
    return Counter(event.turn_id for event, _ in reader.events() if isinstance(event, Turn))


def test_every_acknowledged_event_survives_kill_9(tmp_path: Path) -> None:
    acknowledged = names(start("killed", tmp_path))
    with LogWriter(tmp_path) as next_writer:
        next_writer.write(turn(0, turn_id="next"))
    reader = LogReader(tmp_path)
    found = written(reader)
    assert len(reader.files) == 11
    assert len({name.split("-")[0] for name in acknowledged}) == 10
    assert set(acknowledged) <= set(found)
    assert found["next"] == 1
    assert set(found.values()) == {1}
    # At most the one event in flight at each kill may be there unacknowledged, or torn.
    assert len(found) - 1 + reader.skipped_count - len(acknowledged) <= 10


@pytest.mark.parametrize("job", ["threads", "recorded"])
def test_six_processes_of_eight_threads_lose_and_mix_nothing(tmp_path: Path, job: str) -> None:
    processes = [start(job, tmp_path) for _ in range(6)]
    expected = [name for process in processes for name in names(process)]
    reader = LogReader(tmp_path)
    assert written(reader) == Counter(expected)
    assert len(expected) == 6 * 8 * 25
    assert (len(reader.files), reader.skipped_count) == (6, 0)
    if job == "recorded":
        episodes = list(reader.episodes())
        assert len(episodes) == 6 * 8 * 5
        assert all(e.started and e.ended and len(e.turns) == 5 for e in episodes)


def test_a_forked_child_writes_its_own_segment_and_is_not_locked_out(tmp_path: Path) -> None:
    expected = names(start("forked", tmp_path))
    reader = LogReader(tmp_path)
    assert written(reader) == Counter(expected)
    by_file = [
        sorted(e.turn_id for e, p in reader.events() if isinstance(e, Turn) and p.file == file)
        for file in reader.files
    ]
    assert sorted(by_file) == [["after", "before", "thread"], ["child"]]
