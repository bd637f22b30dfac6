"""``serve --record`` as users run it: a process, a folder, a restart, and mistakes."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from marft_agents.cli import main
from marft_agents.log import LogReader
from marft_agents.serving import ServerProcess
from tests.serving.stage import House
from tests.serving.test_server import fake_python


@contextmanager
def _server(house: House, logs: Path) -> Generator[ServerProcess]:
    arguments = ["--engine", "local", "--engine-python", fake_python(house.root)]
    arguments += ["--record", str(logs)]
    with ServerProcess(
        house.registry.root, model=house.base_dir, extra=arguments, start_timeout_s=30
    ) as server:
        yield server


def _ask(server: ServerProcess, agent: str, stream: bool = False) -> None:
    body = {"model": agent, "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    url = f"{server.url}/episodes/e1/agents/{agent}/v1/chat/completions"
    httpx.post(url, json=body, timeout=10).raise_for_status()


@pytest.mark.skipif(sys.platform != "linux", reason="the scripted engine is a shell script")
def test_an_episode_over_two_servers(house: House, tmp_path: Path) -> None:
    logs = tmp_path / "new" / "logs"
    with _server(house, logs) as server:
        _ask(server, "router")
        said = server.log.read_text()
        assert f"recording calls to {server.url}/episodes/<episode>/agents/<agent>/v1" in said
    with _server(house, logs) as server:
        _ask(server, "writer", stream=True)
        reward = {"value": 1.0}
        httpx.post(f"{server.url}/episodes/e1/rewards", json=reward).raise_for_status()
        httpx.post(f"{server.url}/episodes/e1/end", json={}).raise_for_status()
    (episode,) = LogReader(logs).episodes()
    assert [(t.agent, t.index, t.trainable) for t in episode.turns] == [
        ("router", 0, True),
        ("writer", 1, True),
    ]
    assert episode.untrainable_reason is None
    assert len(episode.sources) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--record-all"], "say where, too: --record DIR"),
        (["--record", "{file}/logs"], "cannot be written"),
        (["--record", "{file}"], "is a file"),
        (["--record", "logs", "--episode-idle-timeout", "0"], "0"),
    ],
)
def test_mistakes_are_one_line(
    house: House,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = house.root / "a-file"
    file.write_text("")
    words = [word.replace("{file}", str(file)) for word in arguments]
    command = ["serve", str(house.registry.root), "--model", str(house.base_dir), *words]
    monkeypatch.setattr(sys, "argv", ["marft-agents", *command, "--port", "0"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
