"""``marft-agents adapters promote``: let an agent answer from a version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from marft_agents.cli._adapters import agent_name
from marft_agents.cli._amounts import span, version_number
from marft_agents.cli._moving import (
    adapters_option,
    bounds_options,
    change_of,
    evidence_options,
    move,
    now_option,
    read_bounds,
    server_option,
)
from marft_agents.registry import Registry


@click.command("promote")
@click.argument("agent")
@click.argument("version", type=version_number)
@adapters_option
@server_option
@now_option
@click.option(
    "--watch",
    type=span,
    metavar="TIME",
    help="Go back by itself if it does worse for so long than before.",
)
@bounds_options
@evidence_options
def command(
    agent: str,
    version: int,
    adapters: Path,
    server: str | None,
    now: bool,
    watch: float | None,
    reason: str | None,
    evaluation: Path | None,
    force: bool,
    **bounds: Any,
) -> None:
    """Let AGENT answer from VERSION.

    With --server the running server loads and probes it first, and what fails changes nothing.
    Episodes that have begun keep the version they have, unless --now moves them over.
    """
    change = change_of("adapters promote", reason, evaluation, force=force)
    watched = None if watch is None else read_bounds(bounds, watch)
    move(Registry(adapters), agent_name(agent), version, change, server, now=now, watch=watched)
