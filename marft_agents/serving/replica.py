"""One engine behind the gateway, and what it is doing.

Invariant: a replica takes traffic only while it is ``ready``: its engine runs and has loaded and
probed every version that requests may be given. In any other state a reason says why.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from marft_agents.serving.loader import Loader
from marft_agents.serving.log_lines import say
from marft_agents.serving.upstream import Upstream

State = Literal["starting", "restoring", "ready", "down"]
"""``starting``: its engine is being started. ``restoring``: versions are loaded and probed.
``down``: it cannot be used; it is tried again."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """What a replica is doing right now; ``reason`` is ``None`` while it is ready."""

    name: str
    state: State
    reason: str | None
    in_flight: int
    restarts: int
    url: str


class Replica:
    """An engine's two connections: ``loader`` for adapters, ``upstream`` for requests."""

    def __init__(self, name: str, loader: Loader, upstream: Upstream) -> None:
        self.name = name
        self.loader = loader
        self.upstream = upstream
        self.in_flight = 0
        self.restarts = 0
        self.state: State = "ready"
        self.reason: str | None = None
        self.detail: str | None = None

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    def become(self, state: State, reason: str | None = None, detail: str | None = None) -> None:
        """Go into a state; clients may learn the ``reason``, only operators the ``detail``."""
        was, self.state, self.detail = self.state, state, detail
        self.reason = None if reason is None else self.upstream.masked(reason)
        if state != "ready":  # what comes back may be another engine
            self.loader.proofs.forget()
        if state != was:
            level = logging.INFO if state == "ready" else logging.WARNING
            told = self.status().reason
            say("replica", level, replica=self.name, state=state, was=was, reason=told)

    def status(self) -> ReplicaStatus:
        reason = self.reason if self.detail is None else f"{self.reason} ({self.detail})"
        return ReplicaStatus(
            self.name, self.state, reason, self.in_flight, self.restarts, self.upstream.url
        )
