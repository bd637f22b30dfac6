"""What every part of one recorder shares.

Invariant: the parts know ``Core``, never ``MarftRecorder``; an event reaches the log through
``emit`` only.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from marft_agents.recording.outlet import Draft
from marft_agents.recording.safety import Safety
from marft_agents.recording.server import KnownServers
from marft_agents.recording.sink import Sink
from marft_agents.schema import Event

_REMEMBERED = 100_000
"""Ids of episodes that are looked at for a second use."""

Inject = Literal["auto", "always", "never"]
Models = Mapping[str, str] | Literal["auto"]


def utc_now() -> datetime:
    return datetime.now(UTC)


def random_id() -> str:
    """Unique over processes; from a generator of our own, because asking the system costs time."""
    return f"{_random.getrandbits(64):016x}"


_random = random.Random(os.urandom(32))
os.register_at_fork(after_in_child=lambda: _random.seed(os.urandom(32)))


@dataclass(eq=False)
class Core:
    """Services of one recorder.

    ``models`` maps an agent to the model name to send; ``auto``: its own name where it is served.
    ``keep_caches``: whether the app's reply caches may answer while recording. ``runtimes``: of
    what was wrapped so far. ``attached``: whether anything was. ``enabled``: whether to record.
    """

    sink: Sink
    safety: Safety
    models: Models = field(default_factory=dict[str, str])
    inject: Inject = "auto"
    clock: Callable[[], datetime] = utc_now
    ids: Callable[[], str] = random_id
    servers: KnownServers = field(default_factory=KnownServers)
    keep_caches: bool = False
    closed: bool = False
    enabled: bool = True
    attached: bool = False
    runtimes: set[str] = field(default_factory=set[str])
    _given: set[str] = field(default_factory=set[str])

    @property
    def asks_servers(self) -> bool:
        """Whether to know a server's models before the first call goes there."""
        return self.inject == "auto" or self.models == "auto"

    def given_id(self, name: str) -> None:
        """The app names an episode itself; a name that it has used before is said once."""
        if name in self._given:
            self.safety.warn_once(
                "same id",
                f"marft-agents: a second episode was given the id {name[:100]!r}; the log holds"
                " both as one, and the latest reward counts for all of it; give each run an id of"
                " its own, or put what they have in common into metadata",
            )
        if len(self._given) >= _REMEMBERED:
            self._given.clear()
        self._given.add(name)

    def emit(self, event: Event | Draft) -> None:
        self.sink.put(event)

    def new_id(self) -> str:
        """A fresh id, also where the given source of ids fails."""
        try:
            made = self.ids()
        except Exception as error:
            self.safety.failed("make an id", error)
            made = ""
        return made or random_id()
