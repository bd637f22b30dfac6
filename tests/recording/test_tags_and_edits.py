"""Calls that name themselves in a request, texts that were replaced, a recorder that is off."""

from __future__ import annotations

import threading
from pathlib import Path

from marft_agents import MarftRecorder
from marft_agents.log import LogReader
from marft_agents.recording import Call
from marft_agents.schema import EditEvent
from marft_agents.testing import InMemoryLog, ScriptedServer
from tests.integrations.autogen_kit import round_robin
from tests.recording.kit import HELLO, ask, recording, sdk


def test_a_tagged_request_belongs_to_its_call_from_anywhere() -> None:
    with recording() as (server, recorder, log):
        client = sdk(server)
        recorder.capture(client)
        with recorder.episode(id="e"):
            live = recorder.current()
            assert live is not None
            call = Call(live, "planner", parent_agent="writer", parent_turn="t0")
            thread = threading.Thread(target=ask, args=(client,), kwargs={"user": call.tag})
            thread.start()
            thread.join()
            call.finish()
    (turn,) = log.turns
    assert (turn.agent, turn.parent_agent, turn.parent_turn) == ("planner", "writer", "t0")
    assert turn.token_ids and "user" not in server.requests[0].body


def test_a_tag_leaves_no_trace_when_nothing_else_is_added() -> None:
    with recording(inject="never") as (server, recorder, _):
        client = sdk(server)
        recorder.capture(client)
        with recorder.episode():
            live = recorder.current()
            assert live is not None
            call = Call(live, "planner")
            ask(client, user=call.tag)
            call.finish()
    assert server.requests[0].body == {"messages": HELLO, "model": "planner"}


def test_users_of_the_app_are_no_tags() -> None:
    with recording() as (server, recorder, log):
        client = sdk(server)
        recorder.capture(client)
        ask(client, user="marft:not-mine")
    assert server.requests[0].body["user"] == "marft:not-mine" and not log.turns


def test_an_edited_turn_keeps_its_ids_and_is_no_sample(tmp_path: Path) -> None:
    with ScriptedServer(["first words", "second"]) as server, MarftRecorder(tmp_path) as recorder:
        client = sdk(server)
        recorder.attach_client(client, "writer")
        with recorder.episode(id="e") as episode:
            ask(client)
            (turn_id,) = episode.turns()
            episode.edit(turn_id, "words that somebody corrected", editor="ann")
            ask(client, messages=[{"role": "user", "content": "words that somebody corrected"}])
        recorder.edit("e", turn_id, "and once more")
    episode = LogReader(tmp_path).episode("e")
    edited, after = episode.turns
    assert (edited.text, edited.edited_text) == ("first words", "and once more")
    assert edited.token_ids and edited.untrainable_reason == "edited by a human"
    assert after.depends_on == [turn_id] and after.trainable


def test_the_editor_is_on_record() -> None:
    with recording() as (_, recorder, log):
        recorder.edit("e", "t", "x", editor="ann")
    (edit,) = log.of(EditEvent)
    assert (edit.turn_id, edit.text, edit.editor) == ("t", "x", "ann")


def test_a_recorder_that_is_off_touches_nothing() -> None:
    log = InMemoryLog()
    with ScriptedServer() as server, MarftRecorder(log=log, enabled=False) as recorder:
        team = round_robin(server.url)
        before = dict(vars(team))
        assert recorder.wrap(team) is team and vars(team) == before
        client = sdk(server)
        recorder.attach_client(client, "planner")
        with recorder.episode() as episode:
            ask(client)
            episode.reward(1.0)
    assert not log.events
    assert server.requests[0].body == {"messages": HELLO, "model": "planner"}
