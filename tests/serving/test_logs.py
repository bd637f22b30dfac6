"""Lines say who asked what of whom, stay lines whatever is in them, and hold up nobody."""

from __future__ import annotations

import json
import logging
import logging.config
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import ConfigError
from marft_agents.serving.aliases import Route
from marft_agents.serving.log_lines import (
    LineFormatter,
    LineHandler,
    Told,
    json_say,
    logging_to,
    say,
)
from marft_agents.serving.logs import log_visit
from marft_agents.serving.passage import Outcome
from marft_agents.serving.visits import Visit
from tests.serving.logged import logged_requests, told
from tests.serving.recording_kit import CHAT
from tests.serving.stage import House, Stage, running_stage

LOG = logging.getLogger("marft_agents.tests")
EVIL = 'a"b\nINFO request id=forged\r\x1b[31m\x00\x85\u2028 ä status=200'


def _record(message: object, level: int = logging.INFO, trace: Any = None) -> logging.LogRecord:
    return logging.LogRecord("marft_agents.x", level, "x.py", 1, message, (), trace)


def _visit(**more: Any) -> Visit:
    fields: dict[str, Any] = {
        "id": "r-1",
        "asked_id": None,
        "method": "POST",
        "path": CHAT,
        "peer": "127.0.0.1",
        "began": 0.0,
        "client": "app",
        "status": 200,
        "seconds": 1.23456,
    }
    return Visit(**(fields | more))


OUTCOME = Outcome(
    route=Route("router", 3),
    replica="engine-1",
    client="app",
    episode="e1",
    request_id="r-1",
    streamed=True,
    status=200,
    seconds=1.2,
    first_s=0.25,
    prompt_tokens=7,
    completion_tokens=9,
    problem=None,
)


# -- what a line looks like --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "json"])
def test_nothing_leaves_its_line(kind: Any) -> None:
    formatter = LineFormatter(kind)
    for record in (
        _record(Told({"event": "request", "path": EVIL, "client": EVIL})),
        _record(EVIL),
    ):
        line = formatter.format(record)
        assert line.isascii() and line.isprintable()
        assert len(line.splitlines()) == 1
    if kind == "json":
        assert json.loads(formatter.format(_record(EVIL)))["message"] == EVIL


def test_the_same_fields_in_both_formats() -> None:
    told = Told({"event": "swap", "agent": "router", "none": None, "s": 0.123456, "t": "a b"})
    text = LineFormatter("text").format(_record(told, logging.WARNING))
    assert text[24:] == ' warning swap agent=router s=0.1235 t="a b"'
    fields = json.loads(LineFormatter("json").format(_record(told, logging.WARNING)))
    assert fields.pop("time").endswith("Z")
    assert fields == {
        "level": "warning", "event": "swap", "agent": "router", "s": 0.1235, "t": "a b"
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["text", "json"])
def test_a_trace_is_one_line(kind: Any) -> None:
    try:
        raise ValueError(EVIL)
    except ValueError as error:
        record = _record("it failed", logging.ERROR, (ValueError, error, error.__traceback__))
    line = LineFormatter(kind).format(record)
    assert "ValueError" in line and line.isprintable()


def test_secrets_of_known_shapes_are_masked_and_long_values_cut() -> None:
    key = "sk-proj-" + "aB3dE5gH7jK9" * 4
    line = LineFormatter("text").format(_record(f"refused: {key}"))
    assert key not in line and "refused" in line
    assert len(LineFormatter("text").format(_record("x" * 50_000))) < 1200


def test_what_is_announced_is_json_too() -> None:
    lines: list[str] = []
    announce = json_say(lines.append)
    announce("")
    announce("ready: base_url http://127.0.0.1:8000/v1")
    [line] = lines
    event = json.loads(line)
    assert (event["event"], event["message"][:6]) == ("say", "ready:")


# -- where it goes -----------------------------------------------------------------------------


def test_a_file_that_was_moved_away_is_opened_anew(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    with logging_to("text", "info", path) as handler:
        say("first")
        _written(path, "first")
        path.rename(tmp_path / "serve.log.1")
        say("second")
        _written(path, "second")
        assert handler.lost == 0
    assert "first" not in path.read_text()
    assert path.stat().st_mode & 0o007 == 0


def _written(path: Path, text: str) -> None:
    deadline = time.monotonic() + 5
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_levels_and_what_was_set_before(tmp_path: Path) -> None:
    package = logging.getLogger("marft_agents")
    before = package.level, package.propagate, list(package.handlers)
    path = tmp_path / "serve.log"
    with logging_to("json", "warning", path):
        say("quiet")
        say("loud", logging.WARNING, reason="x")
        LOG.error("a bug of %s", "ours")
        logging.getLogger("uvicorn").warning("Invalid HTTP request received.")
    assert (package.level, package.propagate, list(package.handlers)) == before
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["loud", "log", "log"]
    assert lines[1]["message"] == "a bug of ours"


def test_a_reader_that_stopped_reading_holds_up_nobody() -> None:
    read_end, write_end = os.pipe()
    handler = LineHandler("text", descriptor=write_end)
    for _ in range(25_000):
        handler.emit(_record("x" * 200))  # returns, or this test would never end
    # 10,000 wait, up to as many are being written, and a pipe holds some hundreds.
    assert handler.lost > 4_000
    os.close(read_end)
    handler.finish()
    os.close(write_end)


def test_a_full_disk_loses_lines_and_says_so_once(capfd: pytest.CaptureFixture[str]) -> None:
    with logging_to("text", "info", Path("/dev/full")) as handler:
        say("one")
        say("two")
    assert handler.lost == 2
    assert capfd.readouterr().err.count("cannot write /dev/full") == 1


def test_a_file_that_cannot_be_opened_is_a_clear_error(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"--log-file .* cannot be written"),
        logging_to("text", "info", tmp_path / "no" / "such" / "folder.log"),
    ):
        pass
    assert threading.active_count() < 50


def test_a_library_that_sets_up_logging_does_not_end_ours(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    with logging_to("text", "info", path):
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
        say("still")
    assert " still" in path.read_text()


# -- requests ----------------------------------------------------------------------------------


def test_the_line_of_a_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "marft_agents")
    log_visit(_visit(outcome=OUTCOME, turns="t1", episode="e1"))
    [fields] = told(caplog, "request")
    assert {k: v for k, v in fields.items() if v is not None} == {
        "event": "request",
        "id": "r-1",
        "client": "app",
        "peer": "127.0.0.1",
        "method": "POST",
        "path": CHAT,
        "status": 200,
        "seconds": 1.23456,
        "episode": "e1",
        "turns": "t1",
        "agent": "router",
        "version": 3,
        "replica": "engine-1",
        "first_s": 0.25,
        "prompt_tokens": 7,
        "completion_tokens": 9,
    }


@pytest.mark.parametrize(
    ("more", "level"),
    [
        ({}, logging.INFO),
        ({"status": 404}, logging.INFO),
        ({"status": 503}, logging.WARNING),
        ({"status": None}, logging.WARNING),
        ({"path": "/ready"}, logging.DEBUG),
        ({"path": "/metrics"}, logging.DEBUG),
        ({"path": "/ready", "status": 503}, logging.WARNING),
    ],
)
def test_levels_of_requests(
    caplog: pytest.LogCaptureFixture, more: dict[str, Any], level: int
) -> None:
    caplog.set_level(logging.DEBUG, "marft_agents")
    log_visit(_visit(**more))
    assert [record.levelno for record in caplog.records] == [level]


def test_no_words_of_a_request_and_no_key_are_logged(
    house: House, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    key, secret = "sk-app-0123456789", "the-patient-has-a-rash"
    with running_stage(house, api_key=key) as stage, caplog.at_level(logging.DEBUG, "marft_agents"):
        stage.http.headers["Authorization"] = f"Bearer {key}"
        messages = [{"role": "user", "content": secret}]
        url = f"{stage.url}{CHAT}?token={secret}"
        for more in ({}, {"stream": True}, {"model": "nobody"}, {"n": "x"}):
            stage.http.post(url, json={"model": "router", "messages": messages} | more)
        logged_requests(stage, caplog, 4)
        lines = [LineFormatter("text").format(record) for record in caplog.records]
    assert len(lines) >= 4
    assert not [line for line in lines if secret in line or key in line]


def test_refusals_say_who_and_why(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "marft_agents")
    stage.chat("nobody\nforged")
    [fields] = logged_requests(stage, caplog, 1)
    assert (fields["status"], fields["client"]) == (404, "anybody")
    assert "no agent" in fields["problem"]
    [record] = [r for r in caplog.records if isinstance(r.msg, Told)]
    assert len(LineFormatter("text").format(record).splitlines()) == 1


def test_swaps_and_replicas_have_their_lines(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "marft_agents")
    stage.operator.swap("router", 2)
    steps = [(f["step"], f["result"]) for f in told(caplog, "swap_step")]
    assert {("check", "ok"), ("load", "ok"), ("probe", "ok"), ("record", "ok")} <= {*steps}
    assert {result for _, result in steps} == {"ok"}
    [request] = logged_requests(stage, caplog, 1)
    assert (request["path"], request["client"]) == ("/marft/swap", "operator")
    [swap] = told(caplog, "swap")
    assert (swap["agent"], swap["version"], swap["result"]) == ("router", 2, "ok")
    assert (swap["from"], swap["by"]) == (1, "operator")
    stage.gateway.fleet.replicas[0].become("down", "it fell over")
    [state] = told(caplog, "replica")
    assert (state["state"], state["was"], state["reason"]) == ("down", "ready", "it fell over")
