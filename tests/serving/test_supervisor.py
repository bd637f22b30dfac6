"""An engine that ends, hangs or answers errors is started again, with patience."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from marft_agents.errors import EngineError
from marft_agents.serving.client import EngineClient
from marft_agents.serving.commands import EngineCommand
from marft_agents.serving.fleet import Fleet
from marft_agents.serving.keeper import Keeper
from marft_agents.serving.restartable import RestartableEngine
from marft_agents.serving.supervisor import Pace, Supervisor
from marft_agents.serving.swap import Swapper
from marft_agents.serving.threads import in_thread
from marft_agents.serving.upstream import Upstream
from tests.serving.fake_engine import FakeEngine
from tests.serving.stage import LOOK_OFTEN, House, current_aliases, loaded_replica

PACE = replace(LOOK_OFTEN, ask_s=0.2, patience_s=0.3)


class ThreadEngine(RestartableEngine):
    """An engine whose runs are scripted ones in this process."""

    def __init__(self, log: Path) -> None:
        super().__init__("the engine", log, lambda port: EngineCommand(("none", str(port))))
        self.runs: list[FakeEngine] = []
        self.failing = 0
        self.ended: str | None = None

    @property
    def now(self) -> FakeEngine:
        return self.runs[-1]

    def start(self) -> str:
        if self.failing:
            self.failing -= 1
            self.ended = "the engine did not start"
            raise EngineError("the engine ended with code 3: OutOfMemoryError: no memory left")
        self.ended = None
        self.runs.append(FakeEngine().start())
        return self.now.url

    def death(self) -> str | None:
        return self.ended

    def detail(self) -> str:
        return "OutOfMemoryError: no memory left"

    def stop(self) -> None:
        if self.runs and self.ended is None:
            self.end("it was stopped")

    def end(self, why: str) -> None:
        self.now.stop()
        self.ended = why


@dataclass
class Watched:
    engine: ThreadEngine
    fleet: Fleet
    said: list[str]
    supervisor: Supervisor

    async def wait_ready(self, restarts: int) -> None:
        """Until it takes requests, and the operator was told so (which is a moment later)."""
        async with asyncio.timeout(10):
            while True:
                status = self.fleet.status()[0]
                told = not restarts or self.said[-1:] == ["engine-0 takes requests"]
                if (status.state, status.restarts) == ("ready", restarts) and told:
                    return
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def watched(house: House, pace: Pace = PACE) -> AsyncGenerator[Watched]:
    engine = ThreadEngine(house.root / ".engine-0.log")
    url = engine.start()
    said: list[str] = []
    with EngineClient(url, timeout_s=2, load_timeout_s=2) as client:
        upstream = Upstream(url, death=engine.death)
        made = await in_thread(loaded_replica, house, "engine-0", client, upstream, None)
        fleet = Fleet([made])
        swapper = Swapper(fleet, current_aliases(house))
        supervisor = Supervisor(fleet, swapper.keeper, {"engine-0": engine}, said.append, pace)
        try:
            async with supervisor.running():
                yield Watched(engine, fleet, said, supervisor)
        finally:
            await in_thread(engine.stop)
            await fleet.close()


async def test_an_engine_that_ended_is_started_again_with_its_adapters(house: House) -> None:
    async with watched(house) as it:
        it.engine.end("the engine ended with code -9")
        await it.wait_ready(restarts=1)
        assert set(it.engine.now.adapters) == {"router@v1", "writer@v1"}
        assert it.fleet.replicas[0].upstream.url == it.engine.now.url
        told = "engine-0 takes no requests: the engine ended with code -9 (OutOfMemoryError"
        assert it.said[0].startswith(told)
        assert "engine-0.log.1" in it.said[1] and it.said[-1] == "engine-0 takes requests"


@pytest.mark.parametrize(
    ("step", "kind"),
    [("health", kind) for kind in ("refuse", "reset", "hang")]
    + [("list", kind) for kind in ("refuse", "garbage", "reset", "hang")],
)
async def test_an_engine_that_runs_but_is_unwell_is_started_again(
    house: House, step: str, kind: str
) -> None:
    async with watched(house) as it:
        it.engine.now.faults.at[step] = kind
        await it.wait_ready(restarts=1)
        assert len(it.engine.runs) == 2


async def test_a_short_indisposition_is_no_reason_to_start_again(house: House) -> None:
    async with watched(house, replace(PACE, again_s=0.1)) as it:
        it.engine.now.faults.at["health"] = "refuse"
        async with asyncio.timeout(5):
            while it.fleet.status()[0].state != "down":
                await asyncio.sleep(0.005)
        it.engine.now.faults.at.clear()
        await it.wait_ready(restarts=0)
        assert len(it.engine.runs) == 1


async def test_a_list_from_before_a_swap_is_no_loss(house: House) -> None:
    async with watched(house, replace(PACE, poll_s=3600.0)) as it:
        keeper = Keeper(current_aliases(house), asyncio.Lock())
        replica = it.fleet.replicas[0]
        assert not await keeper.has_lost(replica, {("router", 9)})
        it.engine.now.restart_empty()
        assert not await keeper.has_lost(replica, {("router", 1), ("writer", 1)})
        assert await keeper.has_lost(replica, {("router", 9)})


async def test_it_is_tried_for_ever_and_ever_more_patiently(house: House) -> None:
    async with watched(house) as it:
        it.engine.failing = 5
        it.engine.end("the engine ended with code 3")
        await it.wait_ready(restarts=6)
        told = [line.split("again in ")[1] for line in it.said if "again in" in line]
        waits = [line.split(" s")[0] for line in told]
        assert waits == ["0.02", "0.04", "0.08", "0.1", "0.1", "0.1"]
        assert sum("OutOfMemoryError" in line for line in it.said) == 6


async def test_an_engine_that_was_well_for_long_begins_with_the_shortest_wait(
    house: House,
) -> None:
    async with watched(house, replace(PACE, well_after_s=0.0)) as it:
        for number in range(3):
            it.engine.end("the engine ended with code 3")
            await it.wait_ready(restarts=number + 1)
        assert sum("again in 0.02 s" in line for line in it.said) == 3


def test_waits_double_up_to_the_longest() -> None:
    waits = [Pace().wait_s(attempt) for attempt in range(8)]
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert Pace().wait_s(10_000) == 60.0


def test_after_close_no_engine_starts(tmp_path: Path) -> None:
    engine = RestartableEngine("it", tmp_path / "log", lambda _: EngineCommand(("sleep", "9")))
    engine.close()
    with pytest.raises(EngineError, match="not started any more"):
        engine.start()


def test_a_start_that_fails_is_told_and_the_log_before_is_kept(tmp_path: Path) -> None:
    log = tmp_path / ".engine-0.log"
    log.write_text("of the run before\n")
    command = EngineCommand(("sh", "-c", "echo ValueError: bad model; exit 3"))
    engine = RestartableEngine("it", log, lambda _: command, start_timeout_s=10)
    with pytest.raises(EngineError, match="ValueError: bad model"):
        engine.start()
    assert engine.death() == "it did not start"
    assert "ended with code 3" in engine.detail() and "bad model" in engine.detail()
    assert engine.old_log.read_text() == "of the run before\n"
