"""Every answer has an id of its own, which leads to the log, the engine and the recorded turn."""

from __future__ import annotations

import logging

import pytest

from marft_agents.serving.visits import RequestIds
from tests.serving.logged import logged_requests
from tests.serving.recording_kit import CHAT, Clock, recording_stage
from tests.serving.stage import House, Stage, running_stage

ID = "X-Request-Id"


def test_ids_that_were_given_lately_are_not_given_again() -> None:
    clock = Clock()
    ids = RequestIds(clock)
    assert ids.take(b"mine") == b"mine"
    again = ids.take(b"mine")
    assert again != b"mine" and len(again) == 32
    clock.now += 599
    assert ids.take(b"mine") != b"mine"
    clock.now += 2
    assert ids.take(b"mine") == b"mine"
    assert len({ids.take(None) for _ in range(1000)}) == 1000


@pytest.mark.parametrize("bad", [b"", b"a b", b"-x", b"a\nb", b"\xff", b"x" * 129, b"a;b", b'"'])
def test_ids_that_are_none_are_replaced(bad: bytes) -> None:
    assert RequestIds().take(bad) != bad


def test_a_clients_id_is_taken_sent_on_and_returned(stage: Stage) -> None:
    answer = stage.http.post(
        f"{stage.url}{CHAT}", json={"model": "router", "messages": []}, headers={ID: "r-7"}
    )
    assert answer.headers.get_list(ID) == ["r-7"]
    assert stage.engine.seen[-1].headers["x-request-id"] == "r-7"
    assert answer.json()["id"] == "chatcmpl-r-7"


def test_a_second_use_of_an_id_gets_another_and_the_log_says_both(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "marft_agents")
    body = {"model": "router", "messages": []}
    url = f"{stage.url}{CHAT}"
    _, answer = [stage.http.post(url, json=body, headers={ID: "r-8"}) for _ in range(2)]
    first, second = logged_requests(stage, caplog, 2)
    assert (first["id"], first["asked_id"]) == ("r-8", None)
    assert second["id"] == answer.headers[ID] != "r-8"
    assert second["asked_id"] == "r-8"


def test_every_answer_has_an_id_errors_too(house: House) -> None:
    with running_stage(house, api_key="sk-app-0123456789") as stage:
        key = {"Authorization": "Bearer sk-app-0123456789"}
        url = stage.url
        answers = [
            stage.http.get(f"{url}/health"),
            stage.http.get(f"{url}/nowhere"),
            stage.http.delete(f"{url}{CHAT}"),
            stage.http.post(f"{url}{CHAT}", json={"model": "router"}),
            stage.http.post(f"{url}{CHAT}", content=b"x" * 5000, headers=key),
            stage.http.post(f"{url}{CHAT}", json={"model": "nobody"}, headers=key),
            stage.http.get(f"{url}/health", headers={"Host": "evil.example"}),
        ]
        assert [a.status_code for a in answers] == [200, 404, 405, 401, 413, 404, 403]
        assert len({a.headers[ID] for a in answers}) == len(answers)


def test_a_bug_in_a_route_has_an_id_and_a_line_too(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "marft_agents")

    def bug(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(stage.gateway.fleet, "choose", bug)
    answer = stage.chat()
    assert answer.status_code == 500 and answer.headers[ID]
    [line] = logged_requests(stage, caplog, 1)
    assert (line["id"], line["status"]) == (answer.headers[ID], 500)
    assert line["problem"] == "ZeroDivisionError"


def test_from_the_log_to_the_turn_and_back(house: House, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "marft_agents")
    with recording_stage(house) as recorder:
        _, answer = recorder.ask(stream=False), recorder.ask(stream=True)
        [_, line] = logged_requests(recorder.stage, caplog, 2)
        turn = recorder.wait_for_turns(2)[-1]
        assert line["turns"] == turn.turn_id
        assert turn.response_id == f"chatcmpl-{line['id']}"
        assert line["id"] == answer.headers[ID]
        assert (line["episode"], line["agent"], line["version"]) == ("e1", "router", 1)
