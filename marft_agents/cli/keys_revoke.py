"""``marft-agents keys revoke``: take a key back."""

from __future__ import annotations

from pathlib import Path

import click

from marft_agents.cli._keys import entries_of, file_argument, write_entries
from marft_agents.errors import ConfigError


@click.command("revoke")
@file_argument
@click.argument("name")
def command(file: Path, name: str) -> None:
    """Take the key NAME out of FILE; a server with --keys FILE refuses it within a second."""
    entries = entries_of(file)
    if name not in entries:
        known = ", ".join(sorted(entries)) or "none"
        raise ConfigError(f"{file} has no key {name!r}; it has {known}")
    write_entries(file, {other: entry for other, entry in entries.items() if other != name})
    click.echo(f"{name}: revoked")
