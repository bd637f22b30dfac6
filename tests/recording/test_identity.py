"""Whose call it is: across threads, tasks, executors, processes and several recorders."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

from marft_agents.log import LogReader
from marft_agents.recording import Call, LiveEpisode, MarftRecorder
from marft_agents.testing import InMemoryLog, ScriptedServer
from tests.recording.kit import ask, async_sdk, recording, sdk


def _echo(body: dict[str, Any]) -> str:
    return str(body["messages"][0]["content"])


def _says(text: str) -> Any:
    return [{"role": "user", "content": text}]


def _live(recorder: MarftRecorder) -> LiveEpisode:
    live = recorder.current()
    assert live is not None
    return live


async def test_agents_at_once_on_one_client_keep_their_calls() -> None:
    with recording(_echo) as (server, recorder, log):
        async with async_sdk(server) as client, recorder.episode():
            recorder.capture(client)
            live = _live(recorder)

            async def act(agent: str) -> None:
                for number in range(3):
                    call = Call(live, agent)
                    with call.current():
                        request: Any = {"model": "m", "messages": _says(f"{agent} {number}")}
                        await client.chat.completions.create(**request)
                    call.finish()

            await asyncio.gather(*(act(f"a{i}") for i in range(6)))
    assert len(log.turns) == 18
    assert all((t.text or "").split()[0] == t.agent for t in log.turns)
    assert sorted(t.index for t in log.turns) == list(range(18))


async def test_an_executor_that_loses_the_context_needs_a_copy_or_a_tag() -> None:
    with recording(_echo) as (server, recorder, log):
        client = sdk(server)
        recorder.capture(client)
        loop = asyncio.get_running_loop()
        with recorder.episode(), ThreadPoolExecutor(2) as pool:
            live = _live(recorder)
            calls = [Call(live, name) for name in ("lost", "copied", "tagged")]
            lost, copied, tagged = calls
            with lost.current():
                await loop.run_in_executor(pool, lambda: ask(client, messages=_says("lost")))
            with copied.current():
                run = copy_context().run
                await loop.run_in_executor(
                    pool, lambda: run(lambda: ask(client, messages=_says("copied")))
                )
            tag = tagged.tag
            await loop.run_in_executor(
                pool, lambda: ask(client, messages=_says("tagged"), user=tag)
            )
            for call in calls:
                call.finish()
    assert [(t.agent, t.text) for t in log.turns] == [
        ("lost", None),
        ("copied", "copied"),
        ("tagged", "tagged"),
    ]
    assert all("user" not in request.body for request in server.requests)


def test_a_tag_beats_the_context_and_is_taken_out_of_every_attempt() -> None:
    with recording(_echo) as (server, recorder, log):
        client = sdk(server)
        recorder.capture(client)
        with recorder.episode():
            outer, inner = Call(_live(recorder), "outer"), Call(_live(recorder), "inner")
            with outer.current():
                ask(client, user=inner.tag, stream=True).close()
                ask(client, user=inner.tag)
                ask(client, user="the app's own")
            for call in (outer, inner):
                call.finish()
    assert [t.agent for t in log.turns] == ["outer", "inner", "inner"]
    assert [r.body.get("user") for r in server.requests] == [None, None, "the app's own"]


def test_a_tag_of_a_closed_recorder_is_still_taken_out() -> None:
    with recording(_echo) as (server, recorder, log):
        client = sdk(server)
        with MarftRecorder(log=InMemoryLog()) as stays:
            stays.capture(client)
            recorder.capture(client)
            with recorder.episode():
                call = Call(_live(recorder), "late")
            recorder.close()
            ask(client, user=call.tag)
    assert server.requests[0].body.keys() == {"messages", "model"} and not log.turns


def test_two_recorders_on_one_client_get_what_is_theirs() -> None:
    first, second = InMemoryLog(), InMemoryLog()
    with (
        ScriptedServer(_echo) as server,
        MarftRecorder(log=first) as one,
        MarftRecorder(log=second) as two,
    ):
        client = sdk(server)
        one.capture(client)
        two.attach_client(client, "planner")
        with one.episode(id="1"), two.episode(id="2"):
            call = Call(_live(one), "writer")
            with call.current():
                ask(client, messages=_says("one"))
            call.finish()
            ask(client, messages=_says("two"))
            two.close()
            ask(client, messages=_says("nobody"))
            with (later := Call(_live(one), "writer")).current():
                ask(client, messages=_says("one again"))
            later.finish()
    assert [(t.agent, t.text) for t in first.turns] == [("writer", "one"), ("writer", "one again")]
    assert [(t.agent, t.text) for t in second.turns] == [("planner", "two")]
    assert [r.headers.get("x-marft-episode") for r in server.requests] == ["1", "2", None, "1"]


def test_the_inner_call_gets_the_request() -> None:
    with recording(_echo) as (server, recorder, log):
        client = sdk(server)
        recorder.capture(client)
        with recorder.episode():
            outer = Call(_live(recorder), "team")
            with outer.current():
                inner = Call(_live(recorder), "tool", parent_agent="team")
                with inner.current():
                    ask(client, messages=_says("inside"))
                inner.finish()
                ask(client, messages=_says("outside"))
            outer.finish()
    assert [(t.agent, t.text, t.parent_agent) for t in log.turns] == [
        ("tool", "inside", "team"),
        ("team", "outside", None),
    ]


def _in_child(act: Any) -> None:
    """Run ``act`` in a forked child that leaves without clean-up, as workers do."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_fork_in_the_middle_of_an_episode(tmp_path: Path) -> None:
    """The child's turns are the episode's, in a segment of its own; the parent alone ends it."""
    with (
        ScriptedServer(_echo) as server,
        MarftRecorder(tmp_path) as recorder,
        recorder.episode(id="e") as episode,
    ):
        recorder.attach_client(client := sdk(server), "planner")
        ask(client, messages=_says("before"))
        live = _live(recorder)

        def child() -> None:
            recorder.attach_client(own := sdk(server), "planner")
            ask(own, messages=_says("in the child"))
            live.end()
            assert recorder.flush()

        with _held(live.lock):
            _in_child(child)
        ask(client, messages=_says("after"))
        assert len(episode.turns()) == 2
    (folded,) = LogReader(tmp_path).episodes()
    assert {t.text for t in folded.turns} == {"before", "in the child", "after"}
    assert len({t.turn_id for t in folded.turns}) == 3
    assert folded.ended is not None and folded.ended.reason == "terminated"
    files = [f.read_text() for f in tmp_path.glob("*.jsonl")]
    assert len(files) == 2 and sum(text.count('"episode_ended"') for text in files) == 1


@contextmanager
def _held(lock: Any) -> Generator[None]:
    """``lock`` held by another thread, which a forked child does not have."""
    taken, release = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    try:
        yield
    finally:
        release.set()
        thread.join()
