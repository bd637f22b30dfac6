"""Several engines behind one gateway: who answers, who is left out, and who may come back when."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from marft_agents.errors import SwapError
from marft_agents.serving.loader import Limits
from tests.serving.fake_engine import FakeEngine
from tests.serving.stage import LOOK_OFTEN, NEVER_LOOK, House, Stage, running_stage


def _chat(stage: Stage, episode: str) -> int:
    """Status of one call."""
    url, body = f"{stage.url}/v1/chat/completions", {"model": "router", "messages": []}
    answer = stage.http.post(url, json=body, headers={"X-Marft-Episode": episode})
    return answer.status_code


def _homes(stage: Stage, episodes: list[str]) -> dict[str, int]:
    """Which replica answers each episode."""
    homes: dict[str, int] = {}
    for episode in episodes:
        before = [len(e.bodies("/v1/chat/completions")) for e in stage.engines]
        assert _chat(stage, episode) == 200
        after = [len(e.bodies("/v1/chat/completions")) for e in stage.engines]
        homes[episode] = [b > a for a, b in zip(before, after, strict=True)].index(True)
    return homes


def _kill(engine: FakeEngine) -> None:
    """As a process dies: its connections and its adapters are gone."""
    engine.stop()
    engine.restart_empty()


def test_episodes_are_spread_evenly_and_stay_where_they_are(house: House) -> None:
    with running_stage(house, replicas=3) as stage:
        fleet = stage.gateway.fleet
        counts = Counter(fleet.choose(f"episode-{i}").name for i in range(3000))
        assert all(900 < count < 1100 for count in counts.values()), counts
        episodes = [f"e{i}" for i in range(12)]
        homes = _homes(stage, episodes)
        assert len(set(homes.values())) == 3
        assert _homes(stage, episodes) == homes


def test_only_the_episodes_of_a_dead_replica_move_and_they_come_back(house: House) -> None:
    with running_stage(house, replicas=3, pace=LOOK_OFTEN) as stage:
        episodes = [f"e{i}" for i in range(12)]
        homes = _homes(stage, episodes)
        _kill(stage.engines[1])
        stage.wait(lambda: stage.states == ["ready", "down", "ready"])
        moved = _homes(stage, episodes)
        assert {e for e in episodes if moved[e] != homes[e]} == {
            e for e in episodes if homes[e] == 1
        }
        stage.engines[1].start()
        stage.wait(lambda: stage.states == ["ready"] * 3)
        assert _homes(stage, episodes) == homes
        stage.wait(lambda: "engine-1 takes requests" in stage.said)


def test_without_an_episode_the_least_busy_answers(house: House) -> None:
    with running_stage(house, replicas=2) as stage:
        stage.engines[0].gate = threading.Semaphore(0)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(stage.chat)
            assert stage.engines[0].started.wait(5)
            for _ in range(3):
                assert stage.chat().status_code == 200
            assert len(stage.engines[1].bodies("/v1/chat/completions")) == 3
            stage.engines[0].gate.release()
            assert waiting.result(5).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_engine_dies_before_any_reply_is_answered_by_another(
    house: House, stream: bool
) -> None:
    with running_stage(house, replicas=2) as stage:
        _kill(stage.engines[0])
        answer = stage.chat(stream=stream)
        assert answer.status_code == 200
        assert stage.engines[1].bodies("/v1/chat/completions")[-1]["model"] == "router@v1"
        stage.wait(lambda: stage.states == ["down", "ready"])
        stage.wait(lambda: [s.in_flight for s in stage.gateway.fleet.status()] == [0, 0])
        stage.engines[0].start()


def test_a_request_in_flight_on_a_dying_engine_is_answered_by_another(house: House) -> None:
    with running_stage(house, replicas=2) as stage:
        stage.engines[0].gate = threading.Semaphore(0)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(stage.chat)
            assert stage.engines[0].started.wait(5)
            _kill(stage.engines[0])
            answer = waiting.result(5)
        assert answer.status_code == 200
        assert answer.headers["X-Marft-Adapter"] == "router@v1"
        stage.engines[0].start()


def test_the_last_error_of_a_dying_engine_is_not_the_answer(house: House) -> None:
    """An engine whose worker died answers 500 to what was in flight before it ends."""
    with running_stage(house, replicas=2) as stage:
        dying = stage.engines[0]
        dying.faults.generate_status = 500
        assert [stage.chat().status_code for _ in range(2)] == [500, 500], "it is well otherwise"
        dying.faults.unwell = True
        assert stage.chat().status_code == 200
        stage.wait(lambda: stage.states == ["down", "ready"])


def test_a_stream_that_has_begun_is_never_begun_again(house: House) -> None:
    with running_stage(house, replicas=2) as stage:
        for engine in stage.engines:
            engine.faults.break_stream_after = 2
        answer = stage.chat(stream=True)
        assert "cannot be reached" in answer.text and "[DONE]" not in answer.text
        assert sum(len(e.bodies("/v1/chat/completions")) for e in stage.engines) == 1


def test_an_engine_that_forgot_its_adapters_lets_another_answer_meanwhile(house: House) -> None:
    with running_stage(house, replicas=2) as stage:
        stage.engines[0].restart_empty()
        stage.engines[0].faults.load_status = 500
        assert stage.chat().status_code == 200
        assert len(stage.engines[1].bodies("/v1/chat/completions")) == 1
        stage.wait(lambda: stage.states == ["down", "ready"])
        assert "refused" in (stage.gateway.fleet.status()[0].reason or "")


def test_a_replica_that_is_down_does_not_hold_up_a_swap_and_misses_none(house: House) -> None:
    with running_stage(house, replicas=2, pace=LOOK_OFTEN) as stage:
        _kill(stage.engines[1])
        stage.wait(lambda: stage.states == ["ready", "down"])
        assert stage.operator.swap("router", 2)["to"] == 2
        stage.engines[1].start()
        stage.wait(lambda: stage.states == ["ready", "ready"])
        assert set(stage.engines[1].adapters) == {"router@v2", "writer@v1"}


def test_a_swap_while_a_replica_is_being_restored_is_not_missed(house: House) -> None:
    with running_stage(house, replicas=2, load_timeout_s=1.0, pace=LOOK_OFTEN) as stage:
        late = stage.engines[1]
        late.faults.hang_loads = True
        late.restart_empty()
        stage.wait(lambda: stage.states == ["ready", "restoring"])
        stage.wait(lambda: bool(late.bodies("/v1/load_lora_adapter")[2:]))
        # The swap does not wait for it: the lock is free.
        assert stage.operator.swap("router", 2)["to"] == 2
        assert "router@v2" not in late.adapters
        late.faults.hang_loads = False
        late.release.set()
        stage.wait(lambda: stage.states == ["ready", "ready"])
        assert set(late.adapters) == {"router@v2", "writer@v1"}


def test_a_replica_whose_adapter_fails_its_probe_stays_out(house: House) -> None:
    with running_stage(house, replicas=2, pace=LOOK_OFTEN) as stage:
        _kill(stage.engines[1])
        stage.engines[1].faults.extra_effect = 0.5
        stage.wait(lambda: stage.states == ["ready", "down"])
        stage.engines[1].start()
        stage.wait(lambda: any("cannot take requests" in line for line in stage.said))
        assert stage.states[1] != "ready"
        for i in range(10):
            assert _chat(stage, f"e{i}") == 200
        assert stage.engines[1].bodies("/v1/chat/completions") == []
        stage.engines[1].faults.extra_effect = 0.0
        stage.wait(lambda: stage.states == ["ready", "ready"])


def test_with_no_replica_ready_requests_and_swaps_say_why(house: House) -> None:
    with running_stage(house, replicas=2, pace=LOOK_OFTEN) as stage:
        for engine in stage.engines:
            _kill(engine)
        first = stage.chat()
        assert (first.status_code, first.headers["Retry-After"]) == (503, "2")
        stage.wait(lambda: stage.chat().status_code == 503 and stage.states == ["down", "down"])
        answer = stage.chat()
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")
        message = answer.json()["error"]["message"]
        assert "engine-0 is down: cannot reach" in message and "engine-1 is down" in message
        with pytest.raises(SwapError, match=r"no engine is ready.*router@v1 still serves"):
            stage.operator.swap("router", 2)
        assert house.registry.current("router") == 1
        for engine in stage.engines:
            engine.start()
        stage.wait(lambda: stage.states == ["ready", "ready"])


def test_a_late_answer_is_no_death(house: House) -> None:
    """A busy engine answers late; only one that does so for long is left out."""
    with running_stage(house, pace=LOOK_OFTEN) as stage:
        stage.engine.faults.at["list"] = "refuse"
        stage.wait(lambda: stage.states == ["down"])
        stage.engine.faults.at.clear()
        stage.wait(lambda: stage.states == ["ready"])
    with running_stage(house, timeout_s=0.1, pace=LOOK_OFTEN) as stage:
        stage.engine.faults.at["probe"] = "hang"  # what is asked once requests fail
        stage.engine.faults.generate_status = 500
        for _ in range(5):
            assert stage.chat().status_code == 500

        def tried() -> int:
            return len([b for b in stage.engine.bodies("/v1/completions") if b["prompt"] == [1, 2]])

        stage.wait(lambda: tried() > 3)
        assert stage.states == ["ready"]


# -- slots -------------------------------------------------------------------------------------


def test_a_swap_beyond_the_engines_slots_is_refused_with_the_arithmetic(house: House) -> None:
    with running_stage(house, limits=Limits(16, max_loras=3), wait_for_drain_s=0.05) as stage:
        house.publish("router")
        assert _chat(stage, "long") == 200  # keeps router@v1
        assert stage.operator.swap("router", 2)["to"] == 2
        loads = len(stage.engine.bodies("/v1/load_lora_adapter"))
        with pytest.raises(SwapError) as caught:
            stage.operator.swap("router", 3)
        for part in (
            "step check of router@v3",
            "keeps 3 adapters and has 3",
            "router@v1 (1 lease)",
            "router@v2 (current)",
            "writer@v1 (current)",
            "--max-cpu-loras",
            "router@v2 still serves",
        ):
            assert part in str(caught.value)
        assert len(stage.engine.bodies("/v1/load_lora_adapter")) == loads


def test_a_swap_waits_for_a_slot_that_is_about_to_be_free(house: House) -> None:
    with running_stage(house, limits=Limits(16, max_loras=3)) as stage:
        house.publish("router")
        stage.engine.gate = threading.Semaphore(0)
        with ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(stage.chat)
            assert stage.engine.started.wait(5)
            stage.gateway.swapper._wait_for_drain_s = 0.05  # pyright: ignore[reportPrivateUsage] a short wait for the test
            assert not stage.operator.swap("router", 2)["unloaded"]
            stage.gateway.swapper._wait_for_drain_s = 5.0  # pyright: ignore[reportPrivateUsage]
            swap = pool.submit(stage.operator.swap, "router", 3)
            stage.engine.gate.release()
            assert waiting.result(5).status_code == 200
            assert swap.result(5)["to"] == 3


def test_200_swaps_leave_no_more_loaded_than_there_are_slots(house: House) -> None:
    for _ in range(3):
        house.publish("router")
    limits = Limits(16, max_loras=4)
    with running_stage(house, limits=limits, pace=NEVER_LOOK) as stage:
        for i in range(200):
            assert stage.operator.swap("router", 1 + (i + 1) % 5)["to"] == 1 + (i + 1) % 5
            assert len(stage.engine.adapters) <= 4
        stage.wait(lambda: set(stage.engine.adapters) == {"router@v1", "writer@v1"})
        assert not stage.gateway.swapper._retiring  # pyright: ignore[reportPrivateUsage] nothing piles up
        assert len(stage.gateway.aliases.kept()) == 2
