"""The benchmarks of the gateway: everything takes its turn, and what is lost is said."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.gateway import report as gateway_report
from benchmarks.gateway.load import Plan, load, quantile
from benchmarks.gateway.run import QUICK, TARGETS, measure, schedule
from benchmarks.gateway.stage import AGENTS, Engine, Target, make_registry, ours, scripted_engine
from benchmarks.swap import report as swap_report
from benchmarks.swap.run import Stage, longest
from benchmarks.swap.run import measure as measure_swap
from benchmarks.swap.run import schedule as schedule_swaps
from tests.registry.bases import make_base


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[Engine, Stage]]:
    """The scripted engine and ``marft-agents serve`` in front of it."""
    folder = tmp_path_factory.mktemp("gateway")
    model = make_base(folder / "model")
    registry = make_registry(folder, model, versions=5)
    with scripted_engine(folder) as engine, ours(folder, model, engine.url) as target:
        yield engine, Stage(engine.url, target, registry, registry.versions(AGENTS[0])[1:])


@pytest.mark.parametrize("stream", [False, True])
def test_engine_and_gateway_are_measured_alike(stream: bool, running: tuple[Engine, Stage]) -> None:
    engine, stage = running
    direct = Target("direct", engine.url, tuple(f"{a}@v1" for a in AGENTS[1:]), None)
    through = Target("ours", stage.target.url, AGENTS[1:], stage.target.server)
    records = [measure(Plan(t.url, t.models, 4, 0.2, stream), engine, t) for t in (direct, through)]
    for record in records:
        assert record["requests"] > 0 and record["failed"] == 0
        assert 0 < record["first_p50_ms"] <= record["p50_ms"] <= record["p99_ms"]
        assert record["events"] == (65 if stream else 0)
    assert records[0]["server_cpu_s"] == 0
    assert records[1]["p50_ms"] > records[0]["p50_ms"]


@pytest.mark.parametrize("stream", [False, True])
async def test_replies_that_are_no_success_are_counted_as_failed(
    stream: bool, running: tuple[Engine, Stage]
) -> None:
    engine, _ = running
    record = await load(Plan(engine.url, ["nobody"], 2, 0.05, stream))
    assert record["requests"] == 0 and record["failed"] > 0 and "p50_ms" not in record


@pytest.mark.parametrize("clients", [0, 2])
@pytest.mark.parametrize("target", TARGETS[:2])
def test_a_swap_is_measured(target: str, clients: int, running: tuple[Engine, Stage]) -> None:
    engine, stage = running
    httpx.post(f"{engine.url}/pace", json={"ms": 5}).raise_for_status()
    record = measure_swap(stage, target, clients)
    httpx.post(f"{engine.url}/pace", json={"ms": 0}).raise_for_status()
    assert 0 < record["total_s"] < 10 and record["call_s"] > 0
    if clients:
        assert record["stall_s"] >= 0.004 and record["quiet_stall_s"] >= 0.004


def test_the_longest_wait_is_one_that_touches_the_time() -> None:
    notes = [(1.0, 0.9), (2.0, 0.5), (3.5, 0.7), (9.0, 4.0)]
    assert longest(notes, 1.5, 3.0) == 0.7
    assert longest(notes, 0.0, 0.05) == 0.0
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0


def test_targets_take_turns() -> None:
    jobs = schedule(QUICK["scripted"], 3)
    assert len(set(jobs)) == len(jobs) == 3 * 3 * 2 * 3
    assert {target for _, _, _, target in jobs[:: len(jobs) // 3]} == set(TARGETS)
    swaps = schedule_swaps(2)
    assert len(set(swaps)) == 8 and swaps[0][2] != swaps[4][2]


def run(target: str, repeat: int, per_s: float, p50: float) -> dict[str, Any]:
    record: dict[str, Any] = {
        "engine": "scripted", "kind": "whole", "clients": 16, "target": target, "repeat": repeat,
        "per_s": per_s, "p50_ms": p50, "p99_ms": 2 * p50, "first_p50_ms": p50, "requests": 100,
        "failed": 0, "server_cpu_s": 0.1, "client_cpu_s": 0.2, "elapsed_s": 1.0,
        "servers": {"litellm": "1"}, "machine": {"cores": 2}, "load": 3.0,
    }  # fmt: skip
    return record


def test_what_is_missed_is_said() -> None:
    records = [
        *(run("direct", n, 100.0, 1.0) for n in (0, 1)),
        run("marft-agents", 0, 90.0, 1.5),
        run("marft-agents", 1, 80.0, 2.5),
        *(run("litellm", n, 95.0, 4.0) for n in (0, 1)),
    ]
    text = "\n".join(gateway_report.chapter(records))
    assert "| marft-agents serve | 85.0 | 85.0% (80.0% to 90.0%) | 2.00 | +1.00" in text
    assert "Below 97% of the engine's requests a second: whole with 16." in text
    assert "More than 2 ms added at the median: nowhere." in text
    assert "Fewer requests a second than LiteLLM's proxy: whole with 16." in text


def test_a_swap_that_takes_too_long_is_said() -> None:
    def swap(target: str, repeat: int, seconds: float) -> dict[str, Any]:
        found = {"engine": "vllm", "target": target, "clients": 0, "repeat": repeat}
        return found | {"call_s": seconds / 2, "total_s": seconds, "load": 3.0}

    records = [swap("direct", n, 0.1 * (1 + n)) for n in (0, 1)]
    records += [swap("marft-agents", 0, 0.12), swap("marft-agents", 1, 0.4)]
    text = "\n".join(swap_report.chapter(records))
    assert "| 0 | marft-agents serve | 260 (120 to 400) | 1.60 (1.20 to 2.00) |" in text
    assert "More than 1.3 times the engine's own time: beside 0 streams (1.60)." in text


def test_every_agent_has_an_adapter(tmp_path: Path) -> None:
    registry = make_registry(tmp_path, make_base(tmp_path / "model"), versions=2)
    assert registry.agents() == sorted(AGENTS)
    assert [registry.current(agent) for agent in AGENTS] == [1, 1, 1]
    assert registry.versions(AGENTS[0]) == [1, 2]
