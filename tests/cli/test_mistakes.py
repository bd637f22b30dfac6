"""Circumstances that no command may answer with a traceback, or with silence."""

from __future__ import annotations

import sys
from typing import Any

import click
import pytest

from marft_agents import cli
from marft_agents.errors import ServerError


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ServerError("GET /x answered 500: oops\nsecond\x1b[31m line"),
         "marft-agents: GET /x answered 500: oops second\\x1b[31m line\n"),
        (OSError(28, "No space left on device", "adapters/credit.jsonl"),
         "marft-agents: [Errno 28] No space left on device: 'adapters/credit.jsonl'\n"),
    ],
)  # fmt: skip
def test_what_others_say_is_one_plain_line(
    error: Exception, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def failing() -> None:
        raise error

    def find(*_: Any) -> click.Command:
        return failing

    monkeypatch.setattr(type(cli.cli), "get_command", find)
    monkeypatch.setattr(sys, "argv", ["marft-agents", "inspect"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == line
