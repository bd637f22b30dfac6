"""``marft-agents keys list``: names, roles and limits."""

from __future__ import annotations

from pathlib import Path

import click

from marft_agents.cli._keys import entries_of, file_argument
from marft_agents.cli._text import say, table


@click.command("list")
@file_argument
def command(file: Path) -> None:
    """Show what FILE says of every key; keys themselves cannot be shown."""
    rows = [
        [
            name,
            str(entry.get("role", "application")),
            ", ".join(entry.get("agents") or ["all"]),
            str(entry.get("max_in_flight") or "-"),
        ]
        for name, entry in sorted(entries_of(file).items())
    ]
    for line in table(["name", "role", "agents", "max in flight"], rows):
        say(line)
