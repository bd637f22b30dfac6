"""Which version is in use: moved forward and back, at once or prepared.

Invariant: ``CURRENT`` is replaced in one step, by one process at a time, and every move of it is in
the trail once. A canary or a pin that a move goes against is ended by the same hand.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from marft_agents.registry import durable, locks
from marft_agents.registry.audit import Change
from marft_agents.registry.canary import CANARY_FILE
from marft_agents.registry.moving import Move
from marft_agents.registry.reader import CURRENT_FILE, PINNED_FILE
from marft_agents.registry.trail import TrailKeeper
from marft_agents.schema import adapter_slug


class Mover(TrailKeeper):
    """Moves ``CURRENT``."""

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
                self._settle(slug, self._audit.entries(slug))
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

    # -- inside ----------------------------------------------------------------------------

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
