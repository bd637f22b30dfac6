"""The trail of every change, kept whole: one process changes the registry at a time.

Invariant: inside ``changing`` the agent's trail is complete. The line of a change that a crash cut
off, or that somebody's editor made, is written before anything else is changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from marft_agents.errors import AdapterError, RegistryError
from marft_agents.registry import locks
from marft_agents.registry.audit import Action, Change, in_use, versions_named
from marft_agents.registry.canary import CANARY_FILE, CanaryPlan
from marft_agents.registry.intents import LATE, remove_intents, unwritten
from marft_agents.registry.moving import prepared_line, remove_left
from marft_agents.registry.reader import PINNED_FILE, RegistryReader
from marft_agents.registry.staging import remove_dead
from marft_agents.schema import adapter_slug


class TrailKeeper(RegistryReader):
    """The folder ``adapters/``, to be changed by whoever notes it."""

    @contextlib.contextmanager
    def changing(self, agent: str) -> Generator[None]:
        """One process at a time changes the registry; the agent's trail is complete inside.

        Raises:
            RegistryError: when another process does not end.
        """
        with locks.changing(self.root):
            slug = adapter_slug(agent)
            self._settle(slug, self._audit.entries(slug))
            yield

    def settle(self) -> None:
        """Complete every agent's trail, and take away what killed processes left.

        Raises:
            RegistryError: when another process, which changes the registry, does not end.
        """
        if not self.root.is_dir():
            return
        agents = self.agents()
        with locks.changing(self.root):
            entries = self._audit.entries()
            for slug in agents:
                self._settle(slug, [e for e in entries if e.get("agent") == slug])
        for folder in self.root.iterdir():
            if folder.is_dir():
                remove_dead(folder)

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

    def _settle(self, slug: str, entries: Sequence[Mapping[str, Any]]) -> None:
        """Make up for what a crash or somebody's editor left without a line, or half done."""
        folder, now = self.root / slug, self._current_or_none(slug)
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

    def _canary_or_none(self, slug: str) -> CanaryPlan | None:
        with contextlib.suppress(RegistryError):
            return self.canary(slug)
        return None
