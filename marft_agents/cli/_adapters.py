"""What the commands of ``adapters`` share: names of agents and versions, and a server's state.

Invariant: a name that could be a path is refused, never cleaned up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from marft_agents.errors import ConfigError, RegistryError, ServerError
from marft_agents.registry import Registry
from marft_agents.schema import adapter_slug, parse_served_name
from marft_agents.serving.gateway_client import GatewayClient


def agent_name(name: str) -> str:
    """The adapter name of an agent.

    Raises:
        ConfigError: for a path, a version or a reserved name.
    """
    if any(c in name for c in "/\\@\0") or name.strip() in (".", ".."):
        raise ConfigError(f"{name!r} is no agent's name; it is that of a folder in the registry")
    return adapter_slug(name)


def agent_and_version(spec: str) -> tuple[str, int | None]:
    """``("planner", 7)`` for ``planner@v7``, ``("planner", None)`` for ``planner``.

    Raises:
        ConfigError: for anything else.
    """
    agent, at, version = spec.rpartition("@")
    if not at:
        return agent_name(spec), None
    match = re.fullmatch(r"v?0*([1-9][0-9]{0,8})", version)
    if match is None:
        raise ConfigError(f"{spec!r} names no version; write it as {agent or 'planner'}@v7")
    return agent_name(agent), int(match[1])


def one_version(registry: Registry, spec: str) -> tuple[str, int]:
    """The version named, or the one in use.

    Raises:
        ConfigError, RegistryError: there is none.
    """
    agent, version = agent_and_version(spec)
    if version is None:
        registry.path(agent, next(iter(registry.versions(agent)), 1))  # says what is unknown
        version = registry.current(agent)
        if version is None:
            raise RegistryError(f"agent {agent!r} has no version in use; name one: {agent}@v1")
    registry.path(agent, version)
    return agent, version


def require_registry(adapters: Path) -> Registry:
    """The registry, if the folder is there.

    Raises:
        RegistryError: it is not.
    """
    if not adapters.is_dir():
        raise RegistryError(f"{adapters} is no folder; name the one that finetune published into")
    return Registry(adapters)


@dataclass(frozen=True)
class Served:
    """One agent's versions in a running server; ``loaded`` holds the others, too."""

    current: int | None = None
    loaded: tuple[int, ...] = ()
    prepared: int | None = None


def served_by(server: str, adapters: Path) -> dict[str, Served]:
    """What a running server has of each agent.

    Raises:
        ServerError: it is down, or none of ours.
    """
    with GatewayClient(server, adapters_dir=adapters) as client:
        agents: Any = client.state().get("agents")
    if not isinstance(agents, dict):
        raise ServerError(f"{server} answers, but not as `marft-agents serve` does; is it one?")
    out: dict[str, Served] = {}
    for agent, told in cast("Mapping[str, Mapping[str, Any]]", agents).items():
        names = (parse_served_name(str(name)) for name in told.get("served") or ())
        loaded = sorted(name[1] for name in names if name is not None and name[0] == agent)
        prepared: Any = told.get("prepared") or {}  # none in an older server
        out[agent] = Served(told.get("current"), tuple(loaded), prepared.get("version"))
    return out


def size_text(size: int) -> str:
    """Bytes for people."""
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"
