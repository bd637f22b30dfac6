"""Versions that are pinned, or that a share of the episodes gets.

Invariant: ``PINNED`` names the version that ``CURRENT`` is not moved away from, ``CANARY`` the one
that is tried beside it; never both of two versions, unless somebody forces it. Each change of them
is in the trail.
"""

from __future__ import annotations

from dataclasses import replace

from marft_agents.errors import RegistryError
from marft_agents.registry.audit import Action, CanaryAction, Change
from marft_agents.registry.canary import CANARY_FILE, CanaryPlan
from marft_agents.registry.intents import intended
from marft_agents.registry.reader import PINNED_FILE, folder_name
from marft_agents.registry.trail import TrailKeeper
from marft_agents.schema import adapter_slug


class Marker(TrailKeeper):
    """Pins versions, and begins and ends canaries."""

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

    # -- inside ----------------------------------------------------------------------------

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
