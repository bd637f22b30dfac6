"""Which of the distributions that own ``import autogen`` is here, and whether it is whole.

Invariant: five distributions have brought the package ``autogen``, and installers put one over the
other without a word. Whatever cannot work is named with the command that mends it; nothing is
imported.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib import metadata

from marft_agents.recording import IntegrationError, KnownDistribution, installed_runtime

KNOWN = (
    KnownDistribution("autogen", "0.9", "1"),
    KnownDistribution("ag2", "0.9", "1"),
    KnownDistribution("pyautogen", "0.2.35", "0.10"),
    KnownDistribution("autogen-agentchat", "0.2.36", "0.3"),
)
CURE = "pip install 'autogen[openai]>=0.14,<1'"
_ELSEWHERE = {
    "ag2": "from 1.0 on it is `import ag2`, a framework of its own that marft-agents records with"
    " its extra ag2",
    "pyautogen": "from 0.10 on it is an empty package that brings AutoGen AgentChat (`import"
    " autogen_agentchat`), which marft-agents records with its extra agentchat",
    "autogen-agentchat": "from 0.4 on it is `import autogen_agentchat`, which marft-agents records"
    " with its extra agentchat",
}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _has_code() -> bool:
    """Whether ``autogen`` is a package with an ``__init__``, and no folder that was left over."""
    try:
        spec = importlib.util.find_spec("autogen")
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def runtime(
    version_of: Callable[[str], str | None] = _version, has_code: Callable[[], bool] = _has_code
) -> str:
    """Name and version of the distribution behind ``import autogen``, e.g. ``autogen 0.14.1``.

    Raises:
        IntegrationError: none, two at once, one that is too old, or one of another framework.
    """
    versions = {known.name: version_of(known.name) for known in KNOWN}
    owners = {
        known.name: version
        for known in KNOWN
        if (version := versions[known.name]) is not None and _below(version, known.below)
    }
    if owners:
        found = installed_runtime("classic AutoGen", KNOWN, version_of=owners.get)
        if has_code():
            return found
        names = " ".join(owners)
        raise IntegrationError(
            f"{found} is installed but its folder `autogen` has no code: a distribution that shared"
            f" the folder was uninstalled; pip install --force-reinstall --no-deps"
            f" {names}=={next(iter(owners.values()))}"
        )
    if has_code():
        return installed_runtime("autogen", KNOWN, version_of=owners.get)  # a source tree
    others = [f"{n} {v} is installed, but {_ELSEWHERE[n]}" for n, v in versions.items() if v]
    seen = "; ".join(others) or "no distribution of classic AutoGen is installed"
    raise IntegrationError(f"{seen}; for classic AutoGen (`import autogen`): {CURE}")


def _below(version: str, limit: str) -> bool:
    return _release(version) < _release(limit)


def _release(version: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple([*numbers, 0, 0, 0][:3])
