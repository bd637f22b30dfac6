"""Disks that fail in every way they have: the app goes on, it is said once, the log is honest."""

from __future__ import annotations

import functools
import gc
import json
import logging
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from marft_agents.log import LogReader, LogWriter
from marft_agents.log.segment import in_use
from marft_agents.recording import MarftRecorder
from marft_agents.recording import sink as sink_module
from marft_agents.recording.outlet import EventLog, Outlet
from marft_agents.recording.safety import Safety
from marft_agents.recording.sink import Sink
from marft_agents.schema import EpisodeEnded, Event, HumanEvent, RewardEvent
from marft_agents.testing import InMemoryLog

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def _may_mount() -> bool:
    command = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _on_its_disk(job: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """What ``tests.recording.disks`` printed, and its warnings."""
    if not _may_mount():
        pytest.skip("no right to mount a small disk here (unshare -rm)")
    command = ["unshare", "-rm", sys.executable, "-m", "tests.recording.disks", job, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr.splitlines()


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    seen, said = _on_its_disk("full", tmp_path)
    assert seen["flushed"] and seen["took"] < 5
    assert 5 < seen["written"] < 12
    assert seen["written"] + seen["dropped"] == 30
    assert seen["rewards"] == [1.0, 0.5] and seen["later"] == [1, 0]
    assert seen["skipped"] <= 1
    assert len(said) == 1 and "No space left on device" in said[0]


def test_a_disk_that_is_really_read_only(tmp_path: Path) -> None:
    seen, said = _on_its_disk("read_only", tmp_path)
    assert seen == {"flushed": True, "dropped": 1, "reward": 1.0, "later": True}
    assert len(said) == 1 and "Read-only file system" in said[0]


def test_a_folder_that_is_deleted_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    with MarftRecorder(folder) as recorder:
        with recorder.episode(id="before"):
            assert recorder.flush()
            shutil.rmtree(folder)
        with recorder.episode(id="after"):
            pass
    episodes = {e.episode_id: e for e in LogReader(folder).episodes()}
    assert episodes["before"].started is None and episodes["before"].ended is not None
    assert episodes["after"].started is not None


def test_a_folder_that_a_file_has_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "logs"
    with MarftRecorder(folder) as recorder, caplog.at_level(logging.WARNING):
        with recorder.episode(id="e") as episode:
            assert recorder.flush()
            shutil.rmtree(folder)
            folder.write_text("mine")
            episode.reward(0.25)
            assert recorder.flush()
            assert folder.read_text() == "mine"
            folder.unlink()
        with recorder.episode(id="later"):
            pass
    (said,) = caplog.records
    assert "FileExistsError" in said.getMessage()
    episodes = {e.episode_id: e for e in LogReader(folder).episodes()}
    assert episodes["e"].team_reward == 0.25 and episodes["later"].started is not None


class _Hanging(InMemoryLog):
    """A network folder whose server went away."""

    def __init__(self) -> None:
        super().__init__()
        self.back = threading.Event()

    def write(self, event: Event) -> None:
        self.back.wait()
        super().write(event)


def test_a_disk_that_hangs_for_ever_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    log = _Hanging()
    sink = Sink(log, Safety(False), capacity=5)
    with caplog.at_level(logging.WARNING):
        started = time.perf_counter()
        for _ in range(1000):
            sink.put(HumanEvent(episode_id="e", text="x"))
        assert not sink.flush(0.01)
        assert not sink.close(0.05)
        sink.at_exit(60)
        assert time.perf_counter() - started < 5
    texts = [r.getMessage() for r in caplog.records]
    assert any("drops events" in text for text in texts)
    assert any("leaves" in text and "events unwritten" in text for text in texts)
    assert not log.closed
    log.back.set()
    assert sink.close(5) and log.closed


def test_a_log_that_hangs_on_close_holds_nobody_up() -> None:
    back = threading.Event()

    class HangsOnClose(InMemoryLog):
        def close(self) -> None:
            back.wait()

    sink = Sink(HangsOnClose(), Safety(False))
    sink.put(HumanEvent(episode_id="e"))
    started = time.perf_counter()
    assert sink.close(0.05)
    assert time.perf_counter() - started < 5
    back.set()


@pytest.mark.parametrize("size", [100, 100_000])
def test_the_queue_is_bounded_in_bytes(size: int, caplog: pytest.LogCaptureFixture) -> None:
    log = _Hanging()
    sink = Sink(log, Safety(False), capacity_bytes=1_000_000)
    with caplog.at_level(logging.WARNING):
        for _ in range(40):
            sink.put(HumanEvent(episode_id="e", text="x" * size))
        sink.put(RewardEvent(episode_id="e", value=1.0))
        sink.put(EpisodeEnded(episode_id="e"))
    log.back.set()
    assert sink.close(5)
    kept = len(log.of(HumanEvent))
    assert kept == 40 if size == 100 else 5 <= kept <= 10
    assert log.of(EpisodeEnded)[0].dropped_events == 40 - kept
    assert len(log.of(RewardEvent)) == 1, "what decides over an episode has room of its own"


def test_one_event_larger_than_the_queue_is_taken_when_nothing_waits() -> None:
    log = InMemoryLog()
    sink = Sink(log, Safety(), capacity_bytes=1000)
    sink.put(HumanEvent(episode_id="e", text="x" * 5000))
    assert sink.close() and len(log.events) == 1


def test_an_event_that_cannot_be_written_costs_only_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Picky(InMemoryLog):
        def write(self, event: Event) -> None:
            if isinstance(event, HumanEvent) and event.text == "bad":
                raise ValueError("cannot encode sk-test-abc")
            super().write(event)

    log = Picky()
    sink = Sink(log, Safety(False))
    with caplog.at_level(logging.WARNING):
        for text in ("good", "bad", "good"):
            sink.put(HumanEvent(episode_id="e", text=text))
        sink.put(EpisodeEnded(episode_id="e"))
        assert sink.close()
    assert len(log.of(HumanEvent)) == 2 and log.of(EpisodeEnded)[0].dropped_events == 1
    assert "ValueError" in caplog.text and "sk-test-abc" not in caplog.text


def test_what_the_disk_refuses_again_and_again_does_not_pile_up() -> None:
    class RefusesRewards(InMemoryLog):
        def write(self, event: Event) -> None:
            if isinstance(event, RewardEvent):
                raise OSError("not this one")
            super().write(event)

    log = RefusesRewards()
    sink = Sink(log, Safety(False))
    for _ in range(3000):
        sink.put(RewardEvent(episode_id="e", value=1.0))
    sink.put(EpisodeEnded(episode_id="e"))
    assert sink.close()
    (ended,) = log.of(EpisodeEnded)
    assert ended.dropped_events == 3000 - 1024, "those beyond what is kept were counted by then"


class TakesMany(InMemoryLog):
    """Takes several events in one go; ``takes``: how many, each time."""

    def __init__(self, takes: Sequence[int]) -> None:
        super().__init__()
        self.takes = list(takes)
        self.asked: list[int] = []

    def write_many(self, events: Sequence[Event]) -> int:
        self.asked.append(len(events))
        taken = self.takes.pop(0) if self.takes else len(events)
        for event in events[:taken]:
            super().write(event)
        return taken


def _write_at_once(log: EventLog, events: Sequence[Event]) -> Outlet:
    outlet = Outlet(log, Safety(False), lambda event: event)
    outlet.write(iter(events))
    return outlet


def test_what_a_log_does_not_take_together_it_gets_one_by_one() -> None:
    log = TakesMany([2])
    events = [HumanEvent(episode_id="e", text=str(n)) for n in range(5)]
    assert _write_at_once(log, events).lost == 0
    assert log.asked == [5]
    assert [event.text for event in log.of(HumanEvent)] == list("01234")


def test_an_end_written_with_others_says_what_was_lost_before() -> None:
    class RefusesOne(TakesMany):
        def write(self, event: Event) -> None:
            if isinstance(event, HumanEvent) and event.text == "1":
                raise OSError("not this one")
            super().write(event)

    log = RefusesOne([1])
    people = [HumanEvent(episode_id="e", text=str(n)) for n in range(3)]
    outlet = _write_at_once(log, [*people, EpisodeEnded(episode_id="e")])
    assert outlet.lost == 1
    (ended,) = log.of(EpisodeEnded)
    assert ended.dropped_events == 1

    later = TakesMany([])
    outlet = Outlet(later, Safety(False), lambda event: event)
    outlet.lose(people[0])
    outlet.write(iter([people[1], EpisodeEnded(episode_id="e")]))
    outlet.write(iter([people[2], EpisodeEnded(episode_id="e")]))
    assert later.asked == [2, 2]
    assert [ended.dropped_events for ended in later.of(EpisodeEnded)] == [1, 0], "told once"


def test_an_event_that_was_written_is_not_lost_with_one_that_was_kept() -> None:
    class LeavesOnRewards(TakesMany):
        full = True

        def write(self, event: Event) -> None:
            if isinstance(event, RewardEvent):
                if self.full:
                    raise OSError("full")
                if event.value == 1.0:
                    sys.exit()
            super().write(event)

    log = LeavesOnRewards([])
    outlet = Outlet(log, Safety(False), lambda event: event)
    for value in (0.0, 1.0, 2.0):
        outlet.write(iter([RewardEvent(episode_id="e", value=value)]))
    assert (outlet.kept, outlet.lost, log.events) == (3, 0, [])
    log.full = False
    people = [HumanEvent(episode_id="e", text=str(n)) for n in range(2)]
    with pytest.raises(SystemExit):
        outlet.write(iter([*people, EpisodeEnded(episode_id="e")]))
    assert [event.text for event in log.of(HumanEvent)] == ["0", "1"]
    assert [event.value for event in log.of(RewardEvent)] == [0.0, 2.0]
    assert log.of(EpisodeEnded)[0].dropped_events == outlet.lost == 1
    assert log.asked == [], "one by one, while something is kept"


def test_what_is_ready_is_written_when_the_next_event_ends_the_thread() -> None:
    log = TakesMany([])

    def prepare(event: Event) -> Event:
        if isinstance(event, HumanEvent) and event.text == "2":
            sys.exit()
        return event

    sink = Sink(log, Safety(False), prepare=prepare)
    for n in range(5):
        sink.put(HumanEvent(episode_id="e", text=str(n)))
    assert sink.close(5)
    assert [event.text for event in log.of(HumanEvent)] == list("0134")
    assert sink.lost == 1


def test_a_log_that_would_end_its_thread_does_not(caplog: pytest.LogCaptureFixture) -> None:
    class Leaves(InMemoryLog):
        def write(self, event: Event) -> None:
            super().write(event)
            if len(self.events) == 1:
                sys.exit()

    log = Leaves()
    sink = Sink(log, Safety(False))
    for _ in range(3):
        sink.put(HumanEvent(episode_id="e"))
        assert sink.flush(5)
    sink.put(EpisodeEnded(episode_id="e"))
    assert sink.close() and len(log.events) == 4 and log.closed
    assert log.of(EpisodeEnded)[0].dropped_events == 1, "as far as anybody can tell"
    assert "SystemExit" in caplog.text


def test_without_threads_events_wait_for_flush(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    log = InMemoryLog()
    with caplog.at_level(logging.WARNING):
        with MarftRecorder(log=log) as recorder, recorder.episode(id="e"):
            pass
        assert log.closed and [e.episode_id for e in log.events] == ["e", "e"]
    assert "cannot start a thread" in caplog.text


def test_a_recorder_that_nobody_closes_leaves_no_thread_and_no_open_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_module, "_IDLE_S", 0.01)
    writer = LogWriter(tmp_path)
    sink = Sink(writer, Safety())
    for _ in range(3):
        sink.put(HumanEvent(episode_id="e"))
        assert sink.flush(5)
        thread = sink._thread  # pyright: ignore[reportPrivateUsage] to wait for its end
        if thread is not None:
            thread.join(5)
    assert len(list(LogReader(tmp_path).events())) == 3
    path, gone = writer.path, weakref.ref(sink)
    assert path is not None and in_use(path)
    del sink, writer
    gc.collect()
    assert gone() is None and not in_use(path)
