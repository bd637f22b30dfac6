"""``marft-agents adapters prepare``: load and probe a version ahead of its swap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from marft_agents.cli._adapters import agent_name, require_registry
from marft_agents.cli._amounts import duration, version_number
from marft_agents.cli._moving import adapters_option, probed, require_server
from marft_agents.cli._text import say
from marft_agents.errors import ConfigError
from marft_agents.registry import Registry
from marft_agents.serving.gateway_client import GatewayClient


@click.command("prepare")
@click.argument("agent")
@click.argument("version", required=False, type=version_number)
@adapters_option
@click.option("--server", metavar="URL", help="The running `marft-agents serve`.")
def command(agent: str, version: int | None, adapters: Path, server: str | None) -> None:
    """Load and probe VERSION (default: the highest) in the running server, beside the one in use.

    It gets no request. A swap to it within ten minutes takes some milliseconds; after that, or when
    what serves needs its place in the engine, it is unloaded.
    """
    registry, slug = require_registry(adapters), agent_name(agent)
    wanted = version or max(registry.versions(slug), default=1)
    if server is None:
        raise ConfigError("versions are prepared in a running server: name it with --server URL")
    registry.verify(slug, wanted)
    require_server(server)
    with GatewayClient(server, adapters_dir=registry.root) as client:
        done = client.prepare(slug, wanted)
    say(f"{slug}: v{wanted} {_how(registry, slug, done)}{probed(done['probe'])}")
    if done["until"] is not None:
        more = f"--version {wanted} --adapters {adapters} --server {server}"
        say(f"  kept for {duration(done['keep_s'])}; to use it: marft-agents swap {slug} {more}")


def _how(registry: Registry, agent: str, done: dict[str, Any]) -> str:
    if done["until"] is None:
        return "is its canary, and needs nothing before it is promoted"
    if done["already"]:
        return "was loaded and probed already, and is kept anew"
    current = registry.current(agent)
    return "is loaded and probed" + ("" if current is None else f" beside v{current}")
