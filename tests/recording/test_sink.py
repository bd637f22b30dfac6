"""Between the app and the disk: never waits, counts what it loses, leaves nothing behind."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partialmethod
from pathlib import Path

import openai
import pytest

from marft_agents.log import LogReader
from marft_agents.recording import MarftRecorder
from marft_agents.recording import sink as sink_module
from marft_agents.recording.safety import Safety
from marft_agents.recording.sink import Sink
from marft_agents.schema import EpisodeEnded, EpisodeStarted, Event, HumanEvent, RewardEvent
from marft_agents.testing import BrokenLog, InMemoryLog, Reply
from tests.recording.kit import ask, recording, sdk


class GatedLog(InMemoryLog):
    """A disk that hangs until told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.writing = threading.Event()
        self.gate = threading.Event()

    def write(self, event: Event) -> None:
        self.writing.set()
        self.gate.wait()
        super().write(event)


def _human(text: str = "") -> HumanEvent:
    return HumanEvent(episode_id="e", text=text)


def test_events_are_written_in_order() -> None:
    log = InMemoryLog()
    sink = Sink(log, Safety())
    for i in range(50):
        sink.put(_human(str(i)))
    assert sink.flush(5)
    assert [e.text for e in log.of(HumanEvent)] == [str(i) for i in range(50)]
    assert sink.close() and log.closed


def test_events_wait_for_others_and_nobody_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "_LINGER_S", 3600.0)
    log = InMemoryLog()
    sink = Sink(log, Safety())
    sink.put(_human("lingers"))
    assert sink.flush(10) and len(log.events) == 1
    sink.put(_human("lingers as well"))
    assert sink.close() and len(log.events) == 2


def test_events_are_written_while_the_app_waits_for_its_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sink_module, "_LINGER_S", 0.01)
    monkeypatch.setattr(sink_module, "_MOMENT_S", 3600.0)
    written = threading.Event()

    class Tells(InMemoryLog):
        def write(self, event: Event) -> None:
            super().write(event)
            written.set()

    sink = Sink(Tells(), Safety())
    sink.put(_human("waits"))
    assert not written.wait(0.5), "the app has something to do"
    for _ in range(1000):
        sink.app_waits()  # until the thread looks for it
        if written.wait(0.01):
            break
    assert written.is_set()
    sink.put(_human("waits as well"))
    assert sink.close(5), "closing waits for no such moment"


def _written_within(log: InMemoryLog, events: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while len(log.events) < events and time.monotonic() < until:
        time.sleep(0.01)
    return len(log.events) >= events


class _Resting(Sink):
    """Its thread begins at once and, unless the app waits, rests for an hour after its first go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, log: InMemoryLog, events: int) -> None:
        for name, value in (("_LINGER_S", 0.3), ("_MOMENT_S", 0.0), ("_REST_S", 3600.0)):
            monkeypatch.setattr(sink_module, name, value)
        monkeypatch.setattr(sink_module, "_WORK_S", 3600.0)
        super().__init__(log, Safety())
        for i in range(events):
            self.put(_human(str(i)))


@pytest.mark.parametrize(("events", "first"), [(30, 4), (300, 12)])
def test_the_log_rests_while_the_app_has_something_to_do(
    events: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = InMemoryLog()
    sink = _Resting(monkeypatch, log, events)
    assert _written_within(log, first, 10)
    assert not _written_within(log, first + 1, 0.3), "the app has something to do"
    assert sink.flush(10), "whoever asks waits for no rest"
    assert [e.text for e in log.of(HumanEvent)] == [str(i) for i in range(events)]
    assert sink.close()


def test_the_log_does_not_rest_while_the_app_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "_SENDING_S", 0.0)
    log = InMemoryLog()
    sink = _Resting(monkeypatch, log, 0)
    sink.app_waits()
    for _ in range(30):
        sink.put(_human())
    assert _written_within(log, 30, 10)
    assert sink.close()


def test_the_log_rests_once_the_app_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "_SENDING_S", 0.0)
    log = InMemoryLog()
    sink = _Resting(monkeypatch, log, 0)
    sink.app_waits()
    sink.app_goes_on()
    for _ in range(30):
        sink.put(_human())
    assert _written_within(log, 4, 10)
    assert not _written_within(log, 5, 0.3)
    assert sink.close(10)


@pytest.mark.parametrize(("events", "size"), [(8, 2**20), (100, 800)])
def test_much_that_waits_is_written(
    events: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_module, "_LINGER_S", 3600.0)
    log = GatedLog()
    log.gate.set()
    sink = Sink(log, Safety(), capacity=events, capacity_bytes=size)
    for _ in range(2):
        sink.put(_human("x" * 40))
    assert log.writing.wait(10)
    assert sink.close() and len(log.events) == 2


def test_a_log_that_fell_asleep_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "_LINGER_S", 0.0)
    monkeypatch.setattr(sink_module, "_IDLE_S", 3600.0)
    log = GatedLog()
    log.gate.set()
    sink = Sink(log, Safety())
    for _ in range(3):
        log.writing.clear()
        sink.put(_human())
        assert log.writing.wait(10), "written without anybody asking"
    assert sink.close() and len(log.events) == 3


class _Furious(Safety):
    """Even saying what went wrong goes wrong."""

    def warn_once(self, key: object, message: str) -> None:
        raise SystemExit(message)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_log_whose_thread_has_died_is_written_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "_LINGER_S", 0.0)
    log = GatedLog()
    log.gate.set()
    sink, written = Sink(log, _Furious()), InMemoryLog.write
    died = threading.Event()

    def dies(self: InMemoryLog, event: Event) -> None:
        monkeypatch.setattr(InMemoryLog, "write", written)
        writers.append(threading.current_thread())
        died.set()
        raise KeyboardInterrupt

    writers: list[threading.Thread] = []
    monkeypatch.setattr(InMemoryLog, "write", dies)
    sink.put(_human("lost"))
    assert died.wait(10)
    writers[0].join(10)
    log.writing.clear()
    sink.put(_human("kept"))
    assert log.writing.wait(10), "written without anybody asking"
    assert sink.close() and [e.text for e in log.of(HumanEvent)] == ["kept"]


def test_a_disk_that_hangs_costs_the_newest_events_and_never_the_app(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = GatedLog()
    sink = Sink(log, Safety(), capacity=2)
    sink.put(_human("0"))
    log.writing.wait()
    with caplog.at_level(logging.WARNING):
        for text in ("1", "2", "lost", "lost"):
            sink.put(_human(text))
        sink.put(EpisodeEnded(episode_id="e"))
    assert not sink.flush(0)
    log.gate.set()
    assert sink.close()
    assert [e.text for e in log.of(HumanEvent)] == ["0", "1", "2"]
    assert log.of(EpisodeEnded)[0].dropped_events == 2
    (record,) = caplog.records
    assert "drops events" in record.getMessage()


def test_one_huge_event_does_not_cost_the_end_of_its_episode() -> None:
    log = GatedLog()
    sink = Sink(log, Safety(), capacity_bytes=1000)
    sink.put(_human("x" * 20 * 2**20))
    log.writing.wait()
    sink.put(_human("lost"))
    sink.put(RewardEvent(episode_id="e", value=1.0))
    sink.put(EpisodeEnded(episode_id="e"))
    log.gate.set()
    assert sink.close()
    assert len(log.of(HumanEvent)) == 1 and log.of(RewardEvent)[0].value == 1.0
    assert log.of(EpisodeEnded)[0].dropped_events == 1


def test_a_full_disk_is_said_once_and_borders_come_later(caplog: pytest.LogCaptureFixture) -> None:
    class FullOnce(InMemoryLog):
        full = True

        def write(self, event: Event) -> None:
            if self.full:
                BrokenLog().write(event)
            super().write(event)

    log = FullOnce()
    with (
        caplog.at_level(logging.WARNING),
        MarftRecorder(log=log) as recorder,
        recorder.episode(id="e") as episode,
    ):
        episode.reward(1.0)
        assert recorder.flush()
        log.full = False
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()
    assert {type(e) for e in log.events} == {EpisodeEnded, EpisodeStarted, RewardEvent}
    assert log.of(EpisodeEnded)[0].dropped_events == 0, "what was refused came later"


def test_after_close_events_are_dropped_without_harm(caplog: pytest.LogCaptureFixture) -> None:
    log = InMemoryLog()
    recorder = MarftRecorder(log=log)
    recorder.close()
    recorder.close()
    with caplog.at_level(logging.WARNING), recorder.episode():
        pass
    assert log.events == [] and "is closed" in caplog.text


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")  # the point of the test
def test_a_fork_writes_its_own_events_only(tmp_path: Path) -> None:
    log = GatedLog()
    sink = Sink(log, Safety())
    sink.put(_human("parent, being written"))
    sink.put(_human("parent, queued"))
    log.writing.wait()
    with MarftRecorder(tmp_path) as recorder:
        child = os.fork()
        if child == 0:
            failed = True
            try:
                with recorder.episode(id="child"):
                    pass
                log.gate.set()
                sink.put(_human("child"))
                assert recorder.flush(5) and sink.flush(5)
                failed = [e.text for e in log.of(HumanEvent)] != ["child"]
            finally:
                os._exit(int(failed))
        with recorder.episode(id="parent"):
            pass
        assert os.waitpid(child, 0)[1] == 0
    log.gate.set()
    assert sink.close()
    assert [e.text for e in log.of(HumanEvent)] == ["parent, being written", "parent, queued"]
    episodes = {e.episode_id: e for e in LogReader(tmp_path).episodes()}
    assert episodes.keys() == {"parent", "child"}
    assert all(e.started and e.ended for e in episodes.values())


def _work(folder: str) -> None:
    with MarftRecorder(folder).episode(id="worker"):
        pass


def test_a_multiprocessing_worker_flushes_at_its_end(tmp_path: Path) -> None:
    worker = multiprocessing.get_context("spawn").Process(target=_work, args=(str(tmp_path),))
    worker.start()
    worker.join()
    (episode,) = LogReader(tmp_path).episodes()
    assert episode.ended is not None


def _script(folder: Path, ending: str) -> subprocess.CompletedProcess[str]:
    code = f"""
import os, signal
from marft_agents import MarftRecorder
recorder = MarftRecorder({str(folder)!r})
with recorder.episode(id="e") as episode:
    episode.reward(1.0)
{ending}
"""
    run = subprocess.run
    return run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("recorder.flush(); os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
    ids=["normal exit", "sys.exit", "kill -9 after flush"],
)
def test_what_is_acknowledged_is_on_disk_however_the_process_ends(
    tmp_path: Path, ending: str, code: int
) -> None:
    assert _script(tmp_path, ending).returncode == code
    (episode,) = LogReader(tmp_path).episodes()
    assert episode.started and episode.ended and episode.team_reward == 1.0


def test_concurrent_puts_lose_nothing() -> None:
    log = InMemoryLog()
    sink = Sink(log, Safety())

    def many(put: Callable[[Event], None]) -> None:
        for _ in range(200):
            put(EpisodeStarted(episode_id="e"))

    threads = [threading.Thread(target=many, args=(sink.put,)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sink.close() and len(log.events) == 1000


def _told(_sink: Sink, told: list[str], name: str) -> None:
    told.append(name)


@pytest.mark.parametrize(
    ("reply", "stream"),
    [("Hello.", False), ("Hello.", True), (Reply(hang=True), False), (Reply(status=500), False)],
)
def test_a_call_tells_when_the_app_waits_and_when_it_goes_on(
    reply: Reply | str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    for name in ("app_waits", "app_goes_on"):
        monkeypatch.setattr(Sink, name, partialmethod(_told, told, name))
    with recording({"planner": [reply]}) as (server, recorder, _):
        client = sdk(server, timeout=0.5)
        recorder.capture(client, "planner")
        with recorder.episode(), suppress(openai.APIError):
            answer = ask(client, stream=stream)
            assert list(answer) if stream else answer.choices
    assert told[0] == "app_waits" and set(told[1:]) == {"app_goes_on"}
