"""Keys are made, listed and taken back; the file never holds one."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from marft_agents.cli import cli
from marft_agents.errors import ConfigError
from marft_agents.serving.keys import Keyring, read_keys


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["keys", *map(str, arguments)])


def test_a_key_from_its_making_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = run("new", file, "web", "--agents", "Planner,writer", "--max-in-flight", 3).output.strip()
    other = run("new", file, "ops", "--role", "operator").output.strip()
    assert len(key) > 40 and key != other
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert key not in file.read_text() and other not in file.read_text()
    client = Keyring(path=file).client(key)
    assert client is not None
    assert (client.name, client.role, client.max_in_flight) == ("web", "application", 3)
    assert client.agents == {"planner", "writer"}
    lines = run("list", file).output.splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["ops", "operator", "all", "-"],
        ["web", "application", "Planner,", "writer", "3"],
    ]
    assert run("revoke", file, "web").output == "web: revoked\n"
    assert [k.client.name for k in read_keys(file)] == ["ops"]
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("new", "{file}", "web"), "has a key 'web'"),
        (("new", "{file}", "a b"), "is no name of a key"),
        (("new", "{file}", "x", "--agents", ","), "agents is a list of names"),
        (("new", "{file}.toml", "x"), "edited by hand"),
        (("new", "{file}/below", "x"), "cannot"),
        (("revoke", "{file}", "nobody"), "no key 'nobody'; it has web"),
        (("list", "{file}.none"), "cannot read the key file"),
    ],
)
def test_mistakes(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    file = tmp_path / "keys.json"
    run("new", file, "web")
    result = run(*(argument.format(file=file) for argument in arguments))
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
    assert list(json.loads(file.read_text())["keys"]) == ["web"]
