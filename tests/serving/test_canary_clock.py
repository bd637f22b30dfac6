"""Canaries without HTTP: what waits for an engine, and what happens while somebody else acts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import SwapError
from marft_agents.registry import Bounds, Change
from marft_agents.serving.aliases import Aliases, Route
from marft_agents.serving.canary_swap import Canaries
from marft_agents.serving.client import EngineClient
from marft_agents.serving.fleet import Fleet
from marft_agents.serving.loader import Limits
from marft_agents.serving.swap import Swapper
from marft_agents.serving.upstream import Upstream
from tests.serving.conftest import furnished
from tests.serving.fake_engine import FakeEngine
from tests.serving.stage import House, current_aliases, loaded_replica
from tests.serving.test_canary import NEW, OLD, outcome

ME = Change("me", "test")


class Rig:
    """A fleet of one scripted engine, and canaries whose clock the test moves."""

    def __init__(self, house: House, engine: FakeEngine, client: EngineClient) -> None:
        self.now = 0.0
        self.house, self.engine = house, engine
        self.replica = loaded_replica(house, "engine-0", client, Upstream(engine.url), None)
        self.aliases: Aliases = current_aliases(house)
        self.swapper = Swapper(Fleet([self.replica]), self.aliases, wait_for_drain_s=5)

    def canaries(self) -> Canaries:
        """Of a server that has just started."""
        return Canaries(self.swapper, now=lambda: self.now)

    async def closed(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self.swapper.fleet.close)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with ExitStack() as stack:
        engine = stack.enter_context(FakeEngine())
        client = stack.enter_context(EngineClient(engine.url, timeout_s=5, load_timeout_s=5))
        yield Rig(furnished(tmp_path), engine, client)


async def begun(rig: Rig) -> None:
    """A canary on disk that no server has loaded."""
    await rig.canaries().start("router", 2, 0.5, change=ME)
    rig.aliases.unshare("router")
    await rig.swapper.retire(Route("router", 2))
    assert set(rig.engine.adapters) == {"router@v1", "writer@v1"}


async def test_a_canary_waits_for_an_engine_and_is_tried_again(rig: Rig) -> None:
    async with AsyncExitStack() as stack:
        await rig.closed(stack)
        await begun(rig)
        rig.replica.become("down", "it is being started")
        canaries = rig.canaries()
        await canaries.read_disk()
        await canaries.tick()
        assert canaries.told("router")["canary"] == {"version": 2, "share": 0.5, "loaded": False}
        rig.replica.become("ready")
        await canaries.tick()
        assert rig.aliases.split("router") is None, "not before its time"
        rig.now = 10.0
        await canaries.tick()
        assert rig.aliases.split("router") is not None and "router@v2" in rig.engine.adapters


@pytest.mark.parametrize("version", [1, 2])
async def test_what_waits_ends_with_a_stop_or_its_own_promotion(rig: Rig, version: int) -> None:
    async with AsyncExitStack() as stack:
        await rig.closed(stack)
        await begun(rig)
        canaries = rig.canaries()
        await canaries.read_disk()
        if version == 2:
            await canaries.swap("router", 2, ME)
        else:
            await canaries.stop("router", ME)
        await canaries.tick()
        assert rig.aliases.split("router") is None and rig.aliases.current("router") == version
        assert rig.house.registry.canary("router") is None


async def test_the_window_goes_on_by_the_wall_clock_after_a_restart(rig: Rig) -> None:
    async with AsyncExitStack() as stack:
        await rig.closed(stack)
        bounds = Bounds(for_s=1000)
        await rig.canaries().start("router", 2, 0.5, bounds=bounds, change=ME)
        plan = rig.house.registry.canary("router")
        assert plan is not None
        earlier: Any = plan.model_copy(update={"since": plan.since.replace(year=2020)})
        rig.house.registry.set_canary("router", earlier, ME)
        canaries = rig.canaries()
        await canaries.read_disk()
        await canaries.tick()
        assert canaries.told("router")["canary"]["remaining_s"] == 0


async def promoted(rig: Rig, canaries: Canaries) -> None:
    """v2, watched, and worse than v1 was."""
    for n in range(30):
        canaries.observe(outcome(route=OLD, episode=f"before{n}"))
    await canaries.swap("router", 2, ME, watch=Bounds(min_requests=20))
    assert "router@v1" not in rig.engine.adapters
    for n in range(30):
        canaries.observe(outcome(route=NEW, status=500, episode=f"after{n}"))


async def test_going_back_is_tried_again_while_the_engine_is_in_trouble(rig: Rig) -> None:
    async with AsyncExitStack() as stack:
        await rig.closed(stack)
        canaries = rig.canaries()
        await promoted(rig, canaries)
        rig.engine.faults.hang_loads = True
        rig.engine.release.set()  # a load is cut off without an answer
        await canaries.tick()
        rig.engine.faults.hang_loads = False
        await canaries.tick()
        assert rig.aliases.current("router") == 2, "not before its time"
        rig.now = 10.0
        await canaries.tick()
        assert rig.aliases.current("router") == 1 and canaries.told("router")["watch"] is None
        assert canaries.verdicts["went_back"] == 1


async def test_going_back_is_given_up_when_it_is_refused(rig: Rig) -> None:
    async with AsyncExitStack() as stack:
        await rig.closed(stack)
        canaries = rig.canaries()
        await promoted(rig, canaries)
        rig.house.registry.pin("router", ME)
        await canaries.tick()
        assert rig.aliases.current("router") == 2 and canaries.told("router")["watch"] is None
        assert "pinned to version 2" in canaries.told("router")["ended"]["how"]


async def test_a_worse_canary_is_taken_out_while_another_agent_is_swapped(rig: Rig) -> None:
    async with AsyncExitStack() as stack:
        await rig.closed(stack)
        canaries = rig.canaries()
        await canaries.start("router", 2, 0.5, bounds=Bounds(min_requests=20), change=ME)
        mine = next(
            name for name in map(str, range(99)) if rig.aliases.resolve("router", name) == NEW
        )
        rig.house.publish("writer")
        rig.engine.faults.hang_loads = True
        swap = asyncio.create_task(canaries.swap("writer", 2, ME))
        while rig.engine.bodies("/v1/load_lora_adapter")[-1]["lora_name"] != "writer@v2":
            await asyncio.sleep(0.005)
        for n in range(25):
            canaries.observe(outcome(route=OLD, episode=f"old{n}"))
            canaries.observe(outcome(route=NEW, status=500, episode=f"new{n}"))
        assert not swap.done() and rig.aliases.resolve("router", mine) == OLD
        assert rig.swapper.fleet.swaps == 1
        rig.engine.release.set()
        await asyncio.gather(swap, return_exceptions=True)
        assert rig.swapper.fleet.swaps == 0
        await canaries.tick()
        assert rig.house.registry.canary("router") is None
        assert rig.house.registry.audit("router")[-1]["action"] == "canary-rollback"


def seen(canaries: Canaries, status: int = 200) -> None:
    """Thirty requests of each version; those of v2 end with ``status``."""
    for n in range(30):
        canaries.observe(outcome(route=OLD, episode=f"old{n}"))
        canaries.observe(outcome(route=NEW, status=status, episode=f"new{n}"))


async def test_what_a_canary_that_passed_is_to_become_is_tried_again(rig: Rig) -> None:
    async with AsyncExitStack() as stack:
        await rig.closed(stack)
        canaries, bounds = rig.canaries(), Bounds(min_requests=20, for_s=100)
        await canaries.start("router", 2, 0.5, bounds=bounds, then="promote", change=ME)
        seen(canaries)
        rig.now = 101.0
        rig.replica.become("down", "it is being started")
        await canaries.tick()
        assert rig.aliases.current("router") == 1
        rig.replica.become("ready")
        await canaries.tick()
        assert rig.aliases.current("router") == 1, "not before its time"
        rig.now = 111.0
        await canaries.tick()
        assert rig.aliases.current("router") == 2 and canaries.verdicts["passed"] == 1
        told = [line["action"] for line in rig.house.registry.audit("router")]
        assert told.count("canary-passed") == 1


async def test_a_server_that_stops_writes_down_that_a_canary_was_worse(rig: Rig) -> None:
    async with AsyncExitStack() as stack:
        await rig.closed(stack)
        canaries = rig.canaries()
        async with canaries.running():
            await canaries.start("router", 2, 0.5, bounds=Bounds(min_requests=20), change=ME)
            seen(canaries, 500)
        assert rig.house.registry.canary("router") is None
        assert rig.house.registry.audit("router")[-1]["action"] == "canary-rollback"


async def test_going_back_waits_for_room_in_the_engine(rig: Rig) -> None:
    async with AsyncExitStack() as stack:
        await rig.closed(stack)
        canaries = rig.canaries()
        await promoted(rig, canaries)
        rig.replica.loader.limits = Limits(16, max_loras=2)
        await canaries.tick()
        assert rig.aliases.current("router") == 2
        rig.replica.loader.limits = Limits(16, max_loras=3)
        rig.now = 10.0
        await canaries.tick()
        assert rig.aliases.current("router") == 1


def while_it_is_asked_for(rig: Rig, monkeypatch: pytest.MonkeyPatch, canaries: Canaries) -> None:
    """Requests of v2 fail while the engine says whether it still has it."""
    loop, listed = asyncio.get_running_loop(), rig.replica.loader.require_listed

    def meanwhile(name: str, folder: Path, replica: str) -> None:
        loop.call_soon_threadsafe(seen, canaries, 500)
        listed(name, folder, replica)

    monkeypatch.setattr(rig.replica.loader, "require_listed", meanwhile)


async def test_a_canary_found_worse_while_its_share_is_changed_is_taken_out(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        await rig.closed(stack)
        canaries, bounds = rig.canaries(), Bounds(min_requests=20)
        await canaries.start("router", 2, 0.5, bounds=bounds, change=ME)
        while_it_is_asked_for(rig, monkeypatch, canaries)
        with pytest.raises(SwapError, match="worse meanwhile"):
            await canaries.start("router", 2, 0.6, bounds=bounds, change=ME)
        await canaries.tick()
        assert rig.aliases.split("router") is None
        assert rig.house.registry.canary("router") is None
        assert rig.house.registry.audit("router")[-1]["action"] == "canary-rollback"


async def test_a_canary_found_worse_while_it_is_promoted_goes_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        await rig.closed(stack)
        canaries, bounds = rig.canaries(), Bounds(min_requests=20, for_s=100)
        await canaries.start("router", 2, 0.5, bounds=bounds, then="promote", change=ME)
        seen(canaries)
        rig.now = 101.0
        with monkeypatch.context() as patch:
            while_it_is_asked_for(rig, patch, canaries)
            await canaries.tick()
        await canaries.tick()
        assert rig.aliases.current("router") == 1
        told = [line["action"] for line in rig.house.registry.audit("router")]
        assert told[-2:] == ["promote", "rollback"]
