"""No key is anywhere but where it is used; an engine answers nobody but its gateway."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from marft_agents.serving import ServerProcess
from marft_agents.serving.commands import EngineCommand, VllmInstall, local_command, vllm_command
from marft_agents.serving.engine_key import guarded, key_of, new_engine_key
from marft_agents.serving.engine_side import marft_engine_guard
from marft_agents.serving.engine_side.marft_engine_guard import VARIABLE, RequireKey
from tests.serving.stage import House
from tests.serving.test_server import fake_python

FROM_ENV = "sk-env-5f2d81c0aa7743e9"
FROM_FILE = "sk-file-90c1b7e2d4f64a11"
OPERATOR = "sk-operator-7b1f0e55c9d24c08"
WRONG = "sk-wrong-3c9a4471b06e4e12"


def _engine_environments(house: House) -> list[tuple[int, dict[str, str]]]:
    """Process and environment of every process that this house's engine consists of."""
    found: list[tuple[int, dict[str, str]]] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            data = (entry / "environ").read_bytes().decode(errors="replace")
            command = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        lines = [line.partition("=") for line in data.split("\0")]
        pairs = {name: value for name, _, value in lines}
        if VARIABLE in pairs and str(house.root) in command:
            found.append((int(entry.name), pairs))
    return found


def _ask_in_every_way(server: ServerProcess) -> list[httpx.Response]:
    chat = f"{server.url}/v1/chat/completions"
    recorded = f"{server.url}/episodes/e1/agents/router/v1/chat/completions"
    answers: list[httpx.Response] = []
    with httpx.Client(timeout=20) as http:
        for key in (FROM_ENV, FROM_FILE, OPERATOR, WRONG, f"{WRONG}:marft:episode=e1", "x"):
            told: dict[str, str] = {"Authorization": f"Bearer {key}"}
            for url in (chat, recorded):
                body: dict[str, Any] = {"model": "router", "messages": [{"role": "user"}]}
                body["messages"][0]["content"] = "say nothing of keys"
                answers.append(http.post(url, json=body, headers=told))
                answers.append(http.post(url, json=body | {"stream": True}, headers=told))
                answers.append(http.post(url, json=body | {"model": "no"}, headers=told))
                answers.append(http.post(url, content=b"{", headers=told))
            answers.append(http.get(f"{server.url}/v1/models", headers=told))
            answers.append(http.get(f"{server.url}/metrics", headers=told))
            for state in ("state", "swap"):
                url = f"{server.url}/marft/{state}"
                operator = {"X-Marft-Operator-Key": key}
                answers.append(http.get(url, headers=operator))
                swap = {"agent": "router", "version": 2}
                answers.append(http.post(url, json=swap, headers=operator))
        answers.append(
            http.post(
                f"{server.url}/episodes/e1/end", headers={"Authorization": f"Bearer {FROM_FILE}"}
            )
        )
    return answers


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_key_is_in_any_output_error_metric_trail_log_or_command_line(house: House) -> None:
    keys = house.root / "keys.json"
    keys.write_text(
        json.dumps(
            {"keys": {"web": {"key": FROM_FILE}, "ops": {"key": OPERATOR, "role": "operator"}}}
        )
    )
    keys.chmod(0o600)
    extra = ["--engine", "local", "--engine-python", fake_python(house.root)]
    extra += ["--keys", str(keys), "--api-key-env", "APP_KEY", "--record", str(house.root / "logs")]
    extra += ["--log-level", "debug"]
    with ServerProcess(
        house.registry.root,
        model=house.base_dir,
        extra=extra,
        env={"APP_KEY": FROM_ENV},
        start_timeout_s=30,
    ) as server:
        engines = _engine_environments(house)
        assert engines
        engine_key = engines[0][1][VARIABLE]
        own = (house.registry.root / ".operator-key").read_text().strip()
        secrets = [FROM_ENV, FROM_FILE, OPERATOR, WRONG, engine_key, own]
        answers = _ask_in_every_way(server)
        assert {a.status_code for a in answers} >= {200, 400, 401, 403, 404}
        for pid, environment in engines:
            assert environment.keys().isdisjoint({"APP_KEY"})
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            assert not [secret for secret in secrets if secret in command]
    texts = {f"answer {i}": f"{a.headers} {a.text}" for i, a in enumerate(answers)}
    for path in house.root.rglob("*"):
        if path.is_file() and path.name not in (".operator-key", "keys.json"):
            texts[str(path)] = path.read_bytes().decode("latin-1")
    assert any("events" in name or "logs" in name for name in texts)
    assert any('"turn"' in text for name, text in texts.items() if "logs" in name)
    where = [(name, s[:9]) for name, text in texts.items() for s in secrets if s in text]
    assert where == []
    assert stat.S_IMODE((house.registry.root / ".operator-key").stat().st_mode) == 0o600


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_engine_answers_its_gateway_alone_with_a_new_key_at_every_start(house: House) -> None:
    extra = ["--engine", "local", "--engine-python", fake_python(house.root)]
    seen: set[str] = set()
    for _ in range(2):
        with ServerProcess(
            house.registry.root, model=house.base_dir, extra=extra, start_timeout_s=30
        ) as server:
            pid, environment = _engine_environments(house)[-1]
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            engine = f"http://127.0.0.1:{int(command[command.index(b'--port') + 1])}"
            assert httpx.get(f"{engine}/v1/models").status_code == 401
            assert httpx.post(f"{engine}/v1/load_lora_adapter", json={}).status_code == 401
            key = {"Authorization": f"Bearer {environment[VARIABLE]}"}
            assert httpx.get(f"{engine}/v1/models", headers=key).status_code == 200
            assert httpx.get(f"{server.url}/ready").status_code == 200
            seen.add(environment[VARIABLE])
    assert len(seen) == 2


# -- how an engine is given its key ------------------------------------------------------------


def _commands(folder: Path) -> Iterator[EngineCommand]:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    install = VllmInstall("python", "0.32.0", cpu=True)
    yield vllm_command(
        folder, port=1, install=install, max_lora_rank=8, max_loras=2, target_modules=["q_proj"]
    )
    yield local_command(folder, port=1, max_lora_rank=8)


def test_the_key_is_in_the_environment_and_not_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    vllm, local = _commands(tmp_path / "model")
    for command in (vllm, local):
        key = new_engine_key()
        made = guarded(command, key)
        assert key_of(made) == key and key_of(command) is None
        assert not [word for word in made.argv if key in word]
    made = guarded(vllm, "k")
    assert made.argv[-2:] == ("--middleware", "marft_engine_guard.RequireKey")
    folder, other = (made.env["PYTHONPATH"] or "").split(os.pathsep)
    assert (Path(folder) / "marft_engine_guard.py").is_file() and other == "/somewhere"
    assert made.env["VLLM_API_KEY"] == "k"


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    del receive
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.close", "code": 1000})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


def test_the_guard_asks_for_the_key_on_every_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match=VARIABLE):
        RequireKey(_echo)
    monkeypatch.setenv(VARIABLE, "the-key")
    client = TestClient(RequireKey(_echo))
    for path in ("/health", "/adapters", "/invocations", "/tokenize", "/v1/models", "/docs", "/"):
        for method in ("GET", "POST", "OPTIONS", "DELETE"):
            for value in (
                None,
                "",
                "the-key",
                "Bearer the-ke",
                "bearer the-key",
                "Bearer the-key ",
            ):
                headers = {} if value is None else {"Authorization": value}
                answer = client.request(method, path, headers=headers)
                # Servers strip spaces around values; a test's client does not.
                assert answer.status_code == 401 and "the-key" not in answer.text
            twice = [("Authorization", "Bearer the-key"), ("Authorization", "Bearer x")]
            assert client.request(method, path, headers=twice).status_code == 401
            good = {"Authorization": "Bearer the-key"}
            assert client.request(method, path, headers=good).status_code == 200


def test_the_guard_guards_sockets_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "the-key")
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(RequireKey(_echo)({"type": "websocket", "headers": []}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_the_guard_stands_alone() -> None:
    """The engine's environment may be without this package."""
    source = Path(marft_engine_guard.__file__).read_text()
    assert "marft_agents" not in source.replace("marft_agents.serving.engine_side", "")
