"""Episodes that are under way while versions change, over HTTP."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import SwapError
from marft_agents.registry import Change
from marft_agents.serving.loader import Limits
from tests.serving.recording_kit import recording_stage
from tests.serving.stage import House, Stage, running_stage

CASE = Path(__file__).parents[1] / "cases" / "38-mixed-versions.jsonl"
BACK = Change("me", action="rollback")


def ask(stage: Stage, episode: str, agent: str = "router") -> str:
    body = {"model": agent, "messages": [{"role": "user", "content": "?"}]}
    headers = {"X-Marft-Episode": episode}
    answer = stage.http.post(f"{stage.url}/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.headers["X-Marft-Adapter"]


def test_an_episode_goes_on_with_its_version_and_the_swap_says_so(stage: Stage) -> None:
    assert ask(stage, "e1") == "router@v1"
    done = stage.operator.swap("router", 2)
    assert (done["unloaded"], done["leases"], done["moved"]) == (False, 1, 0)
    assert (ask(stage, "e1"), ask(stage, "e2")) == ("router@v1", "router@v2")
    assert stage.chat("router").headers["X-Marft-Adapter"] == "router@v2"
    assert stage.operator.state()["agents"]["router"]["leases"] == {
        "router@v1": 1,
        "router@v2": 1,
    }
    assert stage.operator.release(["e1", "e1", "unknown"]) == 1
    stage.wait(lambda: "router@v1" not in stage.engine.adapters)
    assert ask(stage, "e1") == "router@v2", "what comes after the end begins anew"


@pytest.mark.parametrize("now", [True, False], ids=["now", "rollback"])
def test_a_bad_version_does_not_live_on(stage: Stage, now: bool) -> None:
    stage.operator.swap("router", 2)
    assert ask(stage, "e1") == "router@v2"
    change = Change("me") if now else BACK
    done = stage.operator.swap("router", 1, change, now=now)
    assert (done["moved"], done["leases"], done["unloaded"]) == (1, 0, True)
    assert ask(stage, "e1") == "router@v1"
    assert "router@v2" not in stage.engine.adapters


def test_an_episode_that_falls_silent_holds_nothing_up_for_ever(stage: Stage) -> None:
    stage.gateway.aliases.leases.timeout_s = 0.05
    ask(stage, "e1")
    assert not stage.operator.swap("router", 2)["unloaded"]
    stage.wait(lambda: "router@v1" not in stage.engine.adapters)
    assert ask(stage, "e1") == "router@v2"


def test_a_restarted_engine_gets_back_what_episodes_keep(stage: Stage) -> None:
    ask(stage, "e1")
    stage.operator.swap("router", 2)
    stage.engine.restart_empty()
    assert (ask(stage, "e1"), ask(stage, "e2")) == ("router@v1", "router@v2")


def test_what_episodes_keep_may_fill_the_engine_but_not_hold_up_a_rollback(house: House) -> None:
    house.publish("router")
    house.publish("router")
    with running_stage(house, limits=Limits(16, max_loras=4), wait_for_drain_s=0.1) as stage:
        for version in (2, 3):
            ask(stage, f"e{version}")
            stage.operator.swap("router", version)
        with pytest.raises(SwapError, match=r"router@v1 \(1 lease\).*router@v3 \(current\)"):
            stage.operator.swap("router", 4)
        stage.operator.release(["e2"])
        stage.wait(lambda: "router@v1" not in stage.engine.adapters)
        ask(stage, "e4")
        stage.operator.swap("router", 4)
        assert len(stage.engine.adapters) == 4
        assert stage.operator.swap("router", 1, BACK)["to"] == 1
        assert ask(stage, "e3") == ask(stage, "e4") == "router@v1"


def test_a_recorded_episode_ends_with_the_apps_word(house: House) -> None:
    with recording_stage(house) as desk:
        stage = desk.stage
        assert desk.ask("router", "e1").headers["X-Marft-Adapter"] == "router@v1"
        assert stage.operator.swap("router", 2)["leases"] == 1
        assert desk.ask("router", "e1").headers["X-Marft-Adapter"] == "router@v1"
        desk.post("/episodes/e1/end", {})
        stage.wait(lambda: "router@v1" not in stage.engine.adapters)
        assert [turn.adapter_start for turn in desk.wait_for_turns(2)] == ["router@v1"] * 2


def test_case_38_an_episode_spans_swaps(house: House) -> None:
    """Case 38: versions 3, 3, 3 to 4, 4; here a version lasts for the episode, or for the call."""
    house.publish("router")
    calls = [json.loads(line) for line in CASE.read_text().splitlines()][:4]
    agents = {"planner": "router", "critic": "writer"}
    with recording_stage(house) as desk, ThreadPoolExecutor(1) as pool:
        stage = desk.stage

        def play(call: dict[str, Any], **more: Any) -> Any:
            return desk.ask(
                agents[call["agent"]], call["episode"], messages=call["messages"], **more
            )

        play(calls[0])
        assert stage.operator.swap("router", 2)["leases"] == 1
        play(calls[1])
        stage.engine.gate = threading.Semaphore(1)
        stage.engine.started.clear()
        streaming = pool.submit(play, calls[2], stream=True)
        assert stage.engine.started.wait(5)
        stage.gateway.swapper._wait_for_drain_s = 0.05  # pyright: ignore[reportPrivateUsage] a short wait for the test
        assert stage.operator.swap("router", 3, now=True)["moved"] == 1
        assert "router@v1" in stage.engine.adapters, "a stream is answered by one version"
        for _ in range(stage.engine.chunks):
            stage.engine.gate.release()
        assert "[DONE]" in streaming.result(5).text
        stage.engine.gate = None
        play(calls[3])
        turns = desk.wait_for_turns(4)
        assert [(t.adapter_start, t.adapter_end) for t in turns] == [
            ("router@v1", "router@v1"),
            ("writer@v1", "writer@v1"),
            ("router@v1", "router@v1"),
            ("router@v3", "router@v3"),
        ]
        assert all(turn.logprobs and turn.trainable for turn in turns)
        stage.wait(lambda: "router@v1" not in stage.engine.adapters)
