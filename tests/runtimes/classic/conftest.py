"""Each test in a folder of its own: AutoGen caches replies and runs code where the process is."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from tests.runtimes.classic.kit import without_token_counting


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Old versions of AutoGen call what the libraries under them have deprecated since."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))


@pytest.fixture(autouse=True)
def _quiet_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOGEN_USE_DOCKER", "0")
    without_token_counting(monkeypatch)
    # Each selection makes a client, and reading its certificates would take most of the time.
    monkeypatch.setattr(ssl, "create_default_context", _no_certificates)


def _no_certificates(**_options: object) -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
