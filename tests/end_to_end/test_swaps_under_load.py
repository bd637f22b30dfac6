"""Swaps while many clients ask: no failed request, and every reply from exactly one version.

Every third version is prepared some replies before its swap, which then neither loads nor probes.
``MARFT_SWAPS`` and ``MARFT_CLIENTS`` set how many; the suite itself runs a few of each.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from marft_agents.registry import Change
from marft_agents.serving import GatewayClient, ServerProcess
from tests.end_to_end.swaps import SAME, Answer, Clients, Versions, family, resident_bytes

AGENTS = ("planner", "writer", "critic")
SWAPS = int(os.environ.get("MARFT_SWAPS", "6"))
CLIENTS = int(os.environ.get("MARFT_CLIENTS", "8"))
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None and not os.environ.get("CI"),
    reason="vLLM has no build for this machine; the same is shown on the local engine",
)


def is_prepared(number: int) -> bool:
    """Every third, of each agent in turn."""
    return (number + number // len(AGENTS)) % 3 == 1


async def swap_under_load(
    clients: Clients, server: ServerProcess, swaps: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What each swap answered, and the server's state after each."""
    done: list[dict[str, Any]] = []
    states: list[dict[str, Any]] = []
    asking = asyncio.create_task(clients.run())

    async def some_answers() -> None:
        answered = len(clients.answers)
        while len(clients.answers) < answered + 2 * CLIENTS and not asking.done():
            await asyncio.sleep(0.01)

    with GatewayClient(server.url, adapters_dir=server.adapters) as operator:
        for number in range(swaps):
            await some_answers()
            agent, version = AGENTS[number % len(AGENTS)], 2 + number // len(AGENTS)
            ended, clients.ended = clients.ended, []
            await asyncio.to_thread(operator.release, ended)
            if is_prepared(number):
                await asyncio.to_thread(operator.prepare, agent, version)
                await some_answers()
            change = Change(evidence={"reason": "under load"})
            done.append(await asyncio.to_thread(operator.swap, agent, version, change))
            states.append(await asyncio.to_thread(operator.state))
            states[-1]["bytes"] = resident_bytes(family(os.getpid())) - resident_bytes(
                [os.getpid()]
            )
        clients.stop()
        await asking
    return done, states


def memory_of_the_server() -> int:
    return resident_bytes(family(os.getpid()))


def check_replies(versions: Versions, answers: list[Answer]) -> None:
    """No reply failed, and each is of the version that its header names and of no other."""
    assert [a for a in answers if a.status != 200 or a.problem] == []
    versions.check(answers)


def check_episodes(answers: list[Answer]) -> None:
    """An episode kept each agent's version."""
    seen: dict[tuple[str, str], set[int]] = defaultdict(set)
    for answer in answers:
        if answer.episode is not None and answer.version is not None:
            seen[answer.episode, answer.agent].add(answer.version[1])
    assert seen and [k for k, v in seen.items() if len(v) > 1] == []


@pytest.mark.parametrize(
    "engine", ["local", pytest.param("vllm", marks=[pytest.mark.engine, needs_vllm])]
)
def test_swaps_under_load_fail_nothing_and_mix_nothing(tmp_path: Path, engine: str) -> None:
    versions = Versions(tmp_path, AGENTS, each=2 + (SWAPS - 1) // len(AGENTS))
    extra = ["--engine", engine, "--max-lora-rank", "8", "--max-model-len", "512"]
    extra += ["--lease-timeout", "60"]
    adapters = versions.registry.root
    with ServerProcess(adapters, model=versions.model, extra=extra) as server:
        clients = Clients(server.url, AGENTS, CLIENTS, max_tokens=16)
        done, states = asyncio.run(swap_under_load(clients, server, SWAPS))
    probes = [swap["probe"] for swap in done]
    assert all(p["against"] == "trainer" and p["error"] < SAME < p["effect"] for p in probes)
    assert [(s["agent"], s["to"]) for s in done] == [
        (AGENTS[i % len(AGENTS)], 2 + i // len(AGENTS)) for i in range(SWAPS)
    ]
    assert [s["prepared"] for s in done] == [is_prepared(i) for i in range(SWAPS)]
    assert all(("probe" in s["seconds"]) is not s["prepared"] for s in done)
    assert {a.version[1] for a in clients.answers if a.version} >= {1, 2}
    assert {a.streamed for a in clients.answers} == {True, False}
    check_replies(versions, clients.answers)
    check_episodes(clients.answers)
    most = max(sum(len(a["served"]) for a in state["agents"].values()) for state in states)
    assert most <= 4 * len(AGENTS), "versions pile up"
    if SWAPS >= 100:  # fewer say nothing about growth
        third, end = states[SWAPS // 3]["bytes"], states[-1]["bytes"]
        print(f"{SWAPS} swaps, {CLIENTS} clients, {len(clients.answers)} replies;", end=" ")
        print(f"at most {most} versions loaded; {third / 2**20:.0f} MiB after a third,", end=" ")
        print(f"{end / 2**20:.0f} MiB at the end; largest probe error", end=" ")
        print(f"{max(p['error'] for p in probes):.1e}, smallest effect", end=" ")
        print(f"{min(p['effect'] for p in probes):.2f}")
        assert end < 1.05 * third + 32 * 2**20
