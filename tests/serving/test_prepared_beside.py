"""Prepared versions beside everything else that wants a slot, a canary, a swap or the log."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from marft_agents.errors import ServerError, SwapError
from marft_agents.registry import Change
from marft_agents.serving.gateway_client import GatewayClient, NoRoomError
from marft_agents.serving.loader import Limits
from tests.serving.stage import LOOK_OFTEN, OPERATOR_KEY, House, Stage, running_stage
from tests.serving.test_prepared import (
    BACK,
    CURRENT,
    answers,
    asked,
    assert_whole_swap,
    told,
)

# -- slots ----------------------------------------------------------------------------------------


def test_without_a_slot_it_is_refused_with_the_arithmetic(house: House) -> None:
    house.publish("writer")
    with running_stage(house, limits=Limits(16, max_loras=3), wait_for_drain_s=0.05) as stage:
        stage.operator.prepare("router", 2)
        loads = asked(stage.engine)
        with pytest.raises(NoRoomError) as caught:
            stage.operator.prepare("writer", 2)
        for part in (
            "step check of writer@v2",
            "keeps 3 adapters and has 3",
            "router@v1 (current)",
            "router@v2 (prepared)",
            "what serves is as before",
        ):
            assert part in str(caught.value)
        assert asked(stage.engine) == loads
        assert stage.operator.swap("router", 2)["prepared"], "the other one is not harmed"


def test_the_agents_own_former_one_gives_up_its_slot(house: House) -> None:
    house.publish("router")
    with running_stage(house, limits=Limits(16, max_loras=3)) as stage:
        stage.operator.prepare("router", 2)
        stage.operator.prepare("router", 3)
        assert set(stage.engine.adapters) == {*CURRENT, "router@v3"}
        assert stage.operator.swap("router", 3)["prepared"]


@pytest.mark.parametrize("what", ["swap", "canary", "rollback"])
def test_what_serves_takes_its_slot(
    house: House, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    house.publish("writer")
    with running_stage(house, limits=Limits(16, max_loras=3), wait_for_drain_s=5.0) as stage:
        stage.operator.prepare("router", 2)
        if what == "canary":
            stage.operator.canary("writer", 2, 0.5)
        else:
            change = BACK if what == "rollback" else Change("me")
            assert stage.operator.swap("writer", 2, change)["to"] == 2
        assert "router@v2" not in stage.engine.adapters
        assert told(stage)["prepared"] is None
        assert "router@v2 was prepared, and gives up its slot for writer@v2" in caplog.text


def test_a_slot_that_is_free_leaves_it_alone(house: House) -> None:
    house.publish("writer")
    with running_stage(house, limits=Limits(16, max_loras=4)) as stage:
        stage.operator.prepare("router", 2)
        stage.operator.swap("writer", 2)
        assert told(stage)["prepared"]["version"] == 2
        assert stage.operator.swap("router", 2)["prepared"]


def test_an_engine_that_comes_back_loads_what_serves_alone(house: House) -> None:
    with running_stage(house, pace=LOOK_OFTEN) as stage:
        stage.operator.prepare("router", 2)
        stage.engine.restart_empty()
        stage.wait(lambda: "engine-0 takes requests" in stage.said)
        assert set(stage.engine.adapters) == CURRENT
        assert_whole_swap(stage)


def test_several_agents_are_prepared_and_then_move_at_once(house: House) -> None:
    house.publish("writer")
    team = {"router": 2, "writer": 2}
    with running_stage(house) as stage:
        assert stage.operator.prepare_all(team) is None
        before = asked(stage.engine)
        done = [stage.operator.swap(a, v, wait=False) for a, v in team.items()]
        assert all(swap["prepared"] for swap in done) and asked(stage.engine) == before


def test_several_agents_for_which_there_is_no_room_at_once(house: House) -> None:
    house.publish("writer")
    team = {"router": 2, "writer": 2}
    with running_stage(house, limits=Limits(16, max_loras=3)) as stage:
        why = stage.operator.prepare_all(team) or ""
        assert "not all new versions fit beside those in use" in why and "keeps 3" in why
        assert [stage.operator.swap(a, v)["to"] for a, v in team.items()] == [2, 2]
        house.publish("writer")
        stage.engine.faults.extra_effect = 0.5
        with pytest.raises(SwapError, match="step probe of writer@v3"):
            stage.operator.prepare_all({"writer": 3})


# -- beside other changes -------------------------------------------------------------------------


def test_a_canary_of_a_prepared_version_is_not_probed_again_and_neither_is_its_promotion(
    stage: Stage,
) -> None:
    stage.operator.prepare("router", 2)
    before = asked(stage.engine)
    stage.operator.canary("router", 2, 0.5)
    assert told(stage)["kept"]["router@v2"] == "canary" and told(stage)["prepared"] is None
    assert "prepared" in stage.house.registry.audit("router")[-1]["evidence"]
    again = stage.operator.prepare("router", 2)
    assert (again["until"], again["already"]) == (None, True), "it is kept while it is a canary"
    assert answers(stage, "router@v2") == "router@v2"
    assert stage.operator.swap("router", 2)["prepared"]
    assert asked(stage.engine) == before


def test_the_way_back_to_a_version_that_episodes_keep_is_short(stage: Stage) -> None:
    headers = {"X-Marft-Episode": "e1"}
    body = {"model": "router", "messages": []}
    stage.http.post(f"{stage.url}/v1/chat/completions", json=body, headers=headers)
    assert stage.operator.swap("router", 2)["leases"] == 1
    before = asked(stage.engine)
    done = stage.operator.swap("router", 1, BACK)
    assert done["prepared"] and asked(stage.engine) == before
    assert answers(stage) == "router@v1"


def test_a_version_that_drains_may_be_prepared(stage: Stage) -> None:
    stage.engine.gate = threading.Semaphore(1)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(stage.chat, "router", stream=True)
        assert stage.engine.started.wait(5)
        stage.gateway.swapper._wait_for_drain_s = 0.02  # pyright: ignore[reportPrivateUsage] a short wait for the test
        stage.operator.swap("router", 2)
        assert stage.operator.prepare("router", 1)["already"]
        for _ in range(stage.engine.chunks):
            stage.engine.gate.release()
        assert "[DONE]" in reply.result(5).text
    stage.engine.gate = None
    stage.wait(lambda: told(stage)["kept"]["router@v1"] == "prepared")
    assert stage.operator.swap("router", 1)["prepared"]


def test_swaps_and_preparations_wait_for_each_other(stage: Stage) -> None:
    for _ in range(3):
        stage.house.publish("router")

    def turn(number: int) -> Any:
        if number % 2:
            return stage.operator.prepare("router", 2 + number % 3)
        return stage.operator.swap("router", 1 + number % 5)

    def quiet(number: int) -> Any:
        try:
            return turn(number)
        except SwapError as error:
            assert "is in use already" in str(error)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(quiet, range(24)))
    assert sum(result is not None for result in results) >= 12
    current = stage.house.registry.current("router")
    assert answers(stage) == f"router@v{current}"
    kept = told(stage)["kept"]
    assert kept[f"router@v{current}"] == "current" and set(kept.values()) <= {
        "current",
        "prepared",
        "draining",
    }
    stage.wait(lambda: "draining" not in told(stage)["kept"].values())
    assert set(stage.engine.adapters) == {*told(stage)["kept"], "writer@v1"}


def test_a_preparation_goes_on_when_whoever_asked_has_left(house: House) -> None:
    with running_stage(house, load_timeout_s=5.0) as stage:
        stage.engine.faults.at["load"] = "hang"
        with (
            GatewayClient(stage.url, operator_key=OPERATOR_KEY, swap_timeout_s=0.1) as hasty,
            pytest.raises(ServerError, match="it goes on there"),
        ):
            hasty.prepare("router", 2)
        stage.engine.adapters["router@v2"] = str(house.registry.path("router", 2))
        stage.engine.faults.at.clear()
        stage.engine.release.set()
        stage.wait(lambda: told(stage)["prepared"] is not None)
        assert stage.operator.swap("router", 2)["prepared"]


def test_the_log_and_the_metrics_tell_them_from_swaps(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stage.operator.prepare("router", 2)
    assert "prepare agent=router version=2 from=1 by=operator result=ok" in caplog.text
    page = stage.http.get(f"{stage.url}/metrics").text
    assert 'marft_swap_step_seconds_count{step="probe"} 1.0' in page
    assert "marft_swaps_total{" not in page
