"""Keys open the routes of their role, for the agents they name, while the file holds them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from marft_agents.errors import ConfigError
from marft_agents.serving.access import Access
from marft_agents.serving.access_setup import check_access, make_access
from marft_agents.serving.keys import Client, Keyring, read_keys
from marft_agents.serving.refusals import Refusal
from tests.serving.recording_kit import recording_stage
from tests.serving.scraping import scrape_until
from tests.serving.stage import OPERATOR_KEY, House, Stage, running_stage

WEB, OPS, EYE = "web-0123456789abcdef", "ops-0123456789abcdef", "eye-0123456789abcdef"


def write(path: Path, keys: Any, mode: int = 0o600) -> Path:
    path.write_text(keys if isinstance(keys, str) else json.dumps({"keys": keys}))
    path.chmod(mode)
    return path


def entries(**more: Any) -> dict[str, Any]:
    digest = hashlib.sha256(EYE.encode()).hexdigest()
    return {
        "web": {"key": WEB, "agents": ["Router"], "max_in_flight": 2},
        "ops": {"role": "operator", "key": OPS},
        "eye": {"role": "monitor", "sha256": digest},
    } | more


def asked(key: str | None, *, peer: str = "127.0.0.1", operator: str | None = None) -> Request:
    headers = [(b"authorization", f"Bearer {key}".encode())] if key is not None else []
    headers += [(b"x-marft-operator-key", operator.encode())] if operator is not None else []
    return Request({"type": "http", "client": (peer, 1), "headers": headers})


def status(check: Callable[[Request], Client], request: Request) -> int | str:
    try:
        return check(request).name
    except Refusal as refusal:
        for secret in (WEB, OPS, EYE, OPERATOR_KEY):
            assert secret not in refusal.message
        return refusal.status


def test_a_key_opens_the_routes_of_its_role_alone(tmp_path: Path) -> None:
    access = Access(OPERATOR_KEY, keyring=Keyring(path=write(tmp_path / "keys.json", entries())))
    tokens = (WEB, OPS, EYE, OPERATOR_KEY, "wrong", "", None)
    opened = [status(access.application, asked(token)) for token in tokens]
    assert opened == ["web", 403, 403, 403, 401, 401, 401]
    opened = [status(access.operator, asked(None, operator=token)) for token in tokens]
    assert opened == [403, "ops", 403, "operator", 401, 401, 401]
    assert [status(access.operator, asked(token)) for token in tokens] == [401] * 7
    opened = [status(access.monitor, asked(token)) for token in tokens]
    assert opened == [403, "ops", "eye", "operator", 401, 401, 401]
    assert status(access.operator, asked(None, operator=OPS, peer="10.0.0.1")) == 403
    assert status(access.application, asked(f"{WEB}:marft:episode=e1")) == "web"
    client = access.application(asked(WEB))
    assert client.max_in_flight == 2
    assert [client.may_ask(n) for n in ("router", "Router", "writer", "..")] == [
        True,
        True,
        False,
        False,
    ]


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    toml = f'[keys.web]\nkey = "{WEB}"\nagents = ["Router"]\nmax_in_flight = 2\n'
    toml += f'[keys.ops]\nrole = "operator"\nkey = "{OPS}"\n'
    toml += f'[keys.eye]\nrole = "monitor"\nkey = "{EYE}"\n'
    files = write(tmp_path / "k.toml", toml), write(tmp_path / "k.json", entries())
    assert set(read_keys(files[0])) == set(read_keys(files[1]))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"a": {"key": "short"}}, "key a: a key has at least 16"),
        ({"a": {"key": WEB, "sha256": "0" * 64}}, "key a: give either"),
        ({"a": {}}, "key a: give either"),
        ({"a": {"sha256": "zz"}}, "key a: sha256 is 64"),
        ({"a": {"key": WEB, "role": "root"}}, "key a: role is one of"),
        ({"a": {"key": WEB, "agents": []}}, "key a: agents is a list"),
        ({"a": {"key": WEB, "agents": ["1"]}}, "no usable adapter name"),
        ({"a": {"key": WEB, "max_in_flight": 0}}, "key a: max_in_flight"),
        ({"a": {"key": WEB, "rolle": "x"}}, "unknown field 'rolle'"),
        ({"a": {"key": WEB}, "b": {"key": WEB}}, "two names share one key"),
        ({"a b": {"key": WEB}}, "is no name of a key"),
        ({"a": WEB}, "is no table"),
        ("[]", "is {"),
        ("{", "no valid JSON"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, keys: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Keyring(path=write(tmp_path / "keys.json", keys))
    assert message in str(caught.value) and WEB not in str(caught.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        read_keys(write(tmp_path / "keys.json", entries(), mode))


def test_a_secret_of_a_container_may_be_read_by_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "keys.json", entries(), 0o440)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert len(read_keys(path)) == 3
    for mode in (0o460, 0o444):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 600"):
            read_keys(path)


def test_rotation_without_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    path = write(tmp_path / "keys.json", {"web": {"key": WEB}})
    keyring = Keyring(path=path, now=lambda: now[0])
    access = Access(OPERATOR_KEY, keyring=keyring)
    fresh = "new-0123456789abcdef"

    def known(token: str) -> bool:
        now[0] += 2
        return status(access.application, asked(token)) == "web"

    write(path, {"web": {"key": fresh}})
    assert known(fresh) and not known(WEB)
    caplog.clear()
    with caplog.at_level(logging.ERROR):
        for broken in ("{", json.dumps({"keys": {"web": {"key": 5}}})):
            write(path, broken)
            assert known(fresh)
        write(path, {"web": {"key": WEB}}, 0o644)
        assert known(fresh)
        path.unlink()
        assert known(fresh) and known(fresh)
    assert len(caplog.messages) == 4
    assert all("stay valid" in m and WEB not in m and fresh not in m for m in caplog.messages)
    write(path, {})
    assert not known(fresh) and not known("")  # the last key is gone: closed, not open


def test_a_pipe_in_the_place_of_the_file_holds_up_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    path = write(tmp_path / "keys.json", {"web": {"key": WEB}})
    keyring = Keyring(path=path, now=lambda: now[0])
    path.unlink()
    os.mkfifo(path, 0o600)
    now[0] += 2
    assert keyring.client(WEB) == Client("web", "application")
    assert "is a pipe, which is not read again; the keys read before stay valid" in caplog.text


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3"])
def test_a_file_without_a_key_for_applications_opens_no_server(tmp_path: Path, host: str) -> None:
    path = write(tmp_path / "keys.json", {"ops": {"role": "operator", "key": OPS}})
    with pytest.raises(ConfigError, match="--keys FILE"):
        check_access(host, None, (), path)
    check_access(host, None, [("A", WEB)], path)
    check_access("127.0.0.1", None, (), path)
    with pytest.raises(ConfigError, match="share one key"):
        make_access("x", None, [("A", WEB), ("B", WEB)], None)


def _get(stage: Stage, key: str, path: str = "/v1/models") -> Any:
    return stage.http.get(f"{stage.url}{path}", headers={"Authorization": f"Bearer {key}"})


def test_a_key_for_some_agents_sees_and_asks_those(house: House) -> None:
    path = write(house.root / "keys.json", entries())
    access = Access(OPERATOR_KEY, keyring=Keyring(path=path))
    with running_stage(house, access=access) as stage:
        assert [m["id"] for m in _get(stage, WEB).json()["data"]] == ["router"]
        headers = {"Authorization": f"Bearer {WEB}"}
        for model, expected in (
            *(("router", 200), ("Router", 200), ("router@v1", 200), ("router@v9", 404)),
            *(("writer", 403), ("writer@v1", 403), ("base", 403), ("nobody", 403)),
        ):
            answer = stage.http.post(
                f"{stage.url}/v1/chat/completions",
                json={"model": model, "messages": []},
                headers=headers,
            )
            assert answer.status_code == expected
            assert expected != 404 or "writer" not in answer.text
        before = len(stage.engine.seen)
        for key in (OPS, EYE, OPERATOR_KEY):
            assert _get(stage, key).status_code == 403
            answer = stage.http.post(
                f"{stage.url}/v1/chat/completions",
                json={"model": "router"},
                headers={"Authorization": f"Bearer {key}"},
            )
            assert answer.status_code == 403
        assert len(stage.engine.seen) == before


def test_a_key_for_some_agents_cannot_log_turns_of_another(house: House) -> None:
    """Such a turn would be trained on as the other agent's."""
    path = write(house.root / "keys.json", entries())
    access = Access(OPERATOR_KEY, keyring=Keyring(path=path))
    key = {"Authorization": f"Bearer {WEB}"}
    with recording_stage(house, access=access) as desk:
        for agent, expected in (("writer", 403), ("router", 200)):
            answer = desk.post(
                f"/episodes/e1/agents/{agent}/v1/chat/completions",
                {"model": "router", "messages": []},
                headers=key,
            )
            assert answer.status_code == expected
        assert [turn.agent for turn in desk.turns] == ["router"]
        answer = desk.post(
            "/episodes/e9/agents/router/v1/chat/completions",
            {"model": "writer", "messages": []},
            headers=key,
        )
        assert answer.status_code == 403
        assert "X-Marft-Turn" not in answer.headers
        assert {event.episode_id for event in desk.events} == {"e1"}, "nothing was asked"
        assert [turn.error for turn in desk.turns] == [None]
        scrape_until(desk.stage, lambda p: p.sum("marft_refusals_total", status=403) == 2)
        begun = desk.post("/episodes", {"id": "e2"}, headers=key).json()
        assert list(begun["base_urls"]) == ["router"]
        for path, body in (
            ("/episodes", {"agents": ["router", "writer"]}),
            ("/episodes/e1/rewards", {"value": 1, "agent": "writer"}),
        ):
            assert desk.post(path, body, headers=key).status_code == 403
        scored = desk.post("/episodes/e1/rewards", {"value": 1, "agent": "router"}, headers=key)
        assert scored.status_code == 200
