"""``marft-agents adapters pin``: keep an agent at one version."""

from __future__ import annotations

from pathlib import Path

import click

from marft_agents.cli._adapters import agent_name
from marft_agents.cli._amounts import version_number
from marft_agents.cli._moving import adapters_option, change_of, move, server_option
from marft_agents.errors import ConfigError
from marft_agents.registry import Registry


@click.command("pin")
@click.argument("agent")
@click.argument("version", required=False, type=version_number)
@click.option("--remove", is_flag=True, help="Take the pin off.")
@adapters_option
@server_option
@click.option("--reason", metavar="TEXT", help="Why; goes into the audit trail.")
def command(
    agent: str,
    version: int | None,
    remove: bool,
    adapters: Path,
    server: str | None,
    reason: str | None,
) -> None:
    """Let AGENT answer from VERSION until the pin is taken off.

    swap, promote and rollback refuse to move it without --force, finetune publishes new versions
    and leaves it in use, prune keeps it.
    """
    registry, slug = Registry(adapters), agent_name(agent)
    if remove == (version is not None):
        in_use = None if remove else registry.current(slug)
        more = "" if in_use is None else f"; v{in_use} is in use"
        raise ConfigError(f"pin takes a version, or --remove{more}")
    change = change_of("adapters pin", reason)
    if version is None:
        was = registry.unpin(slug, change)
        click.echo(f"{slug}: {'was not pinned' if was is None else f'v{was} is no longer pinned'}")
        return
    registry.require_pinnable(slug, version)  # before anything moves
    if server is not None or registry.current(slug) != version:
        move(registry, slug, version, change, server)
    registry.pin(slug, change, version=version)
    click.echo(f"{slug}: v{version} is pinned")
