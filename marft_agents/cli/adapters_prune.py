"""``marft-agents adapters prune``: delete old versions that nothing needs."""

from __future__ import annotations

from pathlib import Path

import click

from marft_agents.cli._adapters import agent_name, require_registry, served_by, size_text
from marft_agents.cli._moving import adapters_option, change_of
from marft_agents.cli._text import say
from marft_agents.errors import RegistryError
from marft_agents.registry import Registry
from marft_agents.registry.locks import server_of
from marft_agents.registry.prune import Version, prune, survey


@click.command("prune")
@click.argument("agents", metavar="[AGENT]...", nargs=-1)
@click.option(
    "--keep",
    metavar="N",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Newest versions of each agent to keep in any case.",
)
@click.option("--yes", is_flag=True, help="Delete; without it, only say what would be.")
@adapters_option
@click.option("--server", metavar="URL", help="Running server: what it has loaded is kept.")
@click.option("--reason", metavar="TEXT", help="Why; goes into the audit trail.")
def command(
    agents: tuple[str, ...],
    keep: int,
    yes: bool,
    adapters: Path,
    server: str | None,
    reason: str | None,
) -> None:
    """Delete old versions of every agent (or of the ones named).

    Never the version in use, the one before it, a pinned one, the parent of the one in use, or what
    a server has loaded. Turns that were recorded under a deleted version can no longer be checked
    against it, so policy gradients refuse them.
    """
    registry = require_registry(adapters)
    names = [agent_name(agent) for agent in agents] or registry.agents()
    loaded = _loaded(registry, server)
    for agent in names:
        registry.path(agent, next(iter(registry.versions(agent)), 1))  # says what is unknown
    plan = [version for agent in names for version in survey(registry, agent, keep, loaded[agent])]
    for version in plan:
        if version.kept is not None:
            say(f"{_name(version)} stays: {version.kept}")
    going = [version for version in plan if version.kept is None]
    if yes:
        change = change_of("adapters prune", reason)
        going = list(prune(registry, names, keep, loaded, change))
    for version in going:
        say(f"{_name(version)} {'is deleted' if yes else 'would be deleted'}")
    done = "freed" if yes else "to free with --yes"
    count = f"{len(going)} version{'' if len(going) == 1 else 's'}"
    say(f"{count}, {size_text(sum(v.size for v in going))} {done}")


def _name(version: Version) -> str:
    return f"{version.agent}@v{version.version} ({size_text(version.size)})"


class _Loaded(dict[str, list[int]]):
    def __missing__(self, agent: str) -> list[int]:
        return []


def _loaded(registry: Registry, server: str | None) -> _Loaded:
    who = server_of(registry.root)
    if server is not None:
        if who is None:
            raise RegistryError(
                f"no server serves from {registry.root}, so {server} serves another folder; name"
                " that one (--adapters), or leave out --server"
            )
        served = served_by(server, registry.root)
        return _Loaded({a: [v for v in (it.current, *it.loaded) if v] for a, it in served.items()})
    if who is not None:
        raise RegistryError(
            f"{registry.root} is served by {who}, and an engine dies when a loaded version goes;"
            " name the server, so that it can be asked: --server URL"
        )
    return _Loaded()
