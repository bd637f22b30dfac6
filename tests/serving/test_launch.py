"""Engines are started side by side, each with its part; one that fails holds up no other."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest

from marft_agents.errors import ConfigError, EngineError
from marft_agents.serving import ServerProcess
from marft_agents.serving.plan import ServeSettings, check_settings
from tests.serving import fake_engine
from tests.serving.fake_engine import FakeEngine
from tests.serving.stage import House
from tests.serving.test_server import _until  # pyright: ignore[reportPrivateUsage] one way to wait


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"servers": ("http://a:1", "http://a:1/v1")}, "http://a:1 is given twice"),
        ({"servers": ("http://a:1",), "replicas": 2}, "--replicas: said of an engine that serve"),
        ({"servers": ("http://a:1",), "engine": "local"}, "--engine local: said of an engine"),
        ({"servers": ("http://a:1",), "gpus": ("0",)}, "--gpus: said of an engine that serve"),
        ({"replicas": 0}, "--replicas 0"),
    ],
)
def test_settings_that_contradict_each_other(
    tmp_path: Path, more: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_settings(ServeSettings(tmp_path, "m", **more))  # pyright: ignore[reportArgumentType]


def _python(folder: Path) -> str:
    """Runs the scripted engine, tells its part of the machine, and fails the first time."""
    script = folder / "engine-python"
    script.write_text(
        "#!/bin/sh\n"
        "echo gpus=$CUDA_VISIBLE_DEVICES\n"
        f"if mkdir {folder}/first 2>/dev/null; then echo 'ValueError: not today'; exit 3; fi\n"
        f'exec {sys.executable} {fake_engine.__file__} "$@"\n'
    )
    script.chmod(0o755)
    return str(script)


def _server(house: House, *extra: str) -> ServerProcess:
    return ServerProcess(house.registry.root, model=house.base_dir, extra=extra, start_timeout_s=60)


def test_one_that_does_not_start_is_left_out_and_tried_again(house: House) -> None:
    words = ["--engine", "local", "--engine-python", _python(house.root)]
    with _server(house, *words, "--replicas", "2", "--gpus", "5,7") as server:
        output = server.log.read_text
        assert "takes no requests, the others do" in output()
        assert "ValueError: not today" in output()
        answer = httpx.post(
            f"{server.base_url}/chat/completions", json={"model": "router", "messages": []}
        )
        assert answer.status_code == 200
        _until(lambda: " takes requests" in output(), "it was not tried again")
        logs = [(house.registry.root / f".engine-{i}.log").read_text() for i in range(2)]
        assert [log.splitlines()[0] for log in logs] == ["gpus=5", "gpus=7"]


def test_when_none_starts_the_error_of_one_is_told(house: House) -> None:
    words = ["--engine", "local", "--engine-python", _python(house.root)]
    with pytest.raises(EngineError, match=r"ended with code 3.*not today"):
        _server(house, *words).start()


def test_engines_that_run_elsewhere_are_used_together(house: House) -> None:
    with FakeEngine() as one, FakeEngine() as other:
        words = ["--server", one.url, "--server", other.url]
        with _server(house, *words) as server, httpx.Client() as http:
            for i in range(12):
                body = {"model": "router", "messages": []}
                headers = {"X-Marft-Episode": f"e{i}"}
                url = f"{server.base_url}/chat/completions"
                assert http.post(url, json=body, headers=headers).status_code == 200
        for engine in (one, other):
            assert set(engine.adapters) == {"router@v1", "writer@v1"}
            assert engine.bodies("/v1/chat/completions")
