"""``marft-agents adapters list``: every version of every agent."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from marft_agents.cli._adapters import Served, require_registry, served_by, size_text
from marft_agents.cli._amounts import percent
from marft_agents.cli._text import say, table
from marft_agents.errors import AdapterError, RegistryError
from marft_agents.registry import CanaryPlan, Registry
from marft_agents.registry.locks import server_of
from marft_agents.registry.prune import folder_size


@dataclass(frozen=True)
class _Row:
    """One version; what its manifest says is ``None`` where that is unreadable."""

    version: int
    current: bool
    previous: bool
    pinned: bool
    canary: float | None
    """The share of the episodes that it gets."""
    loaded: bool | None
    prepared: bool | None
    """Loaded for a swap to come."""
    untrained: bool | None
    created: str | None
    parent: int | None
    episodes: int | None
    bytes: int


@dataclass
class _Agent:
    """One agent; ``served`` is the version that the server asked answers from."""

    agent: str
    current: int | None = None
    served: int | None = None
    problems: list[str] = field(default_factory=list[str])
    versions: list[_Row] = field(default_factory=list[_Row])


@click.command("list")
@click.argument("adapters", default="adapters", type=click.Path(file_okay=False, path_type=Path))
@click.option("--server", metavar="URL", help="Running server: what it serves and has loaded.")
@click.option("--json", "as_json", is_flag=True, help="The same as one JSON object.")
def command(adapters: Path, server: str | None, as_json: bool) -> None:
    """List agents and versions in ADAPTERS: which is in use, which was before, which is pinned."""
    registry = require_registry(adapters)
    served = None if server is None else served_by(server, adapters)
    agents = [_read(registry, agent, served) for agent in registry.agents()]
    if as_json:
        told = {"adapters": str(registry.root), "server": server}
        say(json.dumps(told | {"agents": [asdict(agent) for agent in agents]}, indent=2))
        return
    for line in _lines(registry, agents, server):
        say(line)


def _read(
    registry: Registry,
    agent: str,
    served: Mapping[str, Served] | None,
) -> _Agent:
    out = _Agent(agent)
    marks: dict[str, int | None] = {}
    for mark, read in (
        ("current", registry.current),
        ("previous", registry.previous),
        ("pinned", registry.pinned),
    ):
        try:
            marks[mark] = read(agent)
        except RegistryError as error:
            if str(error) not in out.problems:
                out.problems.append(str(error))
    out.current = marks.get("current")
    canary: CanaryPlan | None = None
    try:
        canary = registry.canary(agent)
    except RegistryError as error:
        out.problems.append(str(error))
    its: Served | None = None
    if served is not None:
        its = served.get(agent, Served())
        out.served = its.current
        if out.served != out.current:
            out.problems.append(
                f"{agent}: version {out.current} is in use on disk, the server answers from"
                f" {'nothing' if out.served is None else out.served}"
            )
    for version in registry.versions(agent):
        share = canary.share if canary is not None and canary.version == version else None
        out.versions.append(_row(registry, out, version, marks, its, share))
    return out


def _row(
    registry: Registry,
    agent: _Agent,
    version: int,
    marks: Mapping[str, int | None],
    served: Served | None,
    canary: float | None,
) -> _Row:
    facts: dict[str, Any] = dict.fromkeys(("untrained", "created", "parent", "episodes"))
    try:
        manifest = registry.manifest(agent.agent, version)
        episodes: Any = manifest.training.get("episodes")
        facts = {
            "untrained": manifest.untrained,
            "created": manifest.created.isoformat(timespec="seconds"),
            "parent": manifest.parent,
            "episodes": episodes if isinstance(episodes, int) else None,
        }
    except AdapterError as error:
        agent.problems.append(str(error))
    return _Row(
        version=version,
        **{mark: marks.get(mark) == version for mark in ("current", "previous", "pinned")},
        canary=canary,
        loaded=None if served is None else version in served.loaded,
        prepared=None if served is None else version == served.prepared,
        bytes=folder_size(registry.path(agent.agent, version)),
        **facts,
    )


def _lines(registry: Registry, agents: list[_Agent], server: str | None) -> Iterator[str]:
    if not agents:
        yield f"{registry.root} has no agent"
        return
    head = ("agent", "version", "state", "created", "parent", "episodes", "size")
    rows = [_cells(agent, row) for agent in agents for row in agent.versions]
    yield from table(head, rows, right=(5, 6))
    yield from (f"NOTE {' '.join(what.split())}" for agent in agents for what in agent.problems)
    if server is None and (who := server_of(registry.root)):
        yield f"served by {who} (--server URL shows what it serves)"


def _cells(agent: _Agent, row: _Row) -> tuple[str, ...]:
    states = {
        "current": row.current,
        "previous": row.previous,
        "pinned": row.pinned,
        f"canary {percent(row.canary or 0)}": row.canary,
        "untrained": row.untrained,
        "served": agent.served == row.version,
        "prepared": row.prepared,
        "loaded": row.loaded and not row.prepared and agent.served != row.version,
        "unreadable": row.created is None,
    }
    return (
        agent.agent,
        f"v{row.version}",
        ", ".join(state for state, holds in states.items() if holds) or "-",
        (row.created or "-")[:16].replace("T", " "),
        "-" if row.parent is None else f"v{row.parent}",
        "-" if row.episodes is None else str(row.episodes),
        size_text(row.bytes),
    )
