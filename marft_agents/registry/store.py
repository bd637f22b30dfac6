"""Adapter versions on disk.

Invariant: ``<root>/<agent>/v0007/`` appears whole, by one rename, and is never changed or reused
afterwards. ``CURRENT`` names the version in use and is replaced in one step, by one process at a
time; ``PINNED``, where there is one, names the version that it is not moved away from, and
``CANARY`` the one that a share of the episodes gets; both are moved or ended by the same hand.
``audit.jsonl`` says who changed what, when, and on which evidence: every move of ``CURRENT`` is in
it once. A crash at any point leaves at most dot files, which readers ignore; the next change of
that agent makes up for a line that a crash kept from being written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from marft_agents.errors import AdapterError, RegistryError
from marft_agents.registry import durable, locks
from marft_agents.registry.audit import Action, CanaryAction, Change, in_use, versions_named
from marft_agents.registry.canary import CANARY_FILE, CanaryPlan
from marft_agents.registry.card import model_card
from marft_agents.registry.check import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterFacts,
    inspect_adapter,
)
from marft_agents.registry.intents import LATE, intended, remove_intents, unwritten
from marft_agents.registry.moving import Move, prepared_line, remove_left
from marft_agents.registry.reader import (
    CURRENT_FILE,
    MANIFEST_FILE,
    PINNED_FILE,
    RegistryReader,
    folder_name,
)
from marft_agents.schema import AdapterManifest, BaseModelInfo, Probe, adapter_slug

CARD_FILE = "README.md"
_STAGING = ".staging-"
_STALE_AFTER_S = 3600.0
_OCCUPIED = {errno.EEXIST, errno.ENOTEMPTY}


class Registry(RegistryReader):
    """The folder ``adapters/``: versions per agent, which one is in use, and the audit trail."""

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
            with self.changing(slug):
                manifest = self._rename_into_place(work, folder, draft)
                self._ensure_current(slug)
                change = Change(by, command, evidence={"untrained": untrained})
                self.note("publish", slug, parent, manifest.version, change)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return manifest

    def promote(self, agent: str, version: int, *, by: str, evidence: Mapping[str, Any]) -> None:
        """Make ``version`` the one in use; see :meth:`move`."""
        self.move(agent, version, Change(by, evidence=evidence))

    def move(self, agent: str, version: int, change: Change) -> int | None:
        """Make ``version`` the one in use; returns the one before, which may be the same.

        Raises:
            RegistryError: when the agent or the version does not exist, or another is pinned.
        """
        slug = adapter_slug(agent)
        self.path(slug, version)
        with self.changing(slug):
            return self._move(slug, version, change)

    def prepare_move(self, agent: str, version: int, change: Change) -> Move:
        """Write down beforehand what :meth:`commit_move` needs on disk; nothing moves yet.

        Whoever prepares a move commits it and finishes it, or discards it.

        Raises:
            RegistryError: as :meth:`move` would.
        """
        slug = adapter_slug(agent)
        self.path(slug, version)
        with self.changing(slug):
            return self._prepare(slug, version, change)

    def commit_move(self, move: Move, evidence: Mapping[str, Any]) -> None:
        """Make the version of a prepared move the one in use; the move is then to be finished.

        ``CURRENT`` is on disk afterwards, and others cannot change the registry until the move is
        finished. On an error nothing has moved.

        Args:
            evidence: what was learnt since it was prepared.

        Raises:
            RegistryError: as :meth:`move` would, for what others changed since it was prepared.
        """
        slug = move.agent
        try:
            move.held.enter_context(locks.changing(self.root))
            if not (move.standing and self._current_or_none(slug) == move.before):
                move.take_away()
                self._settle(slug)
                anew = self._prepare(slug, move.version, move.change)
                move.new, move.line, move.before = anew.new, anew.line, anew.before
            move.change = replace(move.change, evidence={**move.change.evidence, **evidence})
            self._commit(move, flush=False)
        except BaseException:
            self.discard_move(move)
            raise

    def finish_move(self, move: Move) -> None:
        """Wait until the line of a move that was committed is on disk, too.

        Raises:
            OSError: the disk fails; the next change makes up for a line that is lost then.
        """
        with move.held:
            self._audit.flush()
            self._clean_up(move)

    def discard_move(self, move: Move) -> None:
        """Leave nothing of a move that was prepared and is not wanted any more."""
        with move.held, contextlib.suppress(OSError):  # the next change takes away what is left
            move.take_away()

    def rollback(self, agent: str, change: Change | None = None, *, to: int | None = None) -> int:
        """Go back to the version that was in use before, or to an earlier one; returns it.

        Raises:
            RegistryError: when there is nothing to go back to, or the one in use is pinned.
        """
        slug = adapter_slug(agent)
        self.rollback_target(slug, to)
        with self.changing(slug):
            target = self.rollback_target(slug, to)
            self._move(slug, target, replace(change or Change(), action="rollback"))
        return target

    def pin(self, agent: str, change: Change | None = None, *, version: int | None = None) -> int:
        """Pin the version in use, which must be ``version`` where that is given; returns it.

        Raises:
            RegistryError: when there is none, or another.
        """
        slug = adapter_slug(agent)
        self.path(slug, next(iter(self.versions(slug)), 1))
        with self.changing(slug):
            now = self.current(slug)
            if now is None:
                raise RegistryError(f"agent {agent!r} has no version in use; promote one first")
            if version not in (None, now):
                raise RegistryError(f"agent {agent!r} is at version {now} by now; pin it again")
            self.require_pinnable(slug, now)
            was = self.pinned(slug)
            if was != now:
                self._pin(slug, "pin", was, now, change or Change())
        return now

    def unpin(self, agent: str, change: Change | None = None) -> int | None:
        """Take the pin off; returns the version that was pinned, if any was."""
        slug = adapter_slug(agent)
        self.path(slug, next(iter(self.versions(slug)), 1))
        with self.changing(slug):
            path = self.root / slug / PINNED_FILE
            was = self.pinned(slug) if path.exists() else None
            if was is not None:
                self._pin(slug, "unpin", was, None, change or Change())
        return was

    def set_canary(
        self, agent: str, plan: CanaryPlan, change: Change, *, action: CanaryAction = "canary"
    ) -> None:
        """Note that a version gets a share of the episodes, or that its plan is another now.

        Raises:
            RegistryError: when it is in use already or there is no such version; for another
                canary's; when the agent is pinned and nobody forces it.
        """
        slug = adapter_slug(agent)
        self.require_canary(slug, plan, force=change.force)
        with self.changing(slug):
            self.require_canary(slug, plan, force=change.force)
            told = replace(change, evidence={**plan.told(), **change.evidence})
            now = self.current(slug)
            entry = self._audit.entry(action, slug, now, plan.version, now, told)
            text = plan.model_dump_json(indent=2) + "\n"
            with intended(self.root / slug / CANARY_FILE, text, entry):
                self._audit.write(entry)

    def require_canary(self, agent: str, plan: CanaryPlan, *, force: bool = False) -> None:
        """Refuse what :meth:`set_canary` would.

        Raises:
            RegistryError: see there.
        """
        slug = adapter_slug(agent)
        self.path(slug, plan.version)
        running, pinned = self.canary(slug), self.pinned(slug)
        if self.current(slug) == plan.version:
            raise RegistryError(f"{slug}@v{plan.version} is in use: it answers every episode")
        if running is not None and running.version != plan.version:
            raise RegistryError(
                f"version {running.version} of agent {slug!r} is a canary already; end that first:"
                f" marft-agents adapters canary {slug} --stop"
            )
        if pinned is not None and (not force or plan.then == "promote"):
            how = "or leave out --then promote" if force else "or use --force, which leaves it on"
            raise RegistryError(
                f"agent {slug!r} is pinned to version {pinned}; take the pin off (marft-agents"
                f" adapters pin {slug} --remove), {how}"
            )

    def end_canary(
        self, agent: str, change: Change, *, action: CanaryAction = "canary-stop"
    ) -> int | None:
        """Take ``CANARY`` away, also an unreadable one; the version, as far as it is known."""
        slug = adapter_slug(agent)
        self.path(slug, next(iter(self.versions(slug)), 1))
        with self.changing(slug):
            return self._end_canary(slug, change, action)

    @contextlib.contextmanager
    def changing(self, agent: str) -> Generator[None]:
        """One process at a time changes the registry; the agent's trail is complete inside.

        Raises:
            RegistryError: when another process does not end.
        """
        with locks.changing(self.root):
            self._settle(adapter_slug(agent))
            yield

    def note(
        self,
        action: Action,
        agent: str,
        origin: int | None,
        version: int | None,
        change: Change,
        *,
        result: str | None = None,
    ) -> None:
        """Append a line to the trail; ``result`` says why nothing was done, where nothing was."""
        current = self._current_or_none(agent)
        more = {} if result is None else {"result": result}
        self._audit.write(
            self._audit.entry(action, agent, origin, version, current, change, **more)
        )

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

    def _remove_stale(self, folder: Path) -> None:
        for path in folder.glob(f"{_STAGING}*"):
            if time.time() - path.stat().st_mtime > _STALE_AFTER_S:
                shutil.rmtree(path, ignore_errors=True)

    def _ensure_current(self, slug: str) -> None:
        folder = self.root / slug
        first = self._versions(folder)[0]
        text = f"{folder_name(first)}\n".encode()
        if not (folder / CURRENT_FILE).exists():
            durable.create_file(folder / CURRENT_FILE, text)

    def _settle(self, slug: str) -> None:
        """Make up for what a crash or somebody's editor left without a line, or half done."""
        folder = self.root / slug
        entries, now = self._audit.entries(slug), self._current_or_none(slug)
        told, prepared = in_use(entries)[-1:], prepared_line(folder, now)
        late = [*self._unnamed(slug, entries, next(iter(told), None)), *unwritten(folder, entries)]
        for entry in late:
            self._audit.write(entry)
        if prepared is not None:
            self._finish_cut_off(folder, now)
        if now is not None and now not in told:
            if prepared is not None:
                self._audit.write(prepared)
            else:
                why = {"reason": "CURRENT was changed without a line in this trail"}
                before = next(iter(told), None)
                self.note("found", slug, before, now, Change("unknown", evidence=why))
        remove_left(folder)
        remove_intents(folder)

    def _unnamed(
        self, slug: str, entries: Sequence[Mapping[str, Any]], current: int | None
    ) -> Iterator[dict[str, Any]]:
        """Lines for versions whose publisher ended before it wrote one."""
        named = max(versions_named(entries), default=0)
        for version in [v for v in self.versions(slug) if v > named]:
            change, parent = Change("unknown", evidence={"late": LATE}), None
            with contextlib.suppress(AdapterError):
                parent = self.manifest(slug, version).parent
            yield self._audit.entry("publish", slug, parent, version, current, change)

    def _finish_cut_off(self, folder: Path, now: int | None) -> None:
        """End what a move that came as far as ``CURRENT`` ends."""
        with contextlib.suppress(RegistryError):
            if self.pinned(folder.name) != now:
                (folder / PINNED_FILE).unlink(missing_ok=True)
        (folder / CANARY_FILE).unlink(missing_ok=True)

    def _move(self, slug: str, version: int, change: Change) -> int | None:
        move = self._prepare(slug, version, change)
        try:
            self._commit(move, flush=True)
        except BaseException:
            move.take_away()
            raise
        self._clean_up(move)
        return move.before

    def _prepare(self, slug: str, version: int, change: Change) -> Move:
        self.path(slug, version)
        move = Move(self.root / slug, version, self._current_or_none(slug), change)
        if move.before != version:
            back = change.action == "rollback"
            self.require_movable(slug, version, force=change.force, back=back)
            move.write(
                self._audit.entry(change.action, slug, move.before, version, version, change)
            )
        return move

    def _commit(self, move: Move, *, flush: bool) -> None:
        """Replace ``CURRENT`` and write the line, or change nothing."""
        if move.new is None:
            return
        slug, version, change = move.agent, move.version, move.change
        back = change.action == "rollback"
        self.path(slug, version)
        self.require_movable(slug, version, force=change.force, back=back)
        pinned = self.pinned(slug) if change.force else None
        if pinned not in (None, version):
            change = replace(change, evidence={**change.evidence, "unpinned": pinned})
            move.unpins = True
        entries = [self._audit.entry(change.action, slug, move.before, version, version, change)]
        canary = self._canary_or_none(slug)
        if (move.folder / CANARY_FILE).exists() and (canary is None or canary.version != version):
            ended = replace(change, evidence={"reason": f"{slug} goes to version {version}"})
            origin, now = canary and canary.version, move.before
            entries.insert(0, self._audit.entry("canary-stop", slug, origin, now, now, ended))
        pointer = move.folder / CURRENT_FILE
        with durable.restored_on_error(pointer):
            os.replace(move.new, pointer)
            durable.fsync_folder(pointer.parent)
            self._audit.write(*entries, flush=flush)

    def _clean_up(self, move: Move) -> None:
        if move.new is None:
            return
        if move.unpins:
            (move.folder / PINNED_FILE).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a canary that is in use by now is none, to any reader
            (move.folder / CANARY_FILE).unlink(missing_ok=True)
        move.take_away()  # last: while the line lies there, what it ends is known

    def _canary_or_none(self, slug: str) -> CanaryPlan | None:
        with contextlib.suppress(RegistryError):
            return self.canary(slug)
        return None

    def _end_canary(
        self, slug: str, change: Change, action: CanaryAction = "canary-stop"
    ) -> int | None:
        path, plan = self.root / slug / CANARY_FILE, self._canary_or_none(slug)
        if not path.exists():
            return None
        version, now = plan and plan.version, self._current_or_none(slug)
        entry = self._audit.entry(action, slug, version, now, now, change)
        with intended(path, None, entry):
            self._audit.write(entry)
        return version

    def _pin(
        self, slug: str, action: Action, was: int | None, now: int | None, change: Change
    ) -> None:
        text = None if now is None else f"{folder_name(now)}\n"
        entry = self._audit.entry(action, slug, was, now, self._current_or_none(slug), change)
        with intended(self.root / slug / PINNED_FILE, text, entry):
            self._audit.write(entry)
