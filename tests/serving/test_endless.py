"""An episode that nobody ends: what is held of it stays small, and its log whole."""

from __future__ import annotations

import gc
import json
import types
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from marft_agents.cli import cli
from marft_agents.log import LogReader
from marft_agents.recording import MarftRecorder
from marft_agents.recording.core import Core
from marft_agents.recording.exchange import Exchange
from marft_agents.recording.linking import Ledger
from marft_agents.serving.episodes import Episodes, GatewayEpisode
from marft_agents.serving.resume import recent_episodes
from marft_agents.serving.tool_results import note_tools
from marft_agents.serving.watch import HttpCall, Recorded
from marft_agents.testing import InMemoryLog

TURNS, NAMES = 200, 400
_ELSEWHERE = (Core, type, types.ModuleType, types.FunctionType, types.MethodType)


def _held_objects(root: object) -> int:
    """How many objects an episode holds, without the recorder that it belongs to."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, _ELSEWHERE):
            continue
        seen.add(id(thing))
        waiting += gc.get_referents(thing)
    return len(seen)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("recording.episode", "serving.episodes", "serving.resume"):
        monkeypatch.setattr(f"marft_agents.{module}.MOST_TURNS", TURNS)
        monkeypatch.setattr(f"marft_agents.{module}.MOST_NAMES", NAMES)
    monkeypatch.setattr("marft_agents.recording.linking.MOST_NAMES", NAMES)
    monkeypatch.setattr("marft_agents.recording.linking.MOST_SOUGHT", 4 * TURNS)
    monkeypatch.setattr(Ledger.__init__, "__defaults__", (TURNS, 2**20))


def _text(number: int) -> str:
    return f"this is answer {number:06d}, in words of its own"


def _ask(
    live: GatewayEpisode, number: int, messages: list[dict[str, Any]], name: str | None = None
) -> None:
    """One call that is answered with a text and a tool call."""
    body = {"model": "router", "messages": messages}
    note_tools(live, "router", messages)
    call = HttpCall(live, "router", "act", None, 1)
    asked = httpx.Request("POST", "http://engine/v1/chat/completions")
    watch = Recorded(live, call, Exchange(call, asked, body))
    watch.begin(200, {"content-type": "application/json"})
    tool = {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": _text(number), "tool_calls": [tool]}
    choice = {"index": 0, "message": said, "finish_reason": "tool_calls"}
    watch.feed(json.dumps({"id": name or f"r{number}", "choices": [choice]}).encode())
    watch.over()


def _prompt(number: int) -> list[dict[str, Any]]:
    """A window over the conversation, as a bot sends it: task, last answers, what a tool gave."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "the task, always the same"}]
    for before in range(max(0, number - 3), number):
        messages.append({"role": "assistant", "content": _text(before)})
        messages.append({"role": "tool", "tool_call_id": f"c{before}", "content": f"got {before}"})
    return [*messages, {"role": "user", "content": f"and then, {number}?"}]


@pytest.mark.usefixtures("small")
def test_twenty_thousand_turns(tmp_path: Path) -> None:
    held: dict[int, int] = {}
    with MarftRecorder(tmp_path) as recorder:
        episodes = Episodes(recorder.core)
        for number in range(20_000):
            live = episodes.use("e1")
            assert live is not None
            _ask(live, number, _prompt(number))
            if number % 500 == 499:
                assert recorder.flush()
            if number in (5_000, 19_999):
                assert recorder.flush()
                live.ledger.catch_up()
                held[number] = _held_objects(live)
        assert episodes.end("e1", "terminated", None).newest()["earlier_turns"] == 20_000 - TURNS
    assert held[19_999] < 1.05 * held[5_000] < 30_000
    checked = CliRunner().invoke(cli, ["logs", "validate", str(tmp_path)])
    assert checked.exit_code == 0, checked.output
    episode = LogReader(tmp_path).episode("e1")
    turns = episode.turns
    assert [turn.index for turn in turns] == list(range(20_000))
    assert len(episode.tools) == 19_999
    ids = [turn.turn_id for turn in turns]
    assert all(turn.depends_on == ids[max(0, i - 3) : i] for i, turn in enumerate(turns))
    assert all(turn.depends_on_complete for turn in turns[:TURNS])
    assert not any(turn.depends_on_complete for turn in turns[TURNS + 1 :])


@pytest.mark.usefixtures("small")
def test_an_edge_to_a_turn_that_is_let_go_is_said_to_be_missing() -> None:
    log = InMemoryLog()
    recorder = MarftRecorder(log=log)
    live = Episodes(recorder.core).begin("e1", None, {})
    for number in range(TURNS + 2):
        _ask(live, number, [])
    quote = {"role": "assistant", "content": _text(0)}
    _ask(live, 9_000, [quote])
    _ask(live, 9_001, [{"role": "assistant", "content": _text(TURNS)}])
    _ask(live, 9_002, [{"role": "tool", "tool_call_id": "c1", "content": _text(9_001)}])
    recorder.close()
    *_, lost, found, half = log.turns
    assert (lost.depends_on, lost.depends_on_complete) == ([], False)
    assert (found.depends_on, found.depends_on_complete) == ([log.turns[TURNS].turn_id], True)
    assert (half.depends_on, half.depends_on_complete) == ([found.turn_id], False)


@pytest.mark.usefixtures("small")
def test_an_id_that_is_used_again_after_a_long_time_loses_no_turn(tmp_path: Path) -> None:
    with MarftRecorder(tmp_path) as recorder:
        live = Episodes(recorder.core).begin("e1", None, {})
        for number in range(NAMES + 2):
            _ask(live, number, [])
        _ask(live, 9_000, [], name="r0")
    assert len(LogReader(tmp_path).episode("e1").turns) == NAMES + 3


@pytest.mark.usefixtures("small")
def test_after_a_restart_the_newest_turns_are_known(tmp_path: Path) -> None:
    with MarftRecorder(tmp_path) as recorder:
        live = Episodes(recorder.core).begin("e1", None, {})
        for number in range(TURNS + 50):
            _ask(live, number, [])
    with MarftRecorder(tmp_path) as recorder:
        known = recent_episodes(tmp_path, 60)
        assert len(known["e1"].turns) == TURNS
        episodes = Episodes(recorder.core, resumable=known)
        live = episodes.use("e1")
        assert live is not None
        _ask(live, 9_000, [{"role": "assistant", "content": _text(0)}], name="r0")
        episodes.end("e1", "terminated", None)
    last = LogReader(tmp_path).episode("e1").turns[-1]
    assert (last.index, last.depends_on, last.depends_on_complete) == (TURNS + 50, [], False)
    checked = CliRunner().invoke(cli, ["logs", "validate", str(tmp_path)])
    assert checked.exit_code == 0, checked.output


@pytest.mark.usefixtures("small")
def test_whether_an_old_turn_is_known_is_open() -> None:
    recorder = MarftRecorder(log=InMemoryLog())
    live = Episodes(recorder.core).begin("e1", None, {})
    _ask(live, 0, [])
    first = live.newest()["turns"][0]["turn_id"]
    assert (live.knows(first), live.knows("nobody")) == (True, False)
    for number in range(TURNS):
        _ask(live, number, [])
    assert (live.knows(first), live.knows("nobody")) == (None, None)
    assert live.newest()["earlier_turns"] == 1
    recorder.close()
