"""Engine, gateway, operator, trainer killed in the middle of swaps: the old or the new version.

Whatever dies and whenever: every reply is of exactly one published version, ``CURRENT`` names a
complete one, the server comes back by itself or with its next start, and a repeated swap works.
``MARFT_KILLS`` sets how many of each, ``MARFT_SEED`` when they come, ``MARFT_KILLS_ENGINE`` (local
or vllm) what the engine is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from examples.support_triage.tasks import training_tickets
from marft_agents.cli import cli
from marft_agents.errors import MarftError
from marft_agents.serving import GatewayClient, ServerProcess
from marft_agents.serving.commands import find_vllm, vllm_command
from marft_agents.serving.process import EngineProcess, free_port
from tests.end_to_end.loop import record
from tests.end_to_end.online_app import AGENTS as TEAM
from tests.end_to_end.swaps import TARGETS, Answer, Clients, Versions, processes
from tests.end_to_end.test_local_engine import short_answers
from tests.end_to_end.trainers import Run, Trainers

AGENTS = ("planner", "writer")
KILLS = int(os.environ.get("MARFT_KILLS", "3"))
A_SERVER = 3
"""Engine kills in a row: an engine that dies again and again is started ever more patiently."""
ENGINE = os.environ.get("MARFT_KILLS_ENGINE", "local")
MODULE = {"local": "marft_agents.serving.local", "vllm": "vllm.entrypoints.openai.api_server"}[
    ENGINE
]
STARTS_WITHIN_S = {"local": 60.0, "vllm": 240.0}[ENGINE]
SEED = 10 * int(os.environ.get("MARFT_SEED", "0"))
EXTRA = ["--engine", ENGINE, "--max-lora-rank", "8", "--max-model-len", "512"]


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
    deadline = time.monotonic() + STARTS_WITHIN_S
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


def served_versions(server: ServerProcess) -> dict[str, int]:
    with GatewayClient(server.url, adapters_dir=server.adapters) as operator:
        return {agent: told["current"] for agent, told in operator.state()["agents"].items()}


def in_use(versions: Versions) -> dict[str, int | None]:
    return {agent: versions.registry.current(agent) for agent in versions.agents}


def check_consistent(server: ServerProcess, versions: Versions, *, alike: float = 0.0) -> None:
    """The server, ``CURRENT`` and what answers agree, when a swap under way has ended."""
    while True:
        wait_until(lambda: served_versions(server) == in_use(versions), "one version in use", 10)
        now = in_use(versions)
        replies = {agent: probed(server, agent) for agent in versions.agents}
        if now == in_use(versions):  # else a swap that was under way has moved it meanwhile
            break
    for agent, reply in replies.items():
        current = now[agent] or 0
        assert current in versions.registry.versions(agent)
        assert reply.headers["x-marft-adapter"] == f"{agent}@v{current}"
        answer = Answer(agent, None, streamed=False, status=200, version=(agent, current))
        answer.read(reply.json())
        versions.check([answer], alike=alike)


def probed(server: ServerProcess, agent: str) -> httpx.Response:
    body = {"model": agent, "messages": [{"role": "user", "content": "ship on friday?"}]}
    body |= {"max_tokens": 8, "logprobs": True, "return_token_ids": True, "temperature": 1.0}
    return ask_again_while_told_to(f"{server.base_url}/chat/completions", body).raise_for_status()


@contextlib.contextmanager
def served(versions: Versions, extra: Sequence[str] = EXTRA) -> Generator[ServerProcess]:
    with ServerProcess(versions.registry.root, model=versions.model, extra=extra) as server:
        yield server


@contextlib.contextmanager
def engine_for_many_servers(versions: Versions, log: Path) -> Generator[Sequence[str]]:
    """What ``serve`` is told; vLLM takes long to start, so it is started once and outlives it."""
    if ENGINE == "local":
        yield EXTRA
        return
    port = free_port()
    command = vllm_command(
        versions.model, port=port, install=find_vllm(), max_lora_rank=8, max_model_len=512,
        max_loras=2 * len(AGENTS) + 1, target_modules=TARGETS,
    )  # fmt: skip
    with EngineProcess(command, port=port, log=log, name="vLLM") as engine:
        engine.wait_ready(STARTS_WITHIN_S)
        yield ["--server", engine.url]


def test_an_engine_that_is_killed_during_a_swap_comes_back_with_what_is_in_use(
    versions: Versions,
) -> None:
    draw = random.Random(1 + SEED)

    async def play(server: ServerProcess, numbers: range) -> Clients:
        clients = Clients(server.url, AGENTS, 4, max_tokens=8)
        asking = asyncio.create_task(clients.run())
        for number in numbers:
            target = 1 + (number + 1) % 2
            swap = asyncio.to_thread(swap_quietly, server, AGENTS[number % 2], target)
            swapping = asyncio.create_task(swap)
            await asyncio.sleep(draw.uniform(0, 0.3))
            kill(MODULE, versions)
            await swapping
            ready = partial(answers, server.url)
            await asyncio.to_thread(wait_until, ready, "ready again", STARTS_WITHIN_S)
            await asyncio.to_thread(check_consistent, server, versions)
        clients.stop()
        await asking
        return clients

    for first in range(0, KILLS, A_SERVER):
        numbers = range(first, min(first + A_SERVER, KILLS))
        with served(versions) as server:
            clients = asyncio.run(play(server, numbers))
        good = [a for a in clients.answers if a.status == 200 and a.problem is None and a.tokens]
        assert len(good) > 4 * len(numbers)
        allowed = {0, 200, 503}
        assert {a.status for a in clients.answers} <= allowed, "only the engine's absence"
        versions.check(good)


def test_a_gateway_that_is_killed_during_a_swap_leaves_no_engine_and_a_whole_registry(
    versions: Versions, tmp_path: Path
) -> None:
    draw = random.Random(2 + SEED)
    with engine_for_many_servers(versions, tmp_path / "engine.log") as extra:
        others = processes(str(versions.model)).keys()

        def gone() -> bool:
            return processes(str(versions.model)).keys() <= others

        for number in range(KILLS):
            with served(versions, extra) as server:
                check_consistent(server, versions)
                target = 1 + (number + 1) % 2
                command = [sys.executable, "-c", SWAP, server.url, str(server.adapters), AGENTS[0]]
                with subprocess.Popen([*command, str(target)], stderr=subprocess.DEVNULL) as swap:
                    time.sleep(draw.uniform(0.2, 0.8))
                    kill("marft_agents", versions)
                    swap.wait(60)
            wait_until(gone, "its engine is gone, too")
            for agent in AGENTS:
                assert versions.registry.current(agent) in versions.registry.versions(agent)
        with served(versions, extra) as server:
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
    draw = random.Random(3 + SEED)
    with served(versions) as server:
        for number in range(KILLS):
            command = [sys.executable, "-c", SWAP, server.url, str(server.adapters), AGENTS[1]]
            with subprocess.Popen([*command, str(1 + number % 2)]) as swap:
                time.sleep(draw.uniform(0.2, 0.8))
                swap.kill()
            check_consistent(server, versions)
        assert swap_quietly(server, AGENTS[1], 2) is not None
        check_consistent(server, versions)


def check_registry(versions: Versions) -> None:
    """What is listed is whole; what a trainer left unfinished is not listed."""
    root = str(versions.registry.root)
    verified = CliRunner().invoke(cli, ["adapters", "verify", "--adapters", root])
    assert verified.output.startswith("no findings "), verified.output
    listed = CliRunner().invoke(cli, ["adapters", "list", root])
    assert listed.exit_code == 0 and ".staging" not in listed.output, listed.output
    assert versions.registry.agents() == sorted(versions.agents)
    for agent in versions.agents:
        numbers = versions.registry.versions(agent)
        assert numbers == list(range(1, len(numbers) + 1))
        told = [e["to"] for e in versions.registry.audit(agent) if e["action"] == "publish"]
        assert told in (numbers, numbers[:-1]), "the next change makes up for a line"


def leftovers(versions: Versions) -> list[Path]:
    return [p for a in versions.agents for p in (versions.registry.root / a).glob(".staging-*")]


class Killing:
    """Trainers that are killed while clients ask, and what holds after each."""

    def __init__(self, versions: Versions, server: ServerProcess, trainers: Trainers) -> None:
        self.versions, self.server, self.trainers = versions, server, trainers
        self.draw = random.Random(4 + SEED)
        self.killed: list[str] = []

    async def kill(self, arguments: list[str], count: int) -> None:
        """A whole run, then so many that are killed while they publish and swap."""
        whole = await self.whole(arguments)
        while count > 0:
            before = dict(self._current())
            places = whole.publishing()
            number, after_s = self.draw.choice(places), self.draw.choice((0.0, 0.01))
            if count % 2:  # publishing has most places, swapping takes most of the time
                number, after_s = whole.after(self.draw.random())
            run = await asyncio.to_thread(self.trainers.run, arguments, number, after_s)
            assert run.code in (0, -9), run.said
            if run.code == -9:
                count -= 1
                self.killed.append(run.places[-1][1])
            await asyncio.to_thread(self.check)
            assert all(now >= before[agent] for agent, now in self._current().items())

    async def whole(self, arguments: list[str]) -> Run:
        """A run that nobody disturbs works, whatever was killed before, and clears up."""
        for left in leftovers(self.versions):
            os.utime(left, (0, 0))  # as if it were old
        before = {a: self.versions.registry.versions(a)[-1] for a in self.versions.agents}
        run = await asyncio.to_thread(self.trainers.run, arguments)
        assert run.code == 0, run.said
        assert leftovers(self.versions) == []
        assert all(now > before[agent] for agent, now in self._current().items())
        await asyncio.to_thread(self.check)
        return run

    def check(self) -> None:
        check_consistent(self.server, self.versions, alike=1.0)
        check_registry(self.versions)

    def _current(self) -> dict[str, int]:
        registry = self.versions.registry
        return {agent: registry.current(agent) or 0 for agent in self.versions.agents}


def test_a_trainer_that_is_killed_while_it_publishes_and_swaps_leaves_nothing_half_visible(
    tmp_path: Path,
) -> None:
    versions = Versions(tmp_path, TEAM, each=1)
    logs, tasks, tickets = tmp_path / "logs", tmp_path / "tasks.jsonl", training_tickets(6)
    tasks.write_text("".join(json.dumps({"task": ticket.message}) + "\n" for ticket in tickets))
    with served(versions, [*EXTRA, "--lease-timeout", "10"]) as server:
        record(server.base_url, logs, tickets, score=short_answers, temperature=1.0)
        common = [str(logs), "--model", str(versions.model), "--server", server.url]
        common += ["--output", str(versions.registry.root), "--epochs", "1"]
        offline = [*common, "--learning-rate", "1e-2"]
        online = [*common, "--offline", "none", "--online", "tests.end_to_end.online_app:run"]
        online += ["--tasks", str(tasks), "--iterations", "2"]
        online += ["--set", "episodes_per_iteration=4", "--set", "online_learning_rate=1e-2"]
        env = {"APP_SERVER": server.url}

        async def play(killing: Killing) -> Clients:
            clients = Clients(server.url, TEAM, 2, max_tokens=8)
            asking = asyncio.create_task(clients.run())
            await killing.kill(offline, KILLS // 2)
            await killing.kill(online, KILLS - KILLS // 2)
            await killing.whole(offline)
            clients.stop()
            await asking
            return clients

        with Trainers(versions.registry.root, tmp_path / "scratch", env) as trainers:
            killing = Killing(versions, server, trainers)
            clients = asyncio.run(play(killing))
    assert len(killing.killed) == KILLS
    assert [a for a in clients.answers if a.status != 200 or a.problem] == []
    versions.check(clients.answers, alike=0.5)
    print(f"{KILLS} kills, last before: {Counter(p.split()[0] for p in killing.killed)}")
