"""Engines and gateways that are killed at random moments.

``MARFT_KILLS`` sets how many of each; a few by default.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from marft_agents.errors import ServerError, SwapError
from marft_agents.serving import EngineCommand, GatewayClient, ServerProcess
from marft_agents.serving.access import Access
from marft_agents.serving.client import EngineClient
from marft_agents.serving.fleet import Fleet
from marft_agents.serving.gateway import Gateway, GatewaySettings
from marft_agents.serving.replica import Replica
from marft_agents.serving.restartable import RestartableEngine
from marft_agents.serving.supervisor import Supervisor
from marft_agents.serving.swap import Swapper
from marft_agents.serving.upstream import Upstream
from tests.serving import fake_engine
from tests.serving.stage import (
    LOOK_OFTEN,
    OPERATOR_KEY,
    House,
    current_aliases,
    loaded_replica,
    running_app,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
KILLS = int(os.environ.get("MARFT_KILLS", "8"))
SEED = int(os.environ.get("MARFT_KILLS_SEED", "7"))


def child_of(pid: int) -> int | None:
    """The only child process, if there is one."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    return None


@dataclass
class Load:
    """Clients that ask all the time."""

    url: str
    allowed: set[str]
    """Versions that may answer right now."""
    counts: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    stop: threading.Event = field(default_factory=threading.Event)

    def ask(self, number: int) -> None:
        turn = 0
        with httpx.Client(timeout=20) as http:
            while not self.stop.is_set():
                turn += 1
                self._one(http, f"c{number}-{turn}", stream=turn % 3 == 0)

    def _one(self, http: httpx.Client, episode: str, *, stream: bool) -> None:
        before = set(self.allowed)
        body = {"model": "router", "messages": [], "stream": stream}
        url = f"{self.url}/v1/chat/completions"
        answer = http.post(url, json=body, headers={"X-Marft-Episode": episode})
        version = answer.headers.get("X-Marft-Adapter")
        whole = not stream or answer.text.rstrip().endswith("data: [DONE]")
        self.counts[f"{answer.status_code}{'' if whole else ' broken stream'}"] += 1
        if answer.status_code != 200:
            if answer.status_code != 503 or "Retry-After" not in answer.headers:
                self.wrong.append(answer.text)
            self.stop.wait(0.02)
            return
        if version not in before | self.allowed:
            self.wrong.append(f"{version} answered, allowed were {before} and {self.allowed}")
        if not stream and f'"{version}"' not in answer.json()["choices"][0]["message"]["content"]:
            self.wrong.append(f"said to be of {version}: {answer.text}")


@contextlib.contextmanager
def loaded_by(load: Load, clients: int = 3) -> Generator[None]:
    threads = [threading.Thread(target=load.ask, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        load.stop.set()
        for thread in threads:
            thread.join()


def _engine(folder: Path, index: int) -> RestartableEngine:
    def command(port: int) -> EngineCommand:
        argv = (sys.executable, "-S", fake_engine.__file__, "--port", str(port), "--pause", "0.01")
        return EngineCommand(argv)

    log = folder / f".engine-{index}.log"
    return RestartableEngine(f"engine {index}", log, command, start_timeout_s=30)


def _wait(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_engines_killed_at_random_moments_under_load_come_back_by_themselves(
    house: House, tmp_path: Path
) -> None:
    dice = random.Random(SEED)
    said: list[str] = []
    with contextlib.ExitStack() as stack:
        engines = [_engine(tmp_path, i) for i in range(3)]
        replicas: list[Replica] = []
        for i, engine in enumerate(engines):
            stack.callback(engine.close)
            client = stack.enter_context(EngineClient(engine.start(), load_timeout_s=5))
            upstream = Upstream(client.url, death=engine.death)
            replicas.append(loaded_replica(house, f"engine-{i}", client, upstream, None))
        fleet = Fleet(replicas)
        swapper = Swapper(fleet, current_aliases(house), wait_for_drain_s=0.05)
        named = {f"engine-{i}": engine for i, engine in enumerate(engines)}
        supervisor = Supervisor(fleet, swapper.keeper, named, said.append, LOOK_OFTEN)
        gateway = Gateway(swapper, GatewaySettings(Access(OPERATOR_KEY)), supervisor=supervisor)
        url = stack.enter_context(running_app(gateway.app()))
        operator = stack.enter_context(GatewayClient(url, operator_key=OPERATOR_KEY))
        load = Load(url, {"router@v1"})
        killed = 0
        with loaded_by(load):
            while killed < KILLS:
                if dice.random() < 0.7:  # also while engines start, and all at once
                    _wait("too few engines came back", lambda: _ready(fleet) >= 2)
                time.sleep(dice.uniform(0.0, 0.3))
                killed += _kill_one(dice, engines)
                if dice.random() < 0.4:
                    _try_swap(operator, load, dice.choice((1, 2)))
            _wait("not all engines came back", lambda: _ready(fleet) == 3)
            time.sleep(0.1)
        assert not load.wrong, load.wrong[:3]
        assert load.counts["200"] > 5 * KILLS, load.counts
        current = house.registry.current("router")
        gateway.aliases.leases.drop("router", but=current)  # episodes would keep theirs for long
        for replica in replicas:
            _wait(
                "an engine keeps more than is wanted",
                lambda r=replica: r.loader.listed() == {("router", current), ("writer", 1)},
            )
        assert sum(s.restarts for s in fleet.status()) >= 1
        print(f"{killed} kills, answers {dict(load.counts)}, {fleet.status()}")


def _ready(fleet: Fleet) -> int:
    return sum(status.state == "ready" for status in fleet.status())


def _kill_one(dice: random.Random, engines: list[RestartableEngine]) -> int:
    """Whether one was running, and was killed."""
    return _kill_child(dice.choice(engines).pid)


def _kill_child(guard: int | None) -> int:
    pid = child_of(guard) if guard is not None else None
    if pid is None:
        return 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return 1
    return 0


def _try_swap(operator: GatewayClient, load: Load, version: int) -> None:
    before = set(load.allowed)
    load.allowed = before | {f"router@v{version}"}
    with contextlib.suppress(SwapError):
        operator.swap("router", version)
        load.allowed = {f"router@v{version}"}
        return
    load.allowed = before


def test_a_gateway_killed_at_random_moments_of_swaps_serves_what_current_names(
    house: House,
) -> None:
    dice = random.Random(SEED)
    rounds = max(2, KILLS // 4) if "MARFT_KILLS" not in os.environ else KILLS
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(fake_engine.FakeEngine()) for _ in range(2)]
        for engine in engines:
            engine.delay_s = 0.005
        extra = [word for engine in engines for word in ("--server", engine.url)]
        for number in range(rounds + 1):
            with ServerProcess(
                house.registry.root, model=house.base_dir, extra=extra, start_timeout_s=60
            ) as server:
                _check_serves_current(house, server, engines)
                if number == rounds:
                    break
                stop = threading.Event()
                thread = threading.Thread(target=_keep_swapping, args=(house, server, stop))
                thread.start()
                time.sleep(dice.uniform(0.0, 0.5))
                _kill_child(server.pid)
                stop.set()
                thread.join()
            current = house.registry.current("router")
            assert current in (1, 2)
            house.registry.verify("router", current)


def _keep_swapping(house: House, server: ServerProcess, stop: threading.Event) -> None:
    with GatewayClient(server.url, adapters_dir=house.registry.root) as operator:
        version = 1
        while not stop.is_set():
            version = 3 - version
            with contextlib.suppress(ServerError, SwapError):
                operator.swap("router", version)


def _check_serves_current(
    house: House, server: ServerProcess, engines: list[fake_engine.FakeEngine]
) -> None:
    current = house.registry.current("router")
    body = {"model": "router", "messages": []}
    answer = httpx.post(f"{server.base_url}/chat/completions", json=body, timeout=10)
    assert answer.headers["X-Marft-Adapter"] == f"router@v{current}"
    for engine in engines:
        _wait(
            "an engine keeps what a killed gateway had loaded",
            lambda e=engine: set(e.adapters) == {f"router@v{current}", "writer@v1"},
        )
