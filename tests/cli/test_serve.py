"""``marft-agents serve``: a mistake is one line, exit code 2, before any engine starts."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import click
import pytest

from marft_agents.cli import main
from marft_agents.cli._serve_help import SECTIONS
from marft_agents.cli._serve_logs import logged
from marft_agents.cli.serve import command
from marft_agents.registry import Registry, locks
from tests.registry.bases import make_base
from tests.serving.stage import House, fake_probe, make_house


@pytest.fixture
def house(tmp_path: Path) -> House:
    house = make_house(tmp_path)
    house.publish("router", untrained=True)
    return house


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str]:
    """Exit code and stderr."""
    monkeypatch.setattr(sys, "argv", ["marft-agents", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code, capsys.readouterr().err


Run = tuple[pytest.MonkeyPatch, pytest.CaptureFixture[str]]


@pytest.fixture
def io(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def no_engine(*_: object, **__: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr("marft_agents.serving.process.EngineProcess.start", no_engine)
    return monkeypatch, capsys


def _one_line(code: int, err: str, *parts: str) -> None:
    assert code == 2
    assert err.count("\n") == 1, err
    for part in parts:
        assert part in err


def test_every_option_has_its_heading(capsys: pytest.CaptureFixture[str]) -> None:
    named = [name for names in SECTIONS.values() for name in names.split()]
    options = {p.name for p in command.params if isinstance(p, click.Option)}
    assert sorted(named) == sorted(str(name) for name in options)
    with pytest.raises(SystemExit):
        command.main(["--help"])
    out = capsys.readouterr().out
    assert all(f"\n{heading}:\n" in out for heading in SECTIONS)
    assert "--help" in out


def test_no_agents_at_all(io: Run, tmp_path: Path) -> None:
    base = make_base(tmp_path / "b")
    code, err = run(*io, "serve", tmp_path / "adapters", "--model", base, "--port", 0)
    _one_line(code, err, "adapters has no agent", "--agents planner,writer")


def test_a_model_that_is_none(io: Run, house: House) -> None:
    code, err = run(*io, "serve", house.registry.root, "--model", "/no/model", "--port", 0)
    _one_line(code, err, "no model folder at '/no/model'")


def test_the_wrong_base_model(io: Run, house: House, tmp_path: Path) -> None:
    other = make_base(tmp_path / "other-model", seed=7)
    code, err = run(*io, "serve", house.registry.root, "--model", other, "--port", 0)
    fingerprint = house.base.fingerprint[:12]
    _one_line(code, err, "router@v1 was trained on base-model", fingerprint, "serves other-model")


def test_an_adapter_the_engine_would_refuse(io: Run, house: House) -> None:
    house.publish("router", probe=fake_probe(2), r=2, rank_pattern={"v_proj": 24})
    house.registry.promote("router", 2, by="t", evidence={})
    arguments = ["serve", house.registry.root, "--model", house.base_dir, "--port", 0]
    code, err = run(*io, *arguments, "--max-lora-rank", 16)
    _one_line(code, err, "router@v2", "24", "limit is 16", "--max-lora-rank 32")


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--host", "0.0.0.0"], ["--host 0.0.0.0", "--api-key-env"]),
        (["--host", "::"], ["--host ::", "--api-key-env"]),
        (["--api-key-env", "MARFT_NO_SUCH_KEY"], ["'MARFT_NO_SUCH_KEY' is empty"]),
        (["--max-lora-rank", "24"], ["--max-lora-rank 24", "1 8 16 32 64 128 256 320 512"]),
        (["--agents", "base"], ["reserved adapter name 'base'"]),
        (["--agents", "A b,a-b"], ["both give the adapter name 'a-b'"]),
        (["--engine-python", "/no/python"], ["/no/python", "--engine local"]),
        (["--server", "10.0.0.7:8000"], ["'10.0.0.7:8000' is no address", "http://host:port"]),
        (["--server", "ftp://x"], ["'ftp://x' is no address", "http://host:port"]),
        (["--server", "http://h:99999"], ["'http://h:99999' is no address"]),
        (["--server", "http://h:1/?x=1"], ["is no address of a server"]),
        (["--server", "http://u:hush@h:1"], ["no password", "--server-key-env"]),
    ],
)
def test_settings_that_cannot_work(
    io: Run, house: House, flags: list[str], parts: list[str]
) -> None:
    arguments = ["serve", house.registry.root, "--model", house.base_dir, "--port", 0, *flags]
    code, err = run(*io, *arguments)
    _one_line(code, err, *parts)
    assert "hush" not in err


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("serve", "--probe-tolerance"),
        ("serve", "--start-timeout"),
        ("serve", "--stop-timeout"),
        ("serve", "--lease-timeout"),
        ("serve", "--episode-idle-timeout"),
        ("adapters canary", "--max-latency-ratio"),
        ("adapters promote", "--max-latency-ratio"),
    ],
)
def test_numbers_that_are_none(
    io: Run, house: House, command: str, option: str, value: str
) -> None:
    code, err = run(*io, *command.split(), "router", option, value)
    assert code == 2
    assert f"Invalid value for '{option}'" in err


def test_a_port_that_is_taken(io: Run, house: House) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, err = run(
            *io, "serve", house.registry.root, "--model", house.base_dir, "--port", port
        )
    _one_line(code, err, f"cannot listen on 127.0.0.1:{port}", "another --port")


def test_a_folder_that_another_server_serves(io: Run, house: House) -> None:
    with locks.serving(house.registry.root, "http://127.0.0.1:8000"):
        arguments = ["serve", house.registry.root, "--model", house.base_dir, "--port", 0]
        code, err = run(*io, *arguments, "--agents", "new")
    _one_line(code, err, "is served already, by process", "http://127.0.0.1:8000")
    assert house.registry.agents() == ["router"]


def test_agents_whose_modules_the_model_lacks(io: Run, house: House, tmp_path: Path) -> None:
    arguments = ["serve", tmp_path / "new", "--model", house.base_dir, "--port", 0]
    code, err = run(*io, *arguments, "--agents", "a", "--target-modules", "w9")
    _one_line(code, err, "target module 'w9'", "down_proj, k_proj")
    assert Registry(tmp_path / "new").agents() == []


def test_help_names_every_flag(io: Run) -> None:
    monkeypatch, capsys = io
    monkeypatch.setattr(sys, "argv", ["marft-agents", "serve", "--help"])
    with pytest.raises(SystemExit):
        main()
    text = capsys.readouterr().out
    for flag in ("--engine-python", "--server", "--agents", "--api-key-env", "--max-lora-rank"):
        assert flag in text


@pytest.mark.parametrize("kind", ["text", "json"])
def test_nobody_who_reads_stdout_is_no_reason_to_stop(kind: str, tmp_path: Path) -> None:
    def broken(_: str) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    log = tmp_path / "serve.log"
    options = {"log_format": kind, "log_level": "info", "log_file": log}
    with logged(options, broken) as say:
        say("engine-0 is back")
    assert "stdout takes nothing" in log.read_text()
    assert "engine-0 is back" in log.read_text()
