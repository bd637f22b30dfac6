"""``marft-agents adapters rollback``: back to the version that was in use before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from marft_agents.cli._adapters import agent_name
from marft_agents.cli._amounts import version_number
from marft_agents.cli._moving import (
    adapters_option,
    change_of,
    evidence_options,
    move,
    server_option,
)
from marft_agents.registry import Registry


@click.command("rollback")
@click.argument("agent")
@click.option("--to", metavar="N", type=version_number, help="An earlier version that was in use.")
@adapters_option
@server_option
@evidence_options
def command(
    agent: str,
    to: int | None,
    adapters: Path,
    server: str | None,
    reason: str | None,
    evaluation: Path | None,
    force: bool,
) -> None:
    """Let AGENT answer from the version that was in use before, says the audit trail.

    Rolling back twice goes back two versions. Episodes that have begun move over at their next
    call, and a canary ends.
    """
    registry, slug = Registry(adapters), agent_name(agent)
    target = registry.rollback_target(slug, to)
    change = change_of("adapters rollback", reason, evaluation, force=force)
    move(registry, slug, target, replace(change, action="rollback"), server)
