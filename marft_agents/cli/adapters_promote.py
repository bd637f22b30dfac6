"""``marft-agents adapters promote``: let an agent answer from a version."""

from __future__ import annotations

from pathlib import Path

import click

from marft_agents.cli._adapters import agent_name
from marft_agents.cli._moving import (
    adapters_option,
    change_of,
    evidence_options,
    move,
    server_option,
)
from marft_agents.registry import Registry


@click.command("promote")
@click.argument("agent")
@click.argument("version", type=click.IntRange(min=1))
@adapters_option
@server_option
@evidence_options
def command(
    agent: str,
    version: int,
    adapters: Path,
    server: str | None,
    reason: str | None,
    evaluation: Path | None,
    force: bool,
) -> None:
    """Let AGENT answer from VERSION.

    With --server the running server loads and probes it first, and what fails changes nothing.
    """
    change = change_of("adapters promote", reason, evaluation, force=force)
    move(Registry(adapters), agent_name(agent), version, change, server)
