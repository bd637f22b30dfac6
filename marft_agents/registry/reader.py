"""Reading the registry's folder: nothing here changes it.

Invariant: what is read is a published version, or an error that says what is there instead; a
pointer (``CURRENT``, ``PINNED``) is never guessed.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from marft_agents.errors import AdapterError, RegistryError
from marft_agents.registry.audit import AuditLog, in_use
from marft_agents.registry.canary import CANARY_FILE, CanaryPlan, read_canary
from marft_agents.registry.checksums import Checksums
from marft_agents.schema import AdapterManifest, adapter_slug

MANIFEST_FILE = "manifest.json"
CURRENT_FILE = "CURRENT"
PINNED_FILE = "PINNED"
AUDIT_FILE = "audit.jsonl"


def folder_name(version: int) -> str:
    """Name of a version's folder."""
    return f"v{version:04d}"


def require_plain_name(folder: Path, name: str) -> None:
    """Refuse a name in a manifest that leads out of its folder.

    Raises:
        AdapterError: it does.
    """
    if name in ("", ".", "..") or Path(name).name != name or "\\" in name:
        raise AdapterError(f"{folder / MANIFEST_FILE} names a file outside its folder: {name!r}")


class RegistryReader:
    """The folder ``adapters/``, to be read."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()
        self._audit = AuditLog(self.root / AUDIT_FILE)
        self._checksums = Checksums()

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
        return self._pointer(agent, CURRENT_FILE)

    def pinned(self, agent: str) -> int | None:
        """The version that ``CURRENT`` is not moved away from without force; mostly ``None``.

        Raises:
            RegistryError: when ``PINNED`` is unreadable or names a version that is gone.
        """
        return self._pointer(agent, PINNED_FILE)

    def canary(self, agent: str) -> CanaryPlan | None:
        """The version that gets a share of the episodes beside the one in use; mostly ``None``.

        Raises:
            RegistryError: when ``CANARY`` is unreadable or names a version that is gone.
        """
        slug = adapter_slug(agent)
        plan = read_canary(self._folder(slug) / CANARY_FILE)
        if plan is None or plan.version == self._current_or_none(slug):
            return None
        if not self._has(slug, plan.version):
            raise RegistryError(
                f"{self._folder(slug) / CANARY_FILE} names version {plan.version}, which is gone;"
                f" marft-agents adapters canary {slug} --stop takes it away"
            )
        return plan

    def canary_is_gone(self, agent: str) -> bool:
        """Whether ``CANARY`` is a canary's, of a version that is there no more."""
        slug = adapter_slug(agent)
        with contextlib.suppress(RegistryError):
            plan = read_canary(self._folder(slug) / CANARY_FILE)
            return plan is not None and plan.version not in self.versions(slug)
        return False

    def history(self, agent: str) -> list[int]:
        """Versions in use, oldest first, that are still there; a rollback walks back through them.

        The last is in use, unless ``CURRENT`` is unreadable or names a version that is gone.
        """
        slug = adapter_slug(agent)
        now, there = self._current_or_none(slug), self.versions(slug)
        told = in_use(self._audit.entries(slug))
        if now is not None and now not in told[-1:]:
            told.append(now)
        out: list[int] = []
        for version in told:
            if version in there and version not in out[-1:]:
                out.append(version)
        return out

    def previous(self, agent: str) -> int | None:
        """The version that a rollback goes back to; ``None`` when there is none."""
        return next(iter(self.history(agent)[-2:-1]), None)

    def rollback_target(self, agent: str, to: int | None = None) -> int:
        """The version before the one in use, or ``to`` if it was in use before.

        Raises:
            RegistryError: when there is nothing to go back to.
        """
        slug = adapter_slug(agent)
        self.path(slug, to or next(iter(self.versions(slug)), 1))  # says what is unknown
        now = self._current_or_none(slug)
        if to is not None and to == now:
            return to
        before = self.history(slug)
        if now is not None:
            before.pop()
        target = to if to in before else None if to else next(reversed(before), None)
        if target is not None:
            return target
        what = f"version {to} was never in use" if to else "nothing came before it"
        known = ", ".join(map(str, self.versions(slug)))
        raise RegistryError(
            f"agent {agent!r} is at version {now} and {what}, says the audit trail;"
            f" to use another version (it has {known}): marft-agents adapters promote {slug} N"
        )

    def path(self, agent: str, version: int) -> Path:
        """Folder of one published version.

        Raises:
            RegistryError: when the agent or the version does not exist.
        """
        folder = self._folder(agent) / folder_name(version)
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
        self.verify_files(manifest)
        return manifest

    def verify_files(self, manifest: AdapterManifest, most_bytes: int | None = None) -> None:
        """Compare a version's files with the checksums of its manifest.

        Args:
            most_bytes: compare only files that are no longer than this; all must be there.

        Raises:
            AdapterError: naming the file that is missing, cut or changed.
        """
        folder = self.path(manifest.agent, manifest.version)
        for name, wanted in manifest.files.items():
            require_plain_name(folder, name)
            file = folder / name
            if not file.is_file():
                raise AdapterError(f"{file} is gone; published folders must not be changed")
            if most_bytes is not None and file.stat().st_size > most_bytes:
                continue
            if self._checksums.of(file) != wanted:
                raise AdapterError(
                    f"{file} is not the file that was published (its checksum differs);"
                    " publish the adapter again as a new version"
                )

    def audit(self, agent: str | None = None) -> list[dict[str, Any]]:
        """Every readable line of ``audit.jsonl`` (about one agent), oldest first."""
        return self._audit.entries(agent)

    def require_movable(
        self, agent: str, version: int, *, force: bool = False, back: bool = False
    ) -> None:
        """Refuse to move away from a pinned version, or to another one than the canary.

        A canary is no reason against going ``back``; the version in use may always be asked for.

        Raises:
            RegistryError: saying how to do it all the same.
        """
        slug = adapter_slug(agent)
        pinned = None if force else self.pinned(slug)
        if pinned not in (None, version):
            raise RegistryError(
                f"agent {slug!r} is pinned to version {pinned}; take the pin off (marft-agents"
                f" adapters pin {slug} --remove), or go to version {version} with --force"
            )
        if force or back or version == self._current_or_none(slug):
            return
        canary = self.canary(slug)
        if canary is not None and canary.version != version:
            raise RegistryError(
                f"version {canary.version} of agent {slug!r} is a canary; end that first"
                f" (marft-agents adapters canary {slug} --stop), or go to version {version} with"
                " --force, which ends it"
            )

    def _has(self, agent: str, version: int) -> bool:
        return (self._folder(agent) / folder_name(version) / MANIFEST_FILE).is_file()

    def require_pinnable(self, agent: str, version: int) -> None:
        """Refuse to pin a version beside a canary, or while another one is pinned.

        Raises:
            RegistryError: saying what to do first.
        """
        slug = adapter_slug(agent)
        self.path(slug, version)
        if (canary := self.canary(slug)) is not None:
            raise RegistryError(
                f"version {canary.version} of agent {slug!r} is a canary; end that first:"
                f" marft-agents adapters canary {slug} --stop"
            )
        if (pinned := self.pinned(slug)) not in (None, version):
            raise RegistryError(
                f"agent {slug!r} is pinned to version {pinned}; take that pin off first:"
                f" marft-agents adapters pin {slug} --remove"
            )

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

    def _pointer(self, agent: str, name: str) -> int | None:
        path = self._folder(agent) / name
        try:
            text = path.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise RegistryError(
                f"cannot read {path} ({error}); it must be a file that names a version,"
                f" as {folder_name(1)}"
            ) from error
        match = re.fullmatch(r"v0*([1-9][0-9]{0,9})", text)
        if match is None or not self._has(agent, int(match[1])):
            versions = self.versions(agent)
            raise RegistryError(
                f"{path} says {text[:40]!r}, which is no published version (there are"
                f" {versions or 'none'}); write one of them into it, as"
                f" {folder_name(versions[-1] if versions else 1)}"
            )
        return int(match[1])

    def _current_or_none(self, slug: str) -> int | None:
        with contextlib.suppress(RegistryError):
            return self.current(slug)
        return None
