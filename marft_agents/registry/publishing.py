"""New versions: checked, copied beside the others, and renamed into place.

Invariant: ``<root>/<agent>/v0007/`` appears whole, by one rename, with a number that was never used
before, and is never changed or reused afterwards.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

from marft_agents.errors import AdapterError, RegistryError
from marft_agents.registry import durable
from marft_agents.registry.audit import Change
from marft_agents.registry.card import model_card
from marft_agents.registry.check import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterFacts,
    inspect_adapter,
)
from marft_agents.registry.reader import CURRENT_FILE, MANIFEST_FILE, folder_name
from marft_agents.registry.staging import remove_dead, staging
from marft_agents.registry.trail import TrailKeeper
from marft_agents.schema import AdapterManifest, BaseModelInfo, Probe, adapter_slug

CARD_FILE = "README.md"
_OCCUPIED = {errno.EEXIST, errno.ENOTEMPTY}


class Publisher(TrailKeeper):
    """Makes versions."""

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
        command: str | None = None,
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
        remove_dead(folder)
        with staging(folder) as work:
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
            with self.changing(slug):
                manifest = self._rename_into_place(work, folder, draft)
                self._ensure_current(slug)
                change = Change(by, command, evidence={"untrained": untrained})
                self.note("publish", slug, parent, manifest.version, change)
        return manifest

    # -- inside ----------------------------------------------------------------------------

    @staticmethod
    def _essential() -> tuple[str, str]:
        return CONFIG_FILE, WEIGHTS_FILE

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
                os.rename(work, folder / folder_name(version))
            except OSError as error:
                if error.errno not in _OCCUPIED:
                    raise
                version += 1  # another publisher was faster
                continue
            durable.fsync_folder(folder)
            durable.make_read_only(folder / folder_name(version))
            return manifest

    def _ensure_current(self, slug: str) -> None:
        folder = self.root / slug
        first = self._versions(folder)[0]
        text = f"{folder_name(first)}\n".encode()
        if not (folder / CURRENT_FILE).exists():
            durable.create_file(folder / CURRENT_FILE, text)
