"""Publishing what was trained.

Invariant: nothing is published before every adapter was trained, measured and staged; each version
then appears whole or not at all, and files of the run (credit, critic) are written beside them in
one step each.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from marft_agents.errors import RegistryError
from marft_agents.registry import Registry
from marft_agents.schema import BaseModelInfo, Probe, served_name
from marft_agents.training.adapters import stage_adapter
from marft_agents.training.config import MarftConfig
from marft_agents.training.effect import Effect
from marft_agents.training.session import Session


@dataclass(frozen=True)
class Trained:
    """One adapter that was trained and measured, not yet published."""

    adapter: str
    agents: list[str]
    parent: int | None
    effect: Effect
    probe: Probe
    facts: Mapping[str, Any]
    """What the manifest says about the training."""


def publish_all(
    session: Session,
    registry: Registry,
    base: BaseModelInfo,
    trained: Sequence[Trained],
    folder: Path,
) -> dict[str, int]:
    """Stage every adapter, then publish one after another; the new versions.

    Raises:
        RegistryError: when the disk refuses; what was published before is named.
    """
    staged = [stage_adapter(session.model, t.adapter, folder / t.adapter) for t in trained]
    versions: dict[str, int] = {}
    for one, path in zip(trained, staged, strict=True):
        try:
            manifest = registry.publish(
                one.adapter,
                path,
                base=base,
                parent=one.parent,
                probe=one.probe,
                training={**one.facts, "effect": dataclasses.asdict(one.effect)},
                command="finetune",
            )
        except (OSError, RegistryError) as error:
            done = ", ".join(served_name(a, v) for a, v in versions.items())
            already = f"; {done} was published before that and is not in use yet" if done else ""
            raise RegistryError(
                f"cannot publish {one.adapter!r} in {registry.root}: {error}{already}"
            ) from error
        versions[one.adapter] = manifest.version
    return versions


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Replace ``path`` by these lines in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def program() -> str:
    """Name and version of this program."""
    return f"marft-agents {version('marft-agents')}"


def changed_settings(config: MarftConfig) -> dict[str, Any]:
    """What repeats a run of this version: the seed, and what differs from the defaults.

    Not while a trainer is at work: making a configuration resets the loop's device state.
    """
    default = MarftConfig(use_cpu=config.use_cpu)
    names = {f.name for f in dataclasses.fields(MarftConfig)} - {"output_dir", "use_cpu", "seed"}
    changed = {
        name: getattr(config, name)
        for name in sorted(names)
        if getattr(config, name) != getattr(default, name)
    }
    return json.loads(json.dumps({"seed": config.seed, **changed}, default=str))
