"""One version as a folder of its own, for PEFT, vLLM or a model hub.

Invariant: the folder appears whole, by one rename, in a place where nothing was; its weights are
byte for byte those that were published. It says nothing of where the base lay on this machine.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from marft_agents.errors import AdapterError, RegistryError
from marft_agents.registry import durable
from marft_agents.registry.card import model_card
from marft_agents.registry.check import CONFIG_FILE, WEIGHTS_FILE, read_adapter_config
from marft_agents.registry.reader import RegistryReader
from marft_agents.schema import AdapterManifest


def export(registry: RegistryReader, agent: str, version: int, target: Path) -> AdapterManifest:
    """Write the version into the new folder ``target``.

    Raises:
        RegistryError: ``target`` exists, lies in the registry, or there is no such version.
        AdapterError: a file is not the one that was published.
    """
    target = target.absolute()
    if os.path.lexists(target):
        raise RegistryError(f"{target} exists already; nothing is overwritten, name a new folder")
    if target.resolve().is_relative_to(registry.root.resolve()):
        raise RegistryError(
            f"{target} lies inside the registry {registry.root}; name another place"
        )
    manifest = registry.manifest(agent, version)
    source = registry.path(agent, version)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.with_name(f".{target.name}-{os.getpid()}-{secrets.token_hex(4)}")
    work.mkdir()
    try:
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if durable.copy_file(source / name, work / name) != manifest.files.get(name):
                raise AdapterError(
                    f"{source / name} is not the file that was published (its checksum differs);"
                    " nothing was exported"
                )
        _name_base(work, manifest)
        durable.write_file(work / "README.md", model_card(manifest).encode())
        durable.fsync_folder(work)
        os.rename(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    durable.fsync_folder(target.parent)
    return manifest


def _name_base(folder: Path, manifest: AdapterManifest) -> None:
    config: dict[str, Any] = read_adapter_config(folder)
    if config.get("base_model_name_or_path") != manifest.base.name:
        config["base_model_name_or_path"] = manifest.base.name
        durable.write_file(folder / CONFIG_FILE, json.dumps(config, indent=2).encode() + b"\n")
