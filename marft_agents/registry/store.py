"""Adapter versions on disk.

Invariant: ``<root>/<agent>/v0007/`` appears whole, by one rename, and is never changed or reused
afterwards. ``CURRENT`` names the version in use and is replaced in one step. ``audit.jsonl`` says
who changed what, when, and on which evidence. A crash at any point leaves at most a dot folder,
which readers ignore and a later publish removes.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from marft_agents.errors import AdapterError, RegistryError
from marft_agents.registry import durable
from marft_agents.registry.audit import Action, AuditLog
from marft_agents.registry.card import model_card
from marft_agents.registry.check import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterFacts,
    inspect_adapter,
)
from marft_agents.schema import AdapterManifest, BaseModelInfo, Probe, adapter_slug

MANIFEST_FILE = "manifest.json"
CARD_FILE = "README.md"
CURRENT_FILE = "CURRENT"
AUDIT_FILE = "audit.jsonl"
_STAGING = ".staging-"
_STALE_AFTER_S = 3600.0
_OCCUPIED = {errno.EEXIST, errno.ENOTEMPTY}


def _folder_name(version: int) -> str:
    return f"v{version:04d}"


class Registry:
    """The folder ``adapters/``: versions per agent, which one is in use, and the audit trail."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()
        self._audit = AuditLog(self.root / AUDIT_FILE)

    # -- reading ---------------------------------------------------------------------------

    def agents(self) -> list[str]:
        """Agents with at least one published version, sorted.

        Raises:
            RegistryError: when a folder with versions has a name that no agent can have.
        """
        if not self.root.is_dir():
            return []
        names = sorted(p.name for p in self.root.iterdir() if p.is_dir() and p.name[0] != ".")
        names = [name for name in names if self._versions(self.root / name)]
        for name in names:
            if adapter_slug(name) != name:
                raise RegistryError(
                    f"{self.root / name} holds adapter versions under a name that no agent can"
                    f" have; rename it to {adapter_slug(name)!r}, or move it elsewhere"
                )
        return names

    def versions(self, agent: str) -> list[int]:
        """Published versions, ascending; empty for an agent that has none."""
        return self._versions(self._folder(agent))

    def current(self, agent: str) -> int | None:
        """The version in use; ``None`` for an agent without one.

        Raises:
            RegistryError: when ``CURRENT`` is unreadable or names a version that is gone.
        """
        path = self._folder(agent) / CURRENT_FILE
        try:
            text = path.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise RegistryError(
                f"cannot read {path} ({error}); it must be a file that names a version,"
                f" as {_folder_name(1)}"
            ) from error
        match = re.fullmatch(r"v0*([1-9][0-9]*)", text)
        versions = self.versions(agent)
        if match is None or int(match[1]) not in versions:
            raise RegistryError(
                f"{path} says {text[:40]!r}, which is no published version (there are"
                f" {versions or 'none'}); write one of them into it, as {_folder_name(1)}"
            )
        return int(match[1])

    def path(self, agent: str, version: int) -> Path:
        """Folder of one published version.

        Raises:
            RegistryError: when the agent or the version does not exist.
        """
        folder = self._folder(agent) / _folder_name(version)
        if not (folder / MANIFEST_FILE).is_file():
            known = self.versions(agent)
            if not known:
                raise RegistryError(
                    f"no agent {agent!r} in {self.root}; it has"
                    f" {', '.join(self.agents()) or 'no agent at all'}"
                )
            raise RegistryError(
                f"agent {agent!r} has no version {version} in {self.root}; it has"
                f" {', '.join(map(str, known))}"
            )
        return folder

    def manifest(self, agent: str, version: int) -> AdapterManifest:
        """``manifest.json`` of one version.

        Raises:
            RegistryError: when the agent or version does not exist.
            AdapterError: when the file is damaged.
        """
        path = self.path(agent, version) / MANIFEST_FILE
        try:
            return AdapterManifest.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise AdapterError(f"{path} is unreadable ({str(error).splitlines()[0]})") from error

    def verify(self, agent: str, version: int) -> AdapterManifest:
        """The manifest, after comparing every file with the checksum it was published with.

        Raises:
            AdapterError: naming the file that is missing, cut or changed.
        """
        manifest = self.manifest(agent, version)
        folder = self.path(agent, version)
        for name, wanted in manifest.files.items():
            file = folder / name
            if not file.is_file():
                raise AdapterError(f"{file} is gone; published folders must not be changed")
            if durable.sha256_file(file) != wanted:
                raise AdapterError(
                    f"{file} is not the file that was published (its checksum differs);"
                    " publish the adapter again as a new version"
                )
        return manifest

    def audit(self) -> list[dict[str, Any]]:
        """Every readable line of ``audit.jsonl``, oldest first."""
        return self._audit.entries()

    def require_writable(self) -> None:
        """Say now what publishing would say after hours of training; writes nothing.

        Raises:
            RegistryError: when the folder is none, or cannot be made or written.
        """
        present = next(p for p in (self.root, *self.root.parents) if p.exists())
        folders = [present, *(self.root / agent for agent in self.agents())]
        for folder in folders:
            if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
                why = "is read-only" if folder.is_dir() else "is a file"
                raise RegistryError(
                    f"nothing can be published in {self.root}: {folder} {why};"
                    " choose another folder"
                )

    # -- changing --------------------------------------------------------------------------

    def publish(
        self,
        agent: str,
        staged: Path,
        *,
        base: BaseModelInfo,
        parent: int | None,
        untrained: bool = False,
        probe: Probe | None = None,
        training: dict[str, Any] | None = None,
        max_lora_rank: int | None = None,
        by: str | None = None,
    ) -> AdapterManifest:
        """Check a staged PEFT folder and make it the agent's next version.

        ``staged`` is copied, not moved. The first version ever becomes ``CURRENT``.

        Raises:
            AdapterError: when a server would refuse the adapter, or serve it wrongly.
            RegistryError: when ``parent`` does not exist.
        """
        slug = adapter_slug(agent)
        facts = inspect_adapter(Path(staged), base, max_lora_rank=max_lora_rank)
        self._check_story(slug, Path(staged), facts, parent, untrained)
        folder = self.root / slug
        folder.mkdir(parents=True, exist_ok=True)
        durable.fsync_folder(self.root)
        self._remove_stale(folder)
        work = folder / f"{_STAGING}{os.getpid()}-{secrets.token_hex(4)}"
        work.mkdir()
        try:
            files = {n: durable.copy_file(Path(staged) / n, work / n) for n in self._essential()}
            draft = AdapterManifest(
                agent=slug,
                version=1,
                base=base,
                parent=parent,
                untrained=untrained,
                rank=facts.rank,
                target_modules=facts.target_modules,
                files=files,
                probe=probe,
                training=training or {},
            )
            manifest = self._rename_into_place(work, folder, draft)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        self._ensure_current(slug)
        evidence = {"untrained": untrained}
        self._audit.append("publish", slug, parent, manifest.version, by=by, evidence=evidence)
        return manifest

    def promote(self, agent: str, version: int, *, by: str, evidence: Mapping[str, Any]) -> None:
        """Make ``version`` the one in use.

        Raises:
            RegistryError: when the agent or the version does not exist.
        """
        slug = adapter_slug(agent)
        self.path(slug, version)
        self._move(slug, version, "promote", by, evidence)

    def rollback(self, agent: str, *, by: str) -> int:
        """Go back to the version that was in use before; returns it.

        Raises:
            RegistryError: when there is nothing to go back to.
        """
        slug = adapter_slug(agent)
        current = self.current(slug)
        if current is None:
            self.path(slug, 1)  # says that the agent is unknown, when it is
            raise RegistryError(f"agent {agent!r} has no version in use; promote one first")
        target = self._previous(slug, current)
        if target is None:
            raise RegistryError(
                f"agent {agent!r} is at version {current} and nothing came before it;"
                f" it has {', '.join(map(str, self.versions(slug)))}"
            )
        self._move(slug, target, "rollback", by, {})
        return target

    # -- inside ----------------------------------------------------------------------------

    @staticmethod
    def _essential() -> tuple[str, str]:
        return CONFIG_FILE, WEIGHTS_FILE

    def _folder(self, agent: str) -> Path:
        return self.root / adapter_slug(agent)

    @staticmethod
    def _versions(folder: Path) -> list[int]:
        if not folder.is_dir():
            return []
        found = (
            (re.fullmatch(r"v([0-9]{4,})", path.name), path)
            for path in folder.iterdir()
            if (path / MANIFEST_FILE).is_file()
        )
        return sorted(int(match[1]) for match, _ in found if match)

    def _check_story(
        self, slug: str, staged: Path, facts: AdapterFacts, parent: int | None, untrained: bool
    ) -> None:
        if parent is not None:
            self.path(slug, parent)
        if untrained and facts.has_effect:
            raise AdapterError(
                f"{staged} was announced as untrained, yet some lora_B is not zero;"
                " publish it without untrained"
            )
        if not untrained and not facts.has_effect:
            raise AdapterError(
                f"{staged} has no effect: every lora_B is zero, it would answer as the base;"
                " train it, or publish it as untrained"
            )

    def _next_version(self, slug: str, folder: Path) -> int:
        """One above every number ever used, those of deleted folders included."""
        used = [int(p.name[1:]) for p in folder.iterdir() if re.fullmatch(r"v[0-9]{4,}", p.name)]
        return max([0, *used, *self._audit.versions_named(slug)]) + 1

    def _rename_into_place(
        self, work: Path, folder: Path, draft: AdapterManifest
    ) -> AdapterManifest:
        version = self._next_version(draft.agent, folder)
        while True:
            manifest = draft.model_copy(update={"version": version})
            card = model_card(manifest).encode()
            durable.write_file(work / CARD_FILE, card)
            data = manifest.model_dump_json(indent=2).encode()
            durable.write_file(work / MANIFEST_FILE, data + b"\n")
            durable.fsync_folder(work)
            try:
                os.rename(work, folder / _folder_name(version))
            except OSError as error:
                if error.errno not in _OCCUPIED:
                    raise
                version += 1  # another publisher was faster
                continue
            durable.fsync_folder(folder)
            durable.make_read_only(folder / _folder_name(version))
            return manifest

    def _remove_stale(self, folder: Path) -> None:
        for path in folder.glob(f"{_STAGING}*"):
            if time.time() - path.stat().st_mtime > _STALE_AFTER_S:
                shutil.rmtree(path, ignore_errors=True)

    def _ensure_current(self, slug: str) -> None:
        folder = self.root / slug
        first = self._versions(folder)[0]
        text = f"{_folder_name(first)}\n".encode()
        if not (folder / CURRENT_FILE).exists():
            durable.create_file(folder / CURRENT_FILE, text)

    def _previous(self, slug: str, current: int) -> int | None:
        versions = self.versions(slug)
        told = self._audit.before(slug, current)
        return (
            told if told in versions else next((v for v in reversed(versions) if v < current), None)
        )

    def _move(
        self, slug: str, version: int, action: Action, by: str, evidence: Mapping[str, Any]
    ) -> None:
        previous = self.current(slug)
        text = f"{_folder_name(version)}\n".encode()
        pointer = self.root / slug / CURRENT_FILE
        with durable.restored_on_error(pointer):
            durable.replace_file(pointer, text)
            self._audit.append(action, slug, previous, version, by=by, evidence=evidence)
