"""Delete old versions that nothing needs.

Invariant: a version goes by one rename to a dot name, under the registry's lock, with its line in
the trail; only then are files deleted. What is in use, was in use before, is pinned, is a canary,
is the parent of the one in use, or is loaded in a server (which leases and requests keep it) never
goes. An interrupted run is finished by the next.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from marft_agents.errors import AdapterError, RegistryError
from marft_agents.registry import durable
from marft_agents.registry.audit import Change
from marft_agents.registry.reader import RegistryReader
from marft_agents.registry.staging import remove_dead
from marft_agents.registry.store import Registry

_ASIDE = re.compile(r"\.pruned-v(\d+)-[0-9a-f]+")


@dataclass(frozen=True)
class Version:
    """One version, its bytes on disk, and why it stays (``None``: it need not)."""

    agent: str
    version: int
    size: int
    kept: str | None


def folder_size(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def survey(
    registry: RegistryReader, agent: str, keep: int, loaded: Collection[int] = ()
) -> Iterator[Version]:
    """Every version of an agent, with the reason why it stays.

    Raises:
        RegistryError: it cannot be told what the agent needs.
    """
    now = registry.current(agent)
    if now is None:
        raise RegistryError(
            f"agent {agent!r} has no version in use, so nothing of it is deleted; promote one first"
        )
    parent = None
    with suppress(AdapterError):
        parent = registry.manifest(agent, now).parent
    versions = registry.versions(agent)
    canary = registry.canary(agent)
    reasons = {
        "in use": {now},
        "pinned": {registry.pinned(agent)},
        "a canary": {canary and canary.version},
        "in use before": {registry.previous(agent)},
        "parent of the one in use": {parent},
        "loaded in the server": set(loaded),
        f"one of the newest {keep}": set(versions[-keep:]),
    }
    for version in versions:
        why = next((reason for reason, those in reasons.items() if version in those), None)
        yield Version(agent, version, folder_size(registry.path(agent, version)), why)


def prune(
    registry: Registry,
    agents: Iterable[str],
    keep: int,
    loaded: Mapping[str, Collection[int]],
    change: Change,
) -> Iterator[Version]:
    """Delete what need not stay, and yield each once it is gone.

    Raises:
        RegistryError: it cannot be told what an agent needs.
        OSError: the disk refuses; what is aside by then is deleted the next time.
    """
    for agent in agents:
        with registry.changing(agent):
            _finish(registry, agent, change)
            gone = [v for v in survey(registry, agent, keep, loaded.get(agent, ())) if not v.kept]
            for version in gone:
                _set_aside(registry, version, change)
        _delete(registry, agent)
        remove_dead(registry.root / agent)
        yield from gone


def _set_aside(registry: Registry, version: Version, change: Change) -> None:
    place = registry.path(version.agent, version.version)
    aside = place.with_name(f".pruned-{place.name}-{secrets.token_hex(4)}")
    os.rename(place, aside)
    try:
        registry.note("prune", version.agent, version.version, None, change)
    except BaseException:
        os.rename(aside, place)
        raise
    durable.fsync_folder(place.parent)


def _finish(registry: Registry, agent: str, change: Change) -> None:
    """Note what an interrupted run set aside without a line."""
    noted = {e.get("from") for e in registry.audit(agent) if e.get("action") == "prune"}
    for match in _aside(registry, agent).values():
        if int(match[1]) not in noted:
            registry.note("prune", agent, int(match[1]), None, change)


def _aside(registry: Registry, agent: str) -> dict[Path, re.Match[str]]:
    folder = registry.root / agent
    found = ((path, _ASIDE.fullmatch(path.name)) for path in folder.iterdir())
    return {path: match for path, match in found if match}


def _delete(registry: Registry, agent: str) -> None:
    for path in _aside(registry, agent):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)
