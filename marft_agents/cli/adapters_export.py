"""``marft-agents adapters export``: one version for other programs."""

from __future__ import annotations

from pathlib import Path

import click

from marft_agents.cli._adapters import one_version, require_registry
from marft_agents.cli._moving import adapters_option
from marft_agents.cli._text import say
from marft_agents.registry.export import export


@click.command("export")
@click.argument("version", metavar="AGENT[@vN]")
@click.argument("target", type=click.Path(path_type=Path))
@adapters_option
def command(version: str, target: Path, adapters: Path) -> None:
    """Copy a version (default: the one in use) into the new folder TARGET: the files that PEFT and
    vLLM load, and a model card.

    Every file is compared with its checksum on the way.
    """
    registry = require_registry(adapters)
    agent, number = one_version(registry, version)
    manifest = export(registry, agent, number, target)
    say(f"{target}: {manifest.served_name}, a LoRA of rank {manifest.rank} on {manifest.base.name}")
