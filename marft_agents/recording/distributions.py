"""Which distribution of a runtime is installed, and whether it is one that was tried.

Invariant: a version out of range, or an import package that two distributions wrote over each
other, is named where the object is wrapped, with the command that mends it; nothing is imported.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata

from marft_agents.errors import IntegrationError


@dataclass(frozen=True, slots=True)
class KnownDistribution:
    """A distribution that brings a runtime: versions from ``since`` and below ``below`` work."""

    name: str
    since: str
    below: str

    @property
    def requirement(self) -> str:
        return f"{self.name}>={self.since},<{self.below}"


def _version(name: str) -> str | None:
    try:
        return _answered(metadata.version, name, tuple(sys.path))
    except metadata.PackageNotFoundError:
        return None


@functools.lru_cache(maxsize=64)
def _answered(ask: Callable[[str], str], name: str, _path: tuple[str, ...]) -> str:
    """Looking it up takes most of a millisecond, and apps wrap a team a task."""
    return ask(name)


def installed_runtime(
    label: str,
    known: Sequence[KnownDistribution],
    *,
    version_of: Callable[[str], str | None] = _version,
) -> str:
    """Name and version of the one distribution that brings the runtime, e.g. ``autogen 0.14.1``.

    Where none of ``known`` is installed (a source tree on the path) it is ``label`` alone.

    Raises:
        IntegrationError: a version out of range, or several distributions that share files.
    """
    found = [(d, version) for d in known if (version := version_of(d.name)) is not None]
    if len(found) > 1:
        names = [d.name for d, _ in found]
        listed = ", ".join(f"{d.name} {version}" for d, version in found)
        raise IntegrationError(
            f"{listed} are installed together and write over each other's files, so neither is"
            f" whole; keep one: pip uninstall -y {' '.join(names)} && pip install"
            f" '{known[0].requirement}'"
        )
    if not found:
        return label
    distribution, version = found[0]
    if not _numbers(distribution.since) <= _numbers(version) < _numbers(distribution.below):
        raise IntegrationError(
            f"{label}: {distribution.name} {version} is installed; this version of marft-agents"
            f" records {distribution.since} up to, not including, {distribution.below}:"
            f" pip install '{distribution.requirement}'"
        )
    return f"{distribution.name} {version}"


def _numbers(version: str) -> tuple[int, ...]:
    """``0.14.1rc2`` → (0, 14, 1): the release, which is all that the ranges speak of."""
    release = re.match(r"[vV]?(\d+(?:\.\d+)*)", version)
    parts = [int(n) for n in release[1].split(".")] if release else [0]
    return tuple([*parts, 0, 0, 0][: max(3, len(parts))])
