"""``marft-agents keys new``: make a key and show it once."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import get_args

import click

from marft_agents.cli._keys import entries_of, file_argument, write_entries
from marft_agents.errors import ConfigError
from marft_agents.schema import JsonDict
from marft_agents.serving.keys import Role, digest_of, key_from


@click.command("new")
@file_argument
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice(get_args(Role)),
    default="application",
    show_default=True,
    help="application asks agents, operator moves versions, monitor reads metrics.",
)
@click.option("--agents", metavar="NAMES", help="The only agents it may ask, comma-separated.")
@click.option("--max-in-flight", type=click.IntRange(min=1), help="Its requests under way at once.")
def command(
    file: Path, name: str, role: str, agents: str | None, max_in_flight: int | None
) -> None:
    """Add the key NAME to FILE, and print it: it is not kept anywhere else.

    A server with --keys FILE takes it within a second.
    """
    entries = entries_of(file, missing_is_empty=True)
    if name in entries:
        raise ConfigError(f"{file} has a key {name!r}; choose another name, or revoke it first")
    key = f"marft-{secrets.token_urlsafe(32)}"
    entry: JsonDict = {"role": role, "sha256": digest_of(key).hex()}
    if agents is not None:
        entry["agents"] = [agent.strip() for agent in agents.split(",") if agent.strip()]
    if max_in_flight is not None:
        entry["max_in_flight"] = max_in_flight
    key_from(name, entry)
    write_entries(file, entries | {name: entry})
    click.echo(key)
