"""The benchmarks of the gateway: everything takes its turn, and what is lost is said."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.gateway import report as gateway_report
from benchmarks.gateway.load import Plan, load, quantile
from benchmarks.gateway.run import SCALES, TARGETS, clients, measure, schedule
from benchmarks.gateway.stage import AGENTS, Engine, Target, make_registry, ours, scripted_engine
from benchmarks.stats import median, median_interval
from benchmarks.swap import report as swap_report
from benchmarks.swap.run import TARGETS as SWAP_TARGETS
from benchmarks.swap.run import Stage, longest
from benchmarks.swap.run import measure as measure_swap
from benchmarks.swap.run import schedule as schedule_swaps
from tests.registry.bases import make_base


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[Engine, Stage]]:
    """The scripted engine and ``marft-agents serve`` in front of it."""
    folder = tmp_path_factory.mktemp("gateway")
    model = make_base(folder / "model")
    registry = make_registry(folder, model, versions=7)
    with scripted_engine(folder) as engine, ours(folder, model, engine.url) as target:
        yield engine, Stage(engine.url, target, registry, registry.versions(AGENTS[0])[1:])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"requests": 12}, {"rate": 30.0}])
def test_engine_and_gateway_are_measured_alike(
    stream: bool, more: dict[str, Any], running: tuple[Engine, Stage]
) -> None:
    engine, stage = running
    found = _both(engine, stage)
    plans = {n: Plan(t.url, t.models, 4, 0.2, stream, **more) for n, t in found.items()}
    with clients() as asking:
        records = measure(found, plans, asking)
    for record in records.values():
        assert record["requests"] > 0 and record["failed"] == 0
        assert 0 < record["first_p50_ms"] <= record["p50_ms"] <= record["p99_ms"]
        assert record["events"] == (65 if stream else 0)
        if more:
            assert record["requests"] == (12 if "requests" in more else 6)
    assert records["direct"]["server_cpu_s"] == 0 < records["marft-agents"]["server_cpu_s"]
    assert records["marft-agents"]["p50_ms"] > records["direct"]["p50_ms"]


def _both(engine: Engine, stage: Stage) -> dict[str, Target]:
    direct = Target("direct", engine.url, tuple(f"{a}@v1" for a in AGENTS[1:]), None)
    through = Target("marft-agents", stage.target.url, AGENTS[1:], stage.target.server)
    return {"direct": direct, "marft-agents": through}


def test_one_client_asks_in_turn(running: tuple[Engine, Stage]) -> None:
    found = _both(*running)
    plans = {name: Plan(t.url, t.models, 1, 0.2, True) for name, t in found.items()}
    with clients() as asking:
        records = measure(found, plans, asking, turns=True)
    ours = records["marft-agents"]
    assert len(ours["ms"]) == len(ours["direct"]["ms"]) > 1 and ours["failed"] == 0
    assert records["direct"]["ms"] == ours["direct"]["ms"]
    record = {"engine": "scripted", "kind": "streamed", "clients": 1, "rate": 0, "round": 0}
    (row, mine) = gateway_report.rows_of([record | {"targets": records}])
    assert set(row.added) == {0.0} and median(mine.added) > 0 and median(mine.share) < 1


def test_streams_with_a_delay_keep_a_time_of_their_own(running: tuple[Engine, Stage]) -> None:
    engine, stage = running
    found = _both(engine, stage)
    httpx.post(f"{engine.url}/pace", json={"ms": 1, "delay_ms": 30}).raise_for_status()
    plans = {name: Plan(t.url, t.models, 4, 0, True, requests=4) for name, t in found.items()}
    with clients() as asking:
        records = measure(found, plans, asking)
    httpx.post(f"{engine.url}/pace", json={"ms": 0}).raise_for_status()
    for record in records.values():
        assert record["first_p50_ms"] >= 30 and record["p50_ms"] >= 30 + 62


@pytest.mark.parametrize("stream", [False, True])
async def test_replies_that_are_no_success_are_counted_as_failed(
    stream: bool, running: tuple[Engine, Stage]
) -> None:
    engine, _ = running
    record = await load(Plan(engine.url, ["nobody"], 2, 0.05, stream))
    assert record["requests"] == 0 and record["failed"] > 0 and "p50_ms" not in record


@pytest.mark.parametrize("clients", [0, 2])
@pytest.mark.parametrize("target", SWAP_TARGETS)
def test_a_swap_is_measured(target: str, clients: int, running: tuple[Engine, Stage]) -> None:
    engine, stage = running
    httpx.post(f"{engine.url}/pace", json={"ms": 5}).raise_for_status()
    record = measure_swap(stage, target, clients)
    httpx.post(f"{engine.url}/pace", json={"ms": 0}).raise_for_status()
    assert 0 < record["total_s"] < 10 and record["call_s"] > 0
    prepared = target == swap_report.PREPARED
    assert ("prepared_s" in record, "list" in record.get("steps", {})) == (
        prepared,
        target != "direct",
    )
    assert ("probe" in record.get("steps", {})) == (target == swap_report.OURS)
    if clients:
        assert record["stall_s"] >= 0.004 and record["quiet_stall_s"] >= 0.004


def test_the_longest_wait_is_one_that_touches_the_time() -> None:
    notes = [(1.0, 0.9), (2.0, 0.5), (3.5, 0.7), (9.0, 4.0)]
    assert longest(notes, 1.5, 3.0) == 0.7
    assert longest(notes, 0.0, 0.05) == 0.0
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0


def test_every_round_comes_by_every_setting_in_another_order() -> None:
    jobs = schedule(SCALES["vllm"])
    blocks = [job for job in jobs if job[1].clients == 64]
    assert len(blocks) == 2 * SCALES["vllm"].rounds
    assert {order[:1] for _, _, order in blocks} >= {("direct",), ("marft-agents",)}
    assert sum(TARGETS[2] in order for _, _, order in blocks) == 4
    assert len([job for job in jobs if job[1].clients == 1]) == 2  # turns: many pairs in one round
    swaps = schedule_swaps(2)
    assert len(set(swaps)) == 12 and swaps[0][2] != swaps[6][2]


def block(per_s: float, p50: float, **more: Any) -> dict[str, Any]:
    record: dict[str, Any] = {
        "per_s": per_s, "p50_ms": p50, "p99_ms": 2 * p50, "first_p50_ms": p50, "requests": 100,
        "failed": 0, "server_cpu_s": 0.1, "client_cpu_s": 0.2, "elapsed_s": 1.0,
    }  # fmt: skip
    return record | more


def test_what_is_missed_is_said() -> None:
    rounds = [
        {"direct": block(100, 1.0), "marft-agents": block(90, 1.5), "litellm": block(95, 4.0)},
        {"direct": block(200, 1.0), "marft-agents": block(160, 2.5, client_cpu_s=0.9)},
    ]
    setting = {"engine": "scripted", "kind": "whole", "clients": 16, "rate": 0}
    setting |= {"servers": {"litellm": "1"}, "machine": {"cores": 2}, "load": 3.0}
    setting |= {"messages": 10, "max_tokens": 64}
    records = [setting | {"round": n, "targets": found} for n, found in enumerate(rounds)]
    text = "\n".join(gateway_report.chapter(records))
    assert "| marft-agents serve | 125.0 | 85.0% (80.0% to 90.0%) | 2.00 | +1.00" in text
    assert "bottleneck: whole by 16 clients. Below 97% of the engine's requests a second:" in text
    assert "a second: whole by 16 clients. More than 2 ms added at the median: nowhere." in text
    assert "Fewer requests a second than LiteLLM's proxy: nowhere." in text
    assert "All 2 pairs of blocks of many clients together: 84.9% of the engine's" in text


@pytest.mark.parametrize(
    ("n", "low", "high"), [(1, 0, 0), (5, 0, 4), (6, 0, 5), (8, 0, 7), (9, 1, 7), (20, 5, 14)]
)
def test_a_medians_interval_is_that_of_the_sign_test(n: int, low: int, high: int) -> None:
    assert median_interval([float(i) for i in range(n)][::-1]) == (low, high)


def test_a_swap_that_takes_too_long_is_said() -> None:
    def swap(target: str, repeat: int, seconds: float) -> dict[str, Any]:
        found = {"engine": "vllm", "target": target, "clients": 0, "repeat": repeat}
        return found | {"call_s": seconds / 2, "total_s": seconds, "load": 3.0}

    records = [swap("direct", n, 0.1 * (1 + n)) for n in (0, 1)]
    records += [swap("marft-agents", 0, 0.12), swap("marft-agents", 1, 0.4)]
    text = "\n".join(swap_report.chapter(records))
    assert "| 0 | marft-agents serve | 260 (120 to 400) | 1.60 (1.20 to 2.00) |" in text
    assert "More than 1.3 times the engine's own time: beside 0 streams (1.60)." in text


def test_a_swap_that_was_prepared_is_told_apart_and_so_is_what_preparing_took() -> None:
    def swap(target: str, repeat: int, seconds: float, **more: Any) -> dict[str, Any]:
        found = {"engine": "vllm", "target": target, "clients": 0, "repeat": repeat, "rank": 32}
        return found | {"call_s": seconds / 2, "total_s": seconds, "load": 3.0} | more

    records = [swap("direct", n, 0.1) for n in (0, 1)]
    cold = {"check": 0.001, "load": 0.02, "probe": 0.05, "record": 0.002}
    records += [swap("marft-agents", n, 0.2, steps=cold) for n in (0, 1)]
    warm = {"check": 0.001, "list": 0.002, "record": 0.002}
    records += [
        swap(swap_report.PREPARED, n, 0.11, steps=warm, prepared_s=0.08 + 0.02 * n) for n in (0, 1)
    ]
    text = "\n".join(swap_report.chapter(records))
    assert "2 layers, adapters of rank 32" in text
    assert "| 0 | marft-agents serve | 200 (200 to 200) | 2.00 (2.00 to 2.00) |" in text
    assert "| 0 | marft-agents serve, prepared | 110 (110 to 110) | 1.10 (1.10 to 1.10) |" in text
    assert "Preparing took 90 (80 to 100) before that." in text
    assert "own time: beside 0 streams (2.00); prepared: nowhere. 3 to 3" in text
    plain = "\n".join(swap_report.chapter(records[:4]))
    assert "prepared" not in plain and "Of a swap that" not in plain


def test_every_agent_has_an_adapter(tmp_path: Path) -> None:
    registry = make_registry(tmp_path, make_base(tmp_path / "model"), versions=2)
    assert registry.agents() == sorted(AGENTS)
    assert [registry.current(agent) for agent in AGENTS] == [1, 1, 1]
    assert registry.versions(AGENTS[0]) == [1, 2]
