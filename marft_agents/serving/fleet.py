"""All engines behind one gateway, as if they were one.

Invariant: a version is up when it was loaded and probed on every replica that takes traffic, or it
is up on none. Requests of one episode go to one replica while that is ready, so that its cached
prompts are used.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from marft_agents.registry import Registry
from marft_agents.registry.reader import folder_name
from marft_agents.schema import AdapterManifest, BaseModelInfo
from marft_agents.serving.aliases import Route
from marft_agents.serving.loader import Limits, Step, StepError, step
from marft_agents.serving.probe import ProbeReport
from marft_agents.serving.proofs import Folder, Proof
from marft_agents.serving.refusals import Refusal
from marft_agents.serving.replica import Replica, ReplicaStatus
from marft_agents.serving.threads import aside, in_thread

RETRY_AFTER_S = "2"
DEADLINE_S = 240.0
_LONGEST = 300
_T = TypeVar("_T")


def _weight(episode: str, name: str) -> bytes:
    """Rendezvous hashing: without a replica only its own episodes go elsewhere."""
    told = f"{episode}\0{name}".encode("utf-8", "backslashreplace")
    return hashlib.blake2b(told, digest_size=8).digest()


def _short(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


def unready(message: str) -> Refusal:
    """An answer that says when to ask again."""
    refusal = Refusal(503, message)
    refusal.headers["Retry-After"] = RETRY_AFTER_S
    return refusal


_Begins = Callable[[Step], None]


@dataclass
class _Work(Generic[_T]):
    """The same on several replicas at the same time; each names the step that it comes to."""

    route: Route
    work: Callable[[Replica, _Begins], _T]
    doing: dict[Replica, Step] = field(default_factory=dict[Replica, Step])

    async def on(self, replicas: Sequence[Replica], until: float) -> list[_T]:
        """Results of the replicas that take traffic when all have ended.

        Args:
            until: on the monotonic clock.

        Raises:
            StepError: naming every replica that failed and still takes traffic, or all when none
                did it.
        """
        tasks = {r: asyncio.ensure_future(self._one(r)) for r in replicas}
        await asyncio.wait(tasks.values(), timeout=max(0.0, until - time.monotonic()))
        late = [r for r, task in tasks.items() if not task.done()]
        for replica in late:
            tasks[replica].cancel()
        errors = {r: self._late(r) for r in late}
        results: dict[Replica, _T] = {}
        for replica, task in tasks.items():
            if replica in errors:
                continue
            if error := task.exception():
                if not isinstance(error, StepError):
                    raise error
                errors[replica] = error
            else:
                results[replica] = task.result()
        # A replica that left the traffic meanwhile gets every version before it comes back.
        counted = {r: e for r, e in errors.items() if r.ready or not results}
        if counted:
            raise _together(counted)
        return list(results.values())

    async def _one(self, replica: Replica) -> _T:
        def begins(doing: Step) -> None:
            self.doing[replica] = doing

        return await in_thread(self.work, replica, begins)

    def _late(self, replica: Replica) -> StepError:
        doing = self.doing.get(replica, "load")
        return StepError(
            f"step {doing} of {self.route.name} on {replica.name}: it did not end in time",
            step=doing,
            refused=False,
            replica=replica.name,
        )


def _together(errors: dict[Replica, StepError]) -> StepError:
    first = next(iter(errors.values()))
    if len(errors) == 1 or first.step == "check":  # which is the same for all
        return first
    return StepError(
        "; ".join(map(str, errors.values())),
        step=first.step,
        refused=all(error.refused for error in errors.values()),
        replica=", ".join(replica.name for replica in errors),
    )


class Fleet:
    """The replicas of one gateway; at least one.

    Args:
        deadline_s: longest time for loading and probing a version everywhere.
    """

    def __init__(self, replicas: Sequence[Replica], *, deadline_s: float = DEADLINE_S) -> None:
        self.replicas = tuple(replicas)
        self.stopping = False
        """Set when no new request is to be taken."""
        self.swaps = 0
        """Swaps under way."""
        self._deadline_s = deadline_s

    @property
    def registry(self) -> Registry:
        return self.replicas[0].loader.registry

    @property
    def base(self) -> BaseModelInfo:
        return self.replicas[0].loader.base

    @property
    def limits(self) -> Limits:
        return self.replicas[0].loader.limits

    @property
    def in_flight(self) -> int:
        """Requests that an engine answers right now."""
        return sum(replica.in_flight for replica in self.replicas)

    def status(self) -> list[ReplicaStatus]:
        """What every replica is doing."""
        return [replica.status() for replica in self.replicas]

    def choose(self, episode: str | None) -> Replica:
        """The replica for a request: an episode's own while that is ready, else the least busy.

        Raises:
            Refusal: 503 with ``Retry-After`` when none is ready.
        """
        self.require_taking()
        replica = self._pick(episode, self.replicas)
        if replica is None:
            raise self.unavailable()
        return replica

    def another(self, replica: Replica, episode: str | None) -> Replica | None:
        """One that is ready, in place of ``replica``."""
        return self._pick(episode, [r for r in self.replicas if r is not replica])

    def _pick(self, episode: str | None, replicas: Sequence[Replica]) -> Replica | None:
        ready = [replica for replica in replicas if replica.ready]
        if episode is None or len(ready) < 2:
            return min(ready, key=lambda r: r.in_flight, default=None)
        return max(ready, key=lambda r: _weight(episode, r.name), default=None)

    def require_taking(self) -> None:
        """Refuse a new request while the server stops.

        Raises:
            Refusal: 503.
        """
        if self.stopping:
            refusal = unready("this server is being stopped; ask again when it is back")
            refusal.headers["Connection"] = "close"
            raise refusal

    def unavailable(self) -> Refusal:
        """The answer while no replica is ready."""
        told = [f"{r.name} is {r.state}: {_short(r.reason)}" for r in self.replicas if r.reason]
        return unready(f"no engine is ready ({'; '.join(told) or 'all failed'}); try again")

    async def bring_up(
        self, route: Route, *, in_use: bool = False, allowed: Callable[[], None] | None = None
    ) -> ProbeReport:
        """Check, load and probe a version on every replica that takes traffic.

        The weights are compared with their checksums while the engines load them.

        Args:
            in_use: it stays loaded, whatever fails.
            allowed: raises when it must not be brought up.

        Raises:
            StepError: naming the step and the replica. The version is then loaded nowhere, unless
                it is ``in_use``.
        """
        replicas, until = self._ready(route), time.monotonic() + self._deadline_s
        first = replicas[0].loader

        def look_over() -> tuple[Folder, AdapterManifest]:
            if allowed is not None:
                with step(route.name, "check"):
                    allowed()
            before = first.folder(route.agent, route.version)
            return before, first.look_over(route.agent, route.version)

        before, manifest = await in_thread(look_over)
        compared = aside(first.compare, manifest)

        def work(replica: Replica, begins: _Begins) -> ProbeReport:
            return replica.loader.load_and_probe(
                manifest, before, compared=compared.result, replica=replica.name, begins=begins
            )

        try:
            return (await _Work(route, work).on(replicas, until))[0]
        except StepError as error:
            if not in_use:
                await self._take_out(route, replicas)
            await in_thread(wait, [compared], max(0.0, until - time.monotonic()))
            if compared.done() and (differs := compared.exception()) is not None:
                raise differs from error  # an engine that refuses it then is not at fault
            raise

    async def proven(self, route: Route, allowed: Callable[[], None] | None = None) -> Proof | str:
        """What a version was proved by on every replica that takes traffic, if it still holds.

        Every engine must list it, and its folder be as it was. To be asked while no replica can
        begin to take traffic.

        Args:
            allowed: raises when it must not be used.

        Returns:
            The proof, or what speaks against it.

        Raises:
            StepError: it must not be used, or no replica takes traffic.
        """
        ready, name = self._ready(route), route.name
        for replica in ready:
            if replica.loader.proofs.of(name) is None:
                return f"{replica.name} has not probed it since it came back"
        looked, path = self._seen(route, allowed), self._path(route)
        asked = [in_thread(r.loader.require_listed, name, path, r.name) for r in ready]
        folder, *listed = await asyncio.gather(looked, *asked, return_exceptions=True)
        if isinstance(folder, BaseException):
            raise folder
        if lost := [error for error in listed if error is not None]:
            return str(lost[0])
        found = [proof for r in ready if (proof := r.loader.proofs.of(name)) is not None]
        if len(found) < len(ready):
            return "a replica left the traffic meanwhile"
        if any(proof.folder != folder for proof in found):
            return "its folder has changed since"
        return min(found, key=lambda proof: proof.time)

    async def _seen(self, route: Route, allowed: Callable[[], None] | None) -> Folder:
        """A version's folder now, where the version may be used."""

        def look() -> Folder:
            if allowed is not None:
                with step(route.name, "check"):
                    allowed()
            return self.replicas[0].loader.folder(route.agent, route.version)

        return await in_thread(look)

    def _path(self, route: Route) -> Path:
        """Where a version's folder must be."""
        return self.registry.root / route.agent / folder_name(route.version)

    async def probe_again(self, route: Route) -> ProbeReport:
        """Probe a version that serves already; it stays loaded whatever comes out.

        Raises:
            StepError: when it does not answer as it should.
        """
        replicas, until = self._ready(route), time.monotonic() + self._deadline_s
        check = replicas[0].loader.check
        manifest = await in_thread(check, route.agent, route.version)

        def work(replica: Replica, begins: _Begins) -> ProbeReport:
            begins("probe")
            with step(route.name, "probe", replica.name):
                return replica.loader.probe(manifest)

        return (await _Work(route, work).on(replicas, until))[0]

    def _ready(self, route: Route) -> list[Replica]:
        ready = [replica for replica in self.replicas if replica.ready]
        if not ready:
            reason = self.unavailable().message
            message = f"step load of {route.name}: {reason}"
            raise StepError(message, step="load", refused=False)
        return ready

    async def _take_out(self, route: Route, replicas: Sequence[Replica]) -> dict[str, str]:
        """Unload on all at the same time; why it failed, by replica."""
        results = await asyncio.gather(
            *(in_thread(r.loader.unload, route.agent, route.version) for r in replicas),
            return_exceptions=True,
        )
        pairs = zip(replicas, results, strict=True)
        return {r.name: str(e) for r, e in pairs if isinstance(e, BaseException)}

    async def unload(self, route: Route) -> dict[str, str]:
        """Take a version out wherever an engine runs.

        Returns:
            Why it failed, by replica; it is tried again when the replica is looked after.
        """
        reachable = [r for r in self.replicas if r.state in ("ready", "restoring")]
        return await self._take_out(route, reachable)

    async def close(self) -> None:
        for replica in self.replicas:
            await replica.upstream.close()
