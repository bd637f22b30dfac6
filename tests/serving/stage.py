"""A registry, a scripted engine and a gateway in front of it, for one test."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from marft_agents.registry import Registry, describe_base
from marft_agents.schema import AdapterManifest, BaseModelInfo, Probe
from marft_agents.serving.access import Access
from marft_agents.serving.aliases import Aliases, Route
from marft_agents.serving.calls import tls
from marft_agents.serving.client import EngineClient
from marft_agents.serving.connections import PatientProtocol
from marft_agents.serving.fleet import Fleet
from marft_agents.serving.gateway import Gateway, GatewaySettings
from marft_agents.serving.gateway_client import GatewayClient
from marft_agents.serving.loader import Limits, Loader
from marft_agents.serving.recording import Recording
from marft_agents.serving.replica import Replica
from marft_agents.serving.supervisor import Pace, Supervisor
from marft_agents.serving.swap import Swapper
from marft_agents.serving.upstream import Upstream
from tests.registry.bases import make_adapter, make_base
from tests.serving.fake_engine import FakeEngine, base_logprob

OPERATOR_KEY = "operator-key-of-the-tests-0123456789"


def fake_probe(version: int, *, untrained: bool = False) -> Probe:
    """What a trainer would measure on the scripted engine's model."""
    tokens = [5, 6, 7]
    base = [base_logprob(t) for t in tokens]
    effect = 0.0 if untrained else 0.1 * version
    return Probe(
        prompt_token_ids=[1, 2],
        token_ids=tokens,
        logprobs=[x - effect for x in base],
        base_logprobs=base,
    )


@dataclass
class House:
    """A registry with one base."""

    root: Path
    base_dir: Path
    base: BaseModelInfo
    registry: Registry

    def publish(
        self, agent: str, *, untrained: bool = False, probe: Probe | bool = True, **config: Any
    ) -> AdapterManifest:
        """The agent's next version; ``probe`` True makes the right one."""
        version = max(self.registry.versions(agent), default=0) + 1
        staged = make_adapter(
            self.root / f"staged-{agent}-{version}", fill=0.0 if untrained else None, config=config
        )
        if isinstance(probe, bool):
            probe_or_none = fake_probe(version, untrained=untrained) if probe else None
        else:
            probe_or_none = probe
        return self.registry.publish(
            agent, staged, base=self.base, parent=None, untrained=untrained, probe=probe_or_none
        )


def make_house(root: Path) -> House:
    base_dir = make_base(root / "base-model")
    return House(root, base_dir, describe_base(base_dir), Registry(root / "adapters"))


@dataclass
class Stage:
    """Everything running."""

    house: House
    engine: FakeEngine
    gateway: Gateway
    url: str
    http: httpx.Client
    operator: GatewayClient
    dead: list[str] = field(default_factory=list[str])
    """Put a reason in, and the process of every engine counts as gone."""
    engines: list[FakeEngine] = field(default_factory=list[FakeEngine])
    """Of every replica; the first is ``engine``."""
    said: list[str] = field(default_factory=list[str])
    """What the supervisor told the operator."""

    @property
    def states(self) -> list[str]:
        return [status.state for status in self.gateway.fleet.status()]

    def chat(self, model: Any = "router", **more: Any) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "é?"}]} | more
        return self.http.post(f"{self.url}/v1/chat/completions", json=body)

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until it holds; an assertion after 20 s."""
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, "it did not happen within 20 s"
            time.sleep(0.005)


class _Prompt(uvicorn.Server):
    """Sees at once that it is to end; hundreds of tests wait for that."""

    async def main_loop(self) -> None:
        ticks = itertools.count()
        while not await self.on_tick(next(ticks)):
            await asyncio.sleep(0.005)


@contextlib.contextmanager
def running_app(app: Any) -> Generator[str]:
    """Serve an ASGI app on a free loopback port."""
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        log_level="error",
        proxy_headers=False,
        http=PatientProtocol,
        ws="none",
        timeout_graceful_shutdown=1,
    )
    server = _Prompt(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline
        time.sleep(0.002)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


NEVER_LOOK = Pace(poll_s=3600.0, again_s=0.02, shortest_s=0.02, longest_s=0.1)
"""Replicas are looked at only when a request failed."""
LOOK_OFTEN = Pace(poll_s=0.05, again_s=0.02, shortest_s=0.02, longest_s=0.1)


def short(seconds: float) -> float:
    """A time-out that a fault runs into soon, and a call that works does not on a busy machine."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def loaded_replica(
    house: House, name: str, client: EngineClient, upstream: Upstream, limits: Limits | None
) -> Replica:
    """One that has every current version."""
    loader = Loader(client, house.registry, house.base, limits or Limits(16))
    loader.take_baseline()
    for agent in house.registry.agents():
        version = house.registry.current(agent)
        assert version is not None
        loader.bring_up(agent, version)
    return Replica(name, loader, upstream)


def current_aliases(house: House) -> Aliases:
    aliases = Aliases()
    for agent in house.registry.agents():
        version = house.registry.current(agent)
        assert version is not None
        aliases.point(Route(agent, version))
    return aliases


@contextlib.contextmanager
def running_stage(
    house: House,
    *,
    replicas: int = 1,
    api_key: str | None = None,
    timeout_s: float = 5.0,
    load_timeout_s: float = 5.0,
    deadline_s: float = 60.0,
    limits: Limits | None = None,
    wait_for_drain_s: float = 10.0,
    read_timeout_s: float = 30.0,
    max_body: int = 4096,
    recording: Recording | None = None,
    pace: Pace = NEVER_LOOK,
    **more: Any,
) -> Generator[Stage]:
    """Load what the registry says is current and serve it; ``more`` is for the gateway."""
    dead: list[str] = []
    said: list[str] = []
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(FakeEngine()) for _ in range(replicas)]
        made: list[Replica] = []
        for i, engine in enumerate(engines):
            client = EngineClient(
                engine.url,
                timeout_s=timeout_s,
                load_timeout_s=load_timeout_s,
                probe_timeout_s=timeout_s,
            )
            upstream = Upstream(
                engine.url, death=lambda: dead[0] if dead else None, read_timeout_s=read_timeout_s
            )
            stack.enter_context(client)
            made.append(loaded_replica(house, f"engine-{i}", client, upstream, limits))
        fleet = Fleet(made, deadline_s=deadline_s)
        swapper = Swapper(fleet, current_aliases(house), wait_for_drain_s=wait_for_drain_s)
        told: dict[str, Any] = {
            "access": Access(OPERATOR_KEY, api_key),
            "max_body": max_body,
        } | more
        settings = GatewaySettings(**told)
        supervisor = Supervisor(fleet, swapper.keeper, {}, said.append, pace)
        gateway = Gateway(swapper, settings, recording, supervisor=supervisor)
        with (
            running_app(gateway.app()) as url,
            httpx.Client(timeout=10, verify=tls()) as http,
            GatewayClient(url, operator_key=OPERATOR_KEY) as operator,
        ):
            yield Stage(house, engines[0], gateway, url, http, operator, dead, engines, said)
