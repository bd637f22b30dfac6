"""All engines behind one gateway, as if they were one.

Invariant: a version is up when it was loaded and probed on every replica that takes traffic, or it
is up on none. Requests of one episode go to one replica while that is ready, so that its cached
prompts are used.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from marft_agents.registry import Registry
from marft_agents.schema import BaseModelInfo
from marft_agents.serving.aliases import Route
from marft_agents.serving.loader import Limits
from marft_agents.serving.probe import ProbeReport
from marft_agents.serving.refusals import Refusal
from marft_agents.serving.replica import Replica, ReplicaStatus

RETRY_AFTER_S = "2"


def _weight(episode: str, name: str) -> bytes:
    """Rendezvous hashing: without a replica only its own episodes go elsewhere."""
    told = f"{episode}\0{name}".encode("utf-8", "backslashreplace")
    return hashlib.blake2b(told, digest_size=8).digest()


class Fleet:
    """The replicas of one gateway; at least one."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = tuple(replicas)

    @property
    def registry(self) -> Registry:
        return self.replicas[0].loader.registry

    @property
    def base(self) -> BaseModelInfo:
        return self.replicas[0].loader.base

    @property
    def limits(self) -> Limits:
        return self.replicas[0].loader.limits

    def status(self) -> list[ReplicaStatus]:
        """What every replica is doing."""
        return [replica.status() for replica in self.replicas]

    def choose(self, episode: str | None, *, besides: Replica | None = None) -> Replica:
        """The replica for a request: an episode's own while that is ready, else the least busy.

        Raises:
            Refusal: 503 with ``Retry-After`` when none is ready.
        """
        ready = [r for r in self.replicas if r.ready and r is not besides]
        if not ready:
            raise self.unavailable()
        if episode is None:
            return min(ready, key=lambda r: r.in_flight)
        return max(ready, key=lambda r: _weight(episode, r.name))

    def unavailable(self) -> Refusal:
        """The answer while no replica is ready."""
        reasons = "; ".join(f"{s.name} is {s.state}: {s.reason}" for s in self.status() if s.reason)
        refusal = Refusal(503, f"no engine is ready ({reasons or 'all failed'}); try again")
        refusal.headers["Retry-After"] = RETRY_AFTER_S
        return refusal

    async def bring_up(self, route: Route, *, in_use: bool = False) -> ProbeReport:
        """Check, load and probe a version everywhere.

        Raises:
            StepError: naming the step and the replica. The version is then loaded nowhere, unless
                it is ``in_use`` by requests in flight.
        """
        reports = [
            await asyncio.to_thread(r.loader.bring_up, route.agent, route.version, in_use=in_use)
            for r in self.replicas
        ]
        return reports[0]

    async def probe_again(self, route: Route) -> ProbeReport:
        """Probe a version that serves already; it stays loaded whatever comes out.

        Raises:
            StepError: when it does not answer as it should.
        """
        reports = [
            await asyncio.to_thread(r.loader.probe_again, route.agent, route.version)
            for r in self.replicas
        ]
        return reports[0]

    async def restore(self, route: Route, replica: Replica) -> bool:
        """Load a served version again that a replica has lost; False when it has it.

        Raises:
            MarftError: when the engine cannot be asked, or refuses.
        """
        loader = replica.loader
        if await asyncio.to_thread(loader.is_loaded, route.agent, route.version):
            return False
        await asyncio.to_thread(loader.bring_up, route.agent, route.version)
        return True

    async def unload(self, route: Route) -> None:
        """Take a version out everywhere.

        Raises:
            MarftError: when an engine cannot be asked.
        """
        for replica in self.replicas:
            await asyncio.to_thread(replica.loader.unload, route.agent, route.version)

    async def close(self) -> None:
        for replica in self.replicas:
            await replica.upstream.close()
