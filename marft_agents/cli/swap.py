"""``marft-agents swap``: let an agent answer from another version."""

from __future__ import annotations

from pathlib import Path

import click

from marft_agents.cli._amounts import version_number
from marft_agents.cli._moving import (
    adapters_option,
    change_of,
    evidence_options,
    move,
    now_option,
)
from marft_agents.registry import Registry
from marft_agents.schema import adapter_slug

_DEFAULT_SERVER = "http://127.0.0.1:8000"


@click.command(name="swap")
@click.argument("agent")
@adapters_option
@click.option("--version", metavar="N", type=version_number, help="Default: the highest version.")
@click.option("--server", metavar="URL", default=_DEFAULT_SERVER, show_default=True)
@click.option("--offline", is_flag=True, help="Only change the version in use; no server is told.")
@now_option
@evidence_options
def command(
    agent: str,
    adapters: Path,
    version: int | None,
    server: str,
    offline: bool,
    now: bool,
    reason: str | None,
    evaluation: Path | None,
    force: bool,
) -> None:
    """Let AGENT answer from a published adapter version, without a break for running requests.

    Episodes that have begun keep the version they have, unless --now moves them over.
    """
    registry, slug = Registry(adapters), adapter_slug(agent)
    wanted = version or max(registry.versions(slug), default=1)
    registry.verify(slug, wanted)
    change = change_of("swap", reason, evaluation, force=force)
    move(registry, slug, wanted, change, None if offline else server, now=now)
