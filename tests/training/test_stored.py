"""Records on disk: as they were put in, in little memory, gone with their owner."""

from __future__ import annotations

import copy
import os
import pickle
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import LogError
from marft_agents.training import stored
from marft_agents.training.stored import Picked, Stored

LINES = [f"{n} ".encode() * (n % 7) for n in range(200)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go in these tests."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def kept(*records: bytes) -> Stored[str]:
    made = Stored(bytes.decode)
    for record in records:
        made.append(record)
    return made


@pytest.fixture(params=[1, 300, 2**30], ids=["all-written", "some-written", "none-written"])
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(stored, "_HELD", request.param)
    yield request.param


def test_it_reads_as_the_list_that_was_put_in(held: int) -> None:
    made, want = kept(*LINES), [line.decode() for line in LINES]
    assert len(made) == len(want) and list(made) == want and made == want
    assert [made[i] for i in (0, 5, -1, 199)] == [want[i] for i in (0, 5, -1, 199)]
    assert made[3:50:4] == want[3:50:4] and made[150:] == want[150:]
    assert made == kept(*LINES) and made != want[1:] and made != [*want[:-1], "other"]
    for at in (200, -201):
        with pytest.raises(IndexError, match="of 200"):
            made[at]


def test_reading_and_appending_take_turns(held: int) -> None:
    made = Stored(bytes.decode)
    for n, line in enumerate(LINES):
        made.append(line)
        assert (made[n], made[n // 2]) == (line.decode(), LINES[n // 2].decode())


def test_copies_and_what_other_processes_get_are_lists(held: int) -> None:
    made = kept(*LINES)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert type(other) is list and made == other


def test_a_short_one_opens_no_file_and_a_long_one_leaves_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    short = kept(*LINES)
    assert len(os.listdir("/proc/self/fd")) == before and list(short)
    monkeypatch.setattr(stored, "_HELD", 300)
    long = kept(*LINES)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    assert list(folder.iterdir()) == [], "no name that a crash could leave behind"
    del long
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_is_a_few_bytes_a_record() -> None:
    def peak(records: int) -> int:
        tracemalloc.start()
        made = Stored(len)
        for _ in range(records):
            made.append(bytes(1000))
        assert sum(made) == 1000 * records
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    few, many = peak(1000), peak(5000)
    assert many - few < 4000 * 20


def test_a_full_disk_is_one_clear_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: Any) -> Any:
        return open("/dev/full", "r+b", buffering=0)

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    monkeypatch.setattr(stored, "_HELD", 300)
    with pytest.raises(LogError, match=r"No space left on device; free some.*TMPDIR") as error:
        kept(*LINES)
    assert str(folder) in str(error.value)


def test_a_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(**_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", closed)
    monkeypatch.setattr(stored, "_HELD", 300)
    with pytest.raises(LogError, match=r"folder for temporary files, .*Permission denied"):
        kept(*LINES)


def test_large_files_go_where_the_environment_says_or_the_system_keeps_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = stored._folder  # pyright: ignore[reportPrivateUsage] no other way to see the choice
    assert where() == str(folder)
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    large = os.path.join(os.sep, "var", "tmp")
    assert where() == (large if os.access(large, os.W_OK) else tempfile.gettempdir())


def test_picked_records_are_made_when_asked_for() -> None:
    made: list[bytes] = []

    def unpack(data: bytes) -> str:
        made.append(data)
        return data.decode()

    records = Stored(unpack)
    for line in LINES:
        records.append(line)
    some = Picked(records, [7, 3, 5])
    assert len(some) == 3 and not made
    assert some[1] == LINES[3].decode() and made == [LINES[3]]
    assert list(some[1:]) == [LINES[3].decode(), LINES[5].decode()]
