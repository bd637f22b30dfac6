"""Engine, gateway and operator killed in the middle of swaps: the old or the new version, whole.

Whatever dies and whenever: every reply is of exactly one published version, ``CURRENT`` names a
complete one, the server comes back by itself or with its next start, and a repeated swap works.
``MARFT_KILLS`` sets how many of each.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from typing import Any

import httpx
import pytest

from marft_agents.errors import MarftError
from marft_agents.serving import GatewayClient, ServerProcess
from tests.end_to_end.swaps import Answer, Clients, Versions, processes

AGENTS = ("planner", "writer")
KILLS = int(os.environ.get("MARFT_KILLS", "3"))
EXTRA = ["--engine", "local", "--max-lora-rank", "8", "--max-model-len", "512"]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return Versions(tmp_path_factory.mktemp("world"), AGENTS, each=2)


def module_of(argv: list[str]) -> str | None:
    """``x`` of ``python -m x``; ``None`` for anything else, such as the guard around it."""
    return argv[2] if len(argv) > 2 and argv[1] == "-m" else None


def kill(module: str, versions: Versions) -> int:
    """SIGKILL the process that runs ``module`` for these versions; its id."""
    place = str(versions.model)
    found = [pid for pid, argv in processes(place).items() if module_of(argv) == module]
    assert found, f"no process runs {module}"
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found[0]


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.05)


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/ready", timeout=5, trust_env=False).status_code == 200
    return False


def ask_again_while_told_to(url: str, body: dict[str, Any]) -> httpx.Response:
    """What SDKs do: a 503 names when to come again; readiness may be a second old."""
    deadline = time.monotonic() + 60
    while True:
        reply = httpx.post(url, json=body, timeout=60, trust_env=False)
        if reply.status_code != 503 or time.monotonic() > deadline:
            return reply
        assert reply.headers["retry-after"]
        time.sleep(0.1)


def swap_quietly(server: ServerProcess, agent: str, version: int) -> dict[str, Any] | None:
    """What the swap answered; ``None`` when it failed."""
    with GatewayClient(server.url, adapters_dir=server.adapters, swap_timeout_s=60) as operator:
        try:
            return operator.swap(agent, version)
        except MarftError:
            return None


def check_consistent(server: ServerProcess, versions: Versions) -> None:
    """The server, ``CURRENT`` and what answers agree."""
    with GatewayClient(server.url, adapters_dir=server.adapters) as operator:
        state = operator.state()["agents"]
    for agent in AGENTS:
        current = versions.registry.current(agent)
        assert current in versions.registry.versions(agent)
        assert state[agent]["current"] == current
        body = {"model": agent, "messages": [{"role": "user", "content": "ship on friday?"}]}
        body |= {"max_tokens": 8, "logprobs": True, "return_token_ids": True, "temperature": 1.0}
        url = f"{server.base_url}/chat/completions"
        reply = ask_again_while_told_to(url, body).raise_for_status()
        answer = Answer(agent, None, streamed=False, status=200, version=(agent, current or 0))
        answer.read(reply.json())
        assert reply.headers["x-marft-adapter"] == f"{agent}@v{current}"
        versions.check([answer])


@contextlib.contextmanager
def served(versions: Versions) -> Generator[ServerProcess]:
    with ServerProcess(versions.registry.root, model=versions.model, extra=EXTRA) as server:
        yield server


def test_an_engine_that_is_killed_during_a_swap_comes_back_with_what_is_in_use(
    versions: Versions,
) -> None:
    draw = random.Random(1)
    with served(versions) as server:

        async def play() -> Clients:
            clients = Clients(server.url, AGENTS, 4, max_tokens=8)
            asking = asyncio.create_task(clients.run())
            for number in range(KILLS):
                target = 1 + (number + 1) % 2
                swap = asyncio.to_thread(swap_quietly, server, AGENTS[number % 2], target)
                swapping = asyncio.create_task(swap)
                await asyncio.sleep(draw.uniform(0, 0.3))
                kill("marft_agents.serving.local", versions)
                await swapping
                await asyncio.to_thread(wait_until, lambda: answers(server.url), "ready again")
                await asyncio.to_thread(check_consistent, server, versions)
            clients.stop()
            await asking
            return clients

        clients = asyncio.run(play())
    good = [a for a in clients.answers if a.status == 200 and a.problem is None and a.tokens]
    assert len(good) > 4 * KILLS
    assert {a.status for a in clients.answers} <= {0, 200, 503}, "only the engine's absence"
    versions.check(good)


def test_a_gateway_that_is_killed_during_a_swap_leaves_no_engine_and_a_whole_registry(
    versions: Versions,
) -> None:
    draw = random.Random(2)
    for number in range(KILLS):
        with served(versions) as server:
            check_consistent(server, versions)
            target = 1 + (number + 1) % 2
            command = [sys.executable, "-c", SWAP, server.url, str(server.adapters), AGENTS[0]]
            with subprocess.Popen([*command, str(target)], stderr=subprocess.DEVNULL) as swap:
                time.sleep(draw.uniform(0.2, 0.8))
                kill("marft_agents", versions)
                swap.wait(60)
        wait_until(lambda: not processes(str(versions.model)), "the engine is gone, too")
        for agent in AGENTS:
            assert versions.registry.current(agent) in versions.registry.versions(agent)
    with served(versions) as server:
        check_consistent(server, versions)
        assert swap_quietly(server, AGENTS[0], 2) is not None
        check_consistent(server, versions)


SWAP = (
    "import sys; from marft_agents.serving import GatewayClient\n"
    "url, adapters, agent, version = sys.argv[1:]\n"
    "GatewayClient(url, adapters_dir=adapters).swap(agent, int(version))\n"
)


def test_an_operator_that_is_killed_during_a_swap_changes_nothing_by_halves(
    versions: Versions,
) -> None:
    draw = random.Random(3)
    with served(versions) as server:
        for number in range(KILLS):
            command = [sys.executable, "-c", SWAP, server.url, str(server.adapters), AGENTS[1]]
            with subprocess.Popen([*command, str(1 + number % 2)]) as swap:
                time.sleep(draw.uniform(0.2, 0.8))
                swap.kill()
            check_consistent(server, versions)
        assert swap_quietly(server, AGENTS[1], 2) is not None
        check_consistent(server, versions)
