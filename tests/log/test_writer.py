"""The writer: whole lines, one segment a process, nothing acknowledged is lost."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import threading
from pathlib import Path

import pytest

from marft_agents.log import LogReader, LogWriter, append_event
from marft_agents.log import writer as writer_module
from marft_agents.log.encode import encode_line
from marft_agents.log.segment import LineFile
from marft_agents.schema import Turn
from tests.log.events import case_bytes, turn


def line_texts(path: Path) -> list[str | None]:
    """Text of each line that is whole JSON by itself; None for damage."""
    out: list[str | None] = []
    for line in path.read_bytes().splitlines():
        try:
            out.append(json.loads(line)["text"])
        except ValueError:
            out.append(None)
    return out


def texts(path: Path) -> list[str | None]:
    return [event.text for event, _ in LogReader(path).events() if isinstance(event, Turn)]


def test_nothing_is_created_before_the_first_write(tmp_path: Path) -> None:
    with LogWriter(tmp_path / "logs") as writer:
        assert writer.path is None
    assert not (tmp_path / "logs").exists()


def test_one_json_line_an_event_in_a_named_segment(tmp_path: Path) -> None:
    with LogWriter(tmp_path / "deep" / "logs") as writer:
        writer.write(turn(0, text="two\nlines \u2028 and 🙂"))
        writer.write(turn(1))
        path = writer.path
    assert path is not None
    assert path.name.startswith("events-2")
    assert f"-{os.getpid()}-" in path.name
    lines = path.read_bytes().split(b"\n")
    assert [json.loads(line)["text"] for line in lines[:-1]] == [
        "two\nlines \u2028 and 🙂",
        "reply 1",
    ]
    assert lines[-1] == b""


def test_events_after_somebody_removed_the_folder_are_in_a_new_one(tmp_path: Path) -> None:
    with LogWriter(tmp_path / "logs") as writer:
        writer.write(turn(0))
        shutil.rmtree(tmp_path / "logs")
        writer.write(turn(1))
        writer.write(turn(2))
    assert len(list((tmp_path / "logs").iterdir())) == 1
    assert texts(tmp_path / "logs") == ["reply 1", "reply 2"]


def test_a_relative_folder_stays_where_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with LogWriter("logs") as writer:
        monkeypatch.chdir(tmp_path / "elsewhere")
        writer.write(turn(0))
    assert texts(tmp_path / "logs") == ["reply 0"]


def test_the_line_is_on_its_way_before_write_returns(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)
    writer.write(turn(0))
    assert texts(tmp_path) == ["reply 0"]
    writer.close()


def test_a_write_after_close_begins_a_new_segment(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)
    writer.write(turn(0))
    writer.close()
    writer.write(turn(1))
    writer.close()
    assert len(list(tmp_path.glob("*.jsonl"))) == 2
    assert len(texts(tmp_path)) == 2


def test_two_writers_never_share_a_segment(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as one, LogWriter(tmp_path) as two:
        one.write(turn(0))
        two.write(turn(1))
        assert one.path != two.path


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="finds descriptors in /proc")
@pytest.mark.parametrize("taken", [True, False], ids=["taken over", "closed"])
def test_a_descriptor_that_the_app_closed_is_never_written_to(tmp_path: Path, taken: bool) -> None:
    """Daemons close every descriptor they find; the number may then be the app's own file."""
    with LogWriter(tmp_path / "logs") as writer:
        writer.write(turn(0))
        numbers = os.listdir("/proc/self/fd")
        here = (n for n in numbers if os.path.realpath(f"/proc/self/fd/{n}") == str(writer.path))
        fd = int(next(here))
        os.close(fd)
        mine = tmp_path / "mine"
        with mine.open("wb") if taken else contextlib.nullcontext() as other:
            assert other is None or other.fileno() == fd, "the system gives the lowest free number"
            writer.write(turn(1))
            assert other is None or os.fstat(fd).st_size == 0
    assert set(texts(tmp_path / "logs")) == {"reply 0", "reply 1"}
    assert len(list((tmp_path / "logs").iterdir())) == 2


def test_file_mode_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with LogWriter(tmp_path) as writer:
            writer.write(turn(0))
            assert writer.path is not None
            assert writer.path.stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.write
    sizes: list[int] = []

    def a_few_bytes(fd: int, data: bytes) -> int:
        sizes.append(whole(fd, data[:7]))
        return sizes[-1]

    monkeypatch.setattr(os, "write", a_few_bytes)
    with LogWriter(tmp_path) as writer:
        writer.write(turn(0))
    monkeypatch.undo()
    assert len(sizes) > 10
    assert texts(tmp_path) == ["reply 0"]


def test_a_whole_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.write
    written: list[bytes] = []

    def remember(fd: int, data: bytes) -> int:
        written.append(data)
        return whole(fd, data)

    monkeypatch.setattr(os, "write", remember)
    with LogWriter(tmp_path) as writer:
        writer.write(turn(0))
        writer.write(turn(1))
    assert [data.count(b"\n") for data in written] == [1, 1]


def test_many_events_are_one_write_a_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.write
    written: list[bytes] = []

    def remember(fd: int, data: bytes) -> int:
        written.append(data)
        return whole(fd, data)

    size = len(encode_line(turn(0)))
    monkeypatch.setattr(os, "write", remember)
    with LogWriter(tmp_path, segment_bytes=2 * size + 1) as writer:
        writer.write(turn(0))
        assert writer.write_many([turn(n) for n in range(1, 6)]) == 5
    assert [data.count(b"\n") for data in written] == [1, 2, 3], "as write by write"
    assert set(texts(tmp_path)) == {f"reply {n}" for n in range(6)}


def test_case_20_of_many_events_those_before_the_full_disk_are_written(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)
    assert writer.write_many([turn(0), turn(1)]) == 2
    assert writer.path is not None
    size = len(encode_line(turn(2)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (writer.path.stat().st_size + size + 20, hard))
    try:
        assert writer.write_many([turn(2), turn(3), turn(4)]) == 1
        assert writer.write_many([turn(3), turn(4)]) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert writer.write_many([turn(3), turn(4)]) == 2
    lines = ["reply 0", "reply 1", "reply 2", None, "reply 3", "reply 4"]
    assert line_texts(writer.path) == lines
    writer.close()


def test_of_many_events_those_before_an_error_are_told_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a new segment fails by; else somebody would write them again."""
    size = len(encode_line(turn(0)))
    with LogWriter(tmp_path, segment_bytes=2 * size) as writer:
        writer.write(turn(0))

        def fails(*_: object, **__: object) -> None:
            raise ValueError("embedded null byte")

        monkeypatch.setattr(writer_module, "LineFile", fails)
        assert writer.write_many([turn(n) for n in range(1, 4)]) == 1
        with pytest.raises(ValueError, match="null byte"):
            writer.write(turn(2))
    assert set(texts(tmp_path)) == {"reply 0", "reply 1"}


def test_case_20_full_disk_tears_one_line_only(tmp_path: Path) -> None:
    """Case 20: the disk is full half-way through a line, then has room again."""
    writer = LogWriter(tmp_path)
    writer.write(turn(0))
    assert writer.path is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (writer.path.stat().st_size + 20, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            writer.write(turn(1))
        with pytest.raises(OSError, match="too large"):
            writer.write(turn(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.write(turn(3))
    assert line_texts(writer.path) == ["reply 0", None, "reply 3"]
    writer.close()
    reader = LogReader(tmp_path)
    assert [event.text for event, _ in reader.events() if isinstance(event, Turn)] == [
        "reply 0",
        "reply 3",
    ]
    assert reader.skipped_count == 1


def test_case_20_nothing_written_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 20: ENOSPC before the first byte leaves no trace."""

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = LogWriter(tmp_path)
    writer.write(turn(0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            writer.write(turn(1))
    writer.write(turn(2))
    writer.close()
    reader = LogReader(tmp_path)
    assert len(list(reader.events())) == 2
    assert reader.skipped_count == 0


@pytest.mark.parametrize(
    "name", ["20-torn.jsonl", "20-nul-middle.jsonl", "20-no-final-newline.jsonl"]
)
def test_case_20_append_begins_a_line_and_keeps_torn_bytes(tmp_path: Path, name: str) -> None:
    """Case 20: the next append never fuses with what a crash left behind."""
    path = tmp_path / name
    path.write_bytes(case_bytes(name))
    before = path.read_bytes()
    append_event(path, turn(7))
    append_event(path, turn(8))
    assert path.read_bytes().startswith(before)
    assert texts(path) == ["One", "Two", "reply 7", "reply 8"]
    assert line_texts(path)[-2:] == ["reply 7", "reply 8"]


def test_append_to_a_whole_file_adds_no_blank_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append_event(path, turn(0))
    append_event(path, turn(1))
    assert path.read_bytes().count(b"\n") == 2


def test_a_fresh_file_is_refused_when_it_exists(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")
    with pytest.raises(FileExistsError):
        LineFile(tmp_path / "a.jsonl", fresh=True)


def test_a_folder_that_cannot_be_made_is_an_oserror(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(OSError, match="exists"):
        LogWriter(tmp_path / "logs").write(turn(0))


def test_many_threads_share_one_segment(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)

    def write(first: int) -> None:
        for number in range(first, first + 50):
            writer.write(turn(number, text="x" * 9000))

    threads = [threading.Thread(target=write, args=(50 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    reader = LogReader(tmp_path)
    found = [event.turn_id for event, _ in reader.events() if isinstance(event, Turn)]
    assert sorted(found) == sorted(f"t{n}" for n in range(200))
    assert (len(reader.files), reader.skipped_count) == (1, 0)
