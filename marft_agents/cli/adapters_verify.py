"""``marft-agents adapters verify``: what is broken, one line each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from marft_agents.cli._adapters import agent_and_version, require_registry
from marft_agents.cli._moving import adapters_option
from marft_agents.cli._text import say
from marft_agents.errors import RegistryError
from marft_agents.registry import Registry, describe_base
from marft_agents.registry.verify import check_agent, check_version


@click.command("verify")
@click.argument("what", metavar="[AGENT[@vN]]", required=False)
@adapters_option
@click.option("--model", help="Base model to be served on: a folder or a hub id.")
def command(what: str | None, adapters: Path, model: str | None) -> int:
    """Compare every version (or those of one agent, or one) with its checksums, its manifest and
    the shapes of its base; read every tensor.

    Exits with 0 when nothing is broken, 1 when something is, 2 when it cannot be told.
    """
    registry = require_registry(adapters)
    base = None if model is None else describe_base(model)
    versions = list(_named(registry, what))
    found = 0
    for agent in dict.fromkeys(agent for agent, _ in versions):
        for line in check_agent(registry, agent):
            found += 1
            say(" ".join(line.split()))
    for agent, version in versions:
        for line in check_version(registry, agent, version, base):
            found += 1
            say(" ".join(line.split()))
    many = "" if len(versions) == 1 else "s"
    say(f"{found or 'no'} finding{'' if found == 1 else 's'} in {len(versions)} version{many}")
    return 1 if found else 0


def _named(registry: Registry, what: str | None) -> Iterator[tuple[str, int]]:
    if what is None:
        agents = registry.agents()
        if not agents:
            raise RegistryError(f"{registry.root} has no agent")
        for agent in agents:
            yield from ((agent, version) for version in registry.versions(agent))
        return
    agent, version = agent_and_version(what)
    registry.path(agent, version or next(iter(registry.versions(agent)), 1))
    for number in registry.versions(agent) if version is None else [version]:
        yield agent, number
