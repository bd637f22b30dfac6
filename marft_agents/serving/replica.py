"""One engine behind the gateway.

Invariant: a replica takes traffic only while it is ``ready``: its engine runs and has loaded and
probed every version that requests may be given.
"""

from __future__ import annotations

from marft_agents.serving.loader import Loader
from marft_agents.serving.upstream import Upstream


class Replica:
    """An engine's two connections: ``loader`` for adapters, ``upstream`` for requests."""

    def __init__(self, name: str, loader: Loader, upstream: Upstream) -> None:
        self.name = name
        self.loader = loader
        self.upstream = upstream
        self.in_flight = 0
        self.ready = True
