"""Who is let in."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from starlette.requests import Request

from marft_agents.errors import ConfigError
from marft_agents.serving.access import Access
from marft_agents.serving.control import ensure_operator_key, read_operator_key
from marft_agents.serving.plan import ServeSettings, check_settings
from marft_agents.serving.refusals import Refusal, is_loopback


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("localhost", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
        ("127.0.0.1.example.org", False),
        ("", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org", ""])
def test_no_open_server_without_a_key(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--api-key-env"):
        check_settings(ServeSettings(tmp_path, "m", host=host))
    check_settings(ServeSettings(tmp_path, "m", host=host, api_key="k"))


def _request(peer: str | None, key: str) -> Request:
    client = (peer, 1) if peer is not None else None
    headers = [(b"x-marft-operator-key", key.encode()), (b"x-forwarded-for", b"127.0.0.1")]
    return Request({"type": "http", "client": client, "headers": headers})


@pytest.mark.parametrize("peer", ["10.0.0.1", "::ffff:10.0.0.1", None])
def test_control_from_another_machine_is_refused_even_with_the_key(peer: str | None) -> None:
    with pytest.raises(Refusal) as caught:
        Access("right").operator(_request(peer, "right"))
    assert caught.value.status == 403


def test_control_from_here_needs_the_key() -> None:
    Access("right").operator(_request("127.0.0.1", "right"))
    with pytest.raises(Refusal) as caught:
        Access("right").operator(_request("127.0.0.1", "wrong"))
    assert caught.value.status == 401 and "right" not in caught.value.message


def test_operator_key_is_private_and_kept(tmp_path: Path) -> None:
    adapters = tmp_path / "adapters"
    key = ensure_operator_key(adapters)
    path = adapters / ".operator-key"
    assert len(key) >= 32 and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ensure_operator_key(adapters) == key == read_operator_key(adapters)


@pytest.mark.parametrize(("text", "mode"), [("x" * 40, 0o644), ("short", 0o600), ("", 0o600)])
def test_an_operator_key_that_others_could_know_is_replaced(
    tmp_path: Path, text: str, mode: int
) -> None:
    path = tmp_path / ".operator-key"
    path.write_text(text)
    path.chmod(mode)
    assert ensure_operator_key(tmp_path) != text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_missing_operator_key_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.operator-key.*--adapters"):
        read_operator_key(tmp_path)
