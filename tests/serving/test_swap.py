"""A swap either ends with the new version probed and serving, or changes nothing.

Case 27: a load that hangs, a half-written file, a folder that goes away, a restarted engine.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import ServerError, SwapError
from marft_agents.registry import Change, durable
from marft_agents.schema import Probe
from marft_agents.serving.gateway_client import GatewayClient
from marft_agents.serving.loader import Limits
from tests.serving.stage import (
    LOOK_OFTEN,
    OPERATOR_KEY,
    House,
    Stage,
    fake_probe,
    running_stage,
)

FAULTS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "cases" / "27-swap-faults.json").read_text()
)


def _serves(stage: Stage, agent: str) -> str:
    answer = stage.chat(agent)
    assert answer.status_code == 200
    return answer.headers["X-Marft-Adapter"]


def _told(stage: Stage, agent: str) -> dict[str, Any]:
    state = stage.operator.state()["agents"][agent]
    return {name: state[name] for name in ("current", "served")}


def _assert_unchanged(stage: Stage) -> None:
    """router@v1 serves, v2 is not loaded, and the disk says so."""
    assert _serves(stage, "router") == "router@v1"
    assert set(stage.engine.adapters) == {"router@v1", "writer@v1"}
    assert stage.house.registry.current("router") == 1
    trail = stage.house.registry.audit()
    assert [e["action"] for e in trail if e["result"] == "done"] == ["publish"] * 3
    assert all(e["current"] == 1 and "step" in e["result"] for e in trail[3:])
    assert _told(stage, "router") == {"current": 1, "served": ["router@v1"]}


def test_a_swap_moves_alias_current_and_audit(stage: Stage) -> None:
    assert _serves(stage, "router") == "router@v1"
    result = stage.operator.swap("router", 2, Change("me"))
    assert (result["agent"], result["from"], result["to"]) == ("router", 1, 2)
    assert result["probe"]["against"] == "trainer"
    assert result["probe"]["error"] < 1e-6 and result["probe"]["effect"] == pytest.approx(0.2)
    assert result["unloaded"]
    assert _serves(stage, "router") == "router@v2"
    assert _serves(stage, "writer") == "writer@v1"
    assert stage.engine.events == [
        "load router@v1",
        "load writer@v1",
        "load router@v2",
        "unload router@v1",
    ]
    assert stage.house.registry.current("router") == 2
    entry = stage.house.registry.audit()[-1]
    assert (entry["action"], entry["from"], entry["to"], entry["who"]) == ("promote", 1, 2, "me")
    assert entry["evidence"]["probe"]["effect"] == pytest.approx(0.2)
    assert stage.chat("router@v1").status_code == 404


def test_a_swap_back_and_a_repeated_swap(stage: Stage) -> None:
    operator = stage.operator
    assert operator.swap("router", 2)["to"] == 2
    again = operator.swap("router", 2)
    assert (again["from"], again["to"], again["unloaded"]) == (2, 2, False)
    assert operator.swap("router", 1)["from"] == 2
    assert _serves(stage, "router") == "router@v1"
    assert stage.house.registry.current("router") == 1


def test_an_agent_published_after_the_start_joins(stage: Stage) -> None:
    stage.house.publish("editor")
    assert stage.chat("editor").status_code == 404
    assert stage.operator.swap("editor", 1)["from"] is None
    assert _serves(stage, "editor") == "editor@v1"


def test_state_tells_base_versions_and_limits(stage: Stage) -> None:
    state = stage.operator.state()
    assert state["base"]["fingerprint"] == stage.house.base.fingerprint
    assert _told(stage, "writer") == {"current": 1, "served": ["writer@v1"]}
    assert (state["max_lora_rank"], state["target_modules"]) == (16, [])


# -- requests in flight --------------------------------------------------------------------------


def test_a_stream_that_began_before_the_swap_ends_unbroken(stage: Stage) -> None:
    stage.engine.gate = threading.Semaphore(1)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(stage.chat, "router", stream=True)
        assert stage.engine.started.wait(5)
        stage.gateway.swapper._wait_for_drain_s = 0.05  # pyright: ignore[reportPrivateUsage] a short wait for the test
        result = stage.operator.swap("router", 2)
        assert not result["unloaded"]
        assert "router@v1" in stage.engine.adapters
        assert _told(stage, "router") == {
            "current": 2,
            "served": ["router@v1", "router@v2"],
        }
        assert stage.chat("router@v1").status_code == 404  # no new request may prolong it
        for _ in range(stage.engine.chunks):
            stage.engine.gate.release()
        answer = reply.result(5)
    assert answer.headers["X-Marft-Adapter"] == "router@v1"
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert data[-1] == "[DONE]"
    chunks = [json.loads(x) for x in data[:-1]]
    said = [c["choices"][0]["delta"]["content"] for c in chunks]
    assert said == ["", "w0 ", "w1 ", "w2 ", "w3 "]
    assert {c["model"] for c in chunks} == {"router"}
    stage.wait(lambda: "router@v1" not in stage.engine.adapters)
    assert stage.engine.events[-2:] == ["stream ended router@v1", "unload router@v1"]


def test_a_version_that_is_swapped_back_to_while_draining_stays_loaded(stage: Stage) -> None:
    stage.engine.gate = threading.Semaphore(1)
    stage.gateway.swapper._wait_for_drain_s = 0.02  # pyright: ignore[reportPrivateUsage] a short wait for the test
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(stage.chat, "router", stream=True)
        assert stage.engine.started.wait(5)
        stage.operator.swap("router", 2)
        stage.operator.swap("router", 1)
        for _ in range(stage.engine.chunks):
            stage.engine.gate.release()
        assert "[DONE]" in reply.result(5).text
    stage.wait(lambda: "router@v2" not in stage.engine.adapters)
    assert "router@v1" in stage.engine.adapters
    stage.engine.gate = None
    assert _serves(stage, "router") == "router@v1"


def test_no_request_fails_while_versions_change(stage: Stage) -> None:
    stop = threading.Event()
    statuses: list[int] = []

    def ask() -> None:
        while not stop.is_set():
            statuses.append(stage.chat("router").status_code)

    with ThreadPoolExecutor(3) as pool:
        workers = [pool.submit(ask) for _ in range(3)]
        for version in (2, 1, 2, 1, 2):
            stage.operator.swap("router", version)
        stop.set()
        for worker in workers:
            worker.result(5)
    assert len(statuses) > 5 and set(statuses) == {200}


def test_swaps_wait_for_each_other(stage: Stage) -> None:
    with ThreadPoolExecutor(2) as pool:
        swaps = [pool.submit(stage.operator.swap, "router", 2) for _ in range(2)]
        results = [swap.result(5) for swap in swaps]
    assert sorted(r["from"] for r in results) == [1, 2]
    assert len([e for e in stage.engine.events if e == "load router@v2"]) == 1


# -- what is refused before anything is sent ------------------------------------------------------


def _loads(stage: Stage) -> int:
    return len(stage.engine.bodies("/v1/load_lora_adapter"))


def test_case_27b_a_half_file_is_refused_before_sending(stage: Stage) -> None:
    assert "incomplete metadata" in FAULTS["b_half_file"]["message_contains"]
    weights = stage.house.registry.path("router", 2) / "adapter_model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-16])
    before = _loads(stage)
    with pytest.raises(SwapError, match=r"step check of router@v2.*checksum.*router@v1 still"):
        stage.operator.swap("router", 2)
    assert _loads(stage) == before
    _assert_unchanged(stage)


@pytest.mark.parametrize(
    ("version", "message"), [(9, "no version 9.*it has 1, 2"), (0, "no version 0")]
)
def test_unknown_versions(stage: Stage, version: int, message: str) -> None:
    with pytest.raises(SwapError, match=message):
        stage.operator.swap("router", version)
    _assert_unchanged(stage)


@pytest.mark.parametrize("agent", ["nobody", "base", "?!"])
def test_unknown_agents(stage: Stage, agent: str) -> None:
    with pytest.raises(SwapError, match=r"no agent 'nobody'.*router, writer|reserved|no usable"):
        stage.operator.swap(agent, 1)


def test_another_base_is_refused_naming_both(house: House) -> None:
    other = house.base.model_copy(update={"name": "other-model", "fingerprint": "f" * 64})
    house.registry.publish(
        "router",
        house.root / "staged-router-2",
        base=other,
        parent=None,
        probe=fake_probe(3),
    )
    with running_stage(house) as stage:
        before = _loads(stage)
        with pytest.raises(SwapError) as caught:
            stage.operator.swap("router", 3)
        for part in ("other-model", "ffffffffffff", "base-model", house.base.fingerprint[:12]):
            assert part in str(caught.value)
        assert _loads(stage) == before


def test_case_12_rank_above_the_engines_limit(house: House) -> None:
    with running_stage(house, limits=Limits(8)) as stage:
        house.publish("router", r=2, rank_pattern={"o_proj": 12})
        before = _loads(stage)
        with pytest.raises(SwapError, match=r"'o_proj'\] is 12.*limit is 8.*--max-lora-rank 16"):
            stage.operator.swap("router", 3)
        assert _loads(stage) == before


def test_modules_that_the_engine_was_not_started_for(house: House) -> None:
    with (
        pytest.raises(SwapError, match=r"adapts q_proj.*--target-modules k_proj,q_proj"),
        running_stage(house, limits=Limits(8, ("k_proj",))),
    ):
        pass


def test_an_adapter_that_changes_nothing_by_its_own_probe(stage: Stage) -> None:
    stage.house.publish("router", probe=fake_probe(3, untrained=True))
    before = _loads(stage)
    with pytest.raises(SwapError, match=r"has no effect.*the training changed nothing"):
        stage.operator.swap("router", 3)
    assert _loads(stage) == before


@pytest.mark.parametrize("field", ["token_ids", "logprobs", "base_logprobs", "prompt_token_ids"])
def test_a_probe_that_is_no_probe(stage: Stage, field: str) -> None:
    probe = Probe.model_validate(fake_probe(3).model_dump() | {field: []})
    stage.house.publish("router", probe=probe)
    with pytest.raises(SwapError, match="needs a prompt and equal lengths"):
        stage.operator.swap("router", 3)


# -- what fails in the engine ---------------------------------------------------------------------


def test_case_27a_a_load_that_hangs_ends_and_the_old_version_serves(house: House) -> None:
    assert "never answers" in FAULTS["a_hang"]
    with running_stage(house, load_timeout_s=0.2) as stage:
        stage.engine.faults.hang_loads = True
        with pytest.raises(SwapError, match=r"step load of router@v2.*no answer within 0\.2 s"):
            stage.operator.swap("router", 2)
        _assert_unchanged(stage)
        stage.engine.faults.hang_loads = False
        assert stage.operator.swap("router", 2)["to"] == 2


def test_case_27a_a_load_that_answered_nothing_but_worked_is_found(house: House) -> None:
    with running_stage(house, load_timeout_s=0.2) as stage:
        stage.engine.faults.hang_loads = True
        stage.engine.adapters["router@v2"] = str(house.registry.path("router", 2))
        assert stage.operator.swap("router", 2)["to"] == 2
        assert _serves(stage, "router") == "router@v2"


def test_the_name_taken_by_another_folder(stage: Stage) -> None:
    stage.engine.adapters["router@v2"] = str(stage.house.registry.path("router", 1))
    with pytest.raises(SwapError, match=r"step load.*already been loaded"):
        stage.operator.swap("router", 2)
    assert _serves(stage, "router") == "router@v1"


@pytest.mark.parametrize(
    ("fault", "value", "message"),
    [
        ("load_status", 500, "step load.*answered 500: incomplete metadata"),
        ("forget_loads", True, "step load.*does not list it"),
        ("extra_effect", 0.05, r"step probe.*not answer as it was trained.*0\.05.*half precision"),
        ("extra_effect", 5.0, r"step probe.*not answer as it was trained.*another base model"),
        ("ignore_adapters", True, "step probe.*not answer as it was trained"),
        ("nan", True, "step probe.*not finite"),
    ],
)
def test_engine_faults_leave_the_old_version(
    stage: Stage, fault: str, value: Any, message: str
) -> None:
    stage.engine.faults.load_message = "incomplete metadata, file not fully covered"
    setattr(stage.engine.faults, fault, value)
    with pytest.raises(SwapError, match=f"(?s){message}.*router@v1 still serves"):
        stage.operator.swap("router", 2)
    setattr(stage.engine.faults, fault, type(value)() if fault != "load_status" else 200)
    _assert_unchanged(stage)


def test_without_a_trainers_probe_the_base_is_the_yardstick(stage: Stage) -> None:
    stage.house.publish("router", probe=False)
    stage.house.publish("writer", untrained=True, probe=False)
    assert stage.operator.swap("writer", 2)["probe"]["effect"] == 0.0
    stage.engine.faults.ignore_adapters = True
    with pytest.raises(SwapError, match=r"step probe.*answers as the base does"):
        stage.operator.swap("router", 3)
    stage.engine.faults.ignore_adapters = False
    result = stage.operator.swap("router", 3)
    assert result["probe"]["against"] == "base" and result["probe"]["error"] is None
    assert result["probe"]["effect"] == pytest.approx(0.3)
    stage.engine.faults.extra_effect = 0.5
    stage.house.publish("writer", untrained=True, probe=False)
    with pytest.raises(SwapError, match="is untrained and must answer as the base"):
        stage.operator.swap("writer", 3)


def test_a_small_effect_is_told_from_the_base_below_the_tolerance(stage: Stage) -> None:
    small = fake_probe(2)
    small = small.model_copy(update={"logprobs": [x - 1e-3 for x in small.base_logprobs]})
    stage.house.publish("router", probe=small)
    stage.engine.faults.ignore_adapters = True
    with pytest.raises(SwapError, match=r"answers as the base does.*adapter is not applied"):
        stage.operator.swap("router", 3)


def test_a_disk_that_refuses_current_leaves_alias_and_disk_agreeing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stage.house.registry, "commit_move", full)
    with pytest.raises(SwapError, match=r"step record of router@v2.*No space.*router@v1 still"):
        stage.operator.swap("router", 2)
    stage.wait(lambda: "router@v2" not in stage.engine.adapters)
    _assert_unchanged(stage)


def test_case_27_an_audit_trail_that_cannot_be_written_leaves_alias_and_disk_agreeing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 27: ``CURRENT`` was moved already when the disk filled up."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "append_line", full)
        with pytest.raises(SwapError, match=r"step record of router@v2.*router@v1 still"):
            stage.operator.swap("router", 2)
    stage.wait(lambda: "router@v2" not in stage.engine.adapters)
    _assert_unchanged(stage)


def test_an_unload_that_fails_is_no_failed_swap(stage: Stage) -> None:
    stage.engine.faults.unload_status = 500
    assert not stage.operator.swap("router", 2)["unloaded"]
    assert _serves(stage, "router") == "router@v2"


def test_case_27cd_nothing_is_loaded_in_place_and_no_folder_changes(stage: Stage) -> None:
    assert "load_inplace" in FAULTS["c_folder_removed"]["steps"][0]
    assert "overwrite" in FAULTS["d_evicted"]["variant"]

    def snapshot() -> dict[str, tuple[bytes, int]]:
        files = stage.house.registry.root.glob("*/v*/*")
        return {str(f): (f.read_bytes(), f.stat().st_ino) for f in files}

    before = snapshot()
    for version in (2, 1, 2):
        stage.operator.swap("router", version)
    stage.house.publish("router")
    stage.operator.swap("router", 3)
    after = snapshot()
    assert {name: after[name] for name in before} == before
    bodies = stage.engine.bodies("/v1/load_lora_adapter")
    assert all(set(body) == {"lora_name", "lora_path"} for body in bodies)
    # One name, one folder, for good.
    assert len({b["lora_name"]: b["lora_path"] for b in bodies}) == len(
        {b["lora_path"] for b in bodies}
    )


def test_case_27e_a_restarted_engine_gets_its_adapters_back(stage: Stage) -> None:
    assert FAULTS["e_restart"]["GET /v1/models after restart"] == ["base only"]
    stage.operator.swap("router", 2)
    stage.engine.restart_empty()
    answer = stage.chat("router")
    assert (answer.status_code, answer.headers["X-Marft-Adapter"]) == (200, "router@v2")
    # All are back before it takes requests again.
    assert set(stage.engine.adapters) == {"router@v2", "writer@v1"}
    assert stage.states == ["ready"]


def test_case_27e_a_restarted_engine_is_noticed_without_a_request(house: House) -> None:
    with running_stage(house, pace=LOOK_OFTEN) as stage:
        stage.engine.restart_empty()
        stage.wait(lambda: set(stage.engine.adapters) == {"router@v1", "writer@v1"})
        stage.wait(lambda: stage.states == ["ready"])
        assert "engine-0 has lost adapters; they are loaded again" in stage.said


def test_case_27e_an_engine_that_cannot_load_again_is_a_clear_error(stage: Stage) -> None:
    stage.engine.restart_empty()
    stage.engine.faults.load_status = 500
    answer = stage.chat("router")
    assert answer.status_code == 503
    message = answer.json()["error"]["message"]
    assert "does not know router@v1 and could not load it again" in message
    assert answer.headers["Retry-After"]
    assert all(body["model"] != "base" for body in stage.engine.bodies("/v1/chat/completions"))


# -- who may swap ---------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", "wrong", "operator"])
def test_control_routes_need_the_operator_key(stage: Stage, key: str) -> None:
    headers = {"X-Marft-Operator-Key": key}
    body = {"agent": "router", "version": 2}
    assert stage.http.post(f"{stage.url}/marft/swap", json=body, headers=headers).status_code == 401
    assert stage.http.post(f"{stage.url}/marft/swap", json=body).status_code == 401
    assert stage.http.get(f"{stage.url}/marft/state", headers=headers).status_code == 401
    with (
        GatewayClient(stage.url, operator_key=key or "x") as client,
        pytest.raises(ServerError, match="operator key"),
    ):
        client.swap("router", 2)
    _assert_unchanged(stage)


@pytest.mark.parametrize("body", [{}, {"agent": "router"}, {"agent": 1, "version": 2}, [1], "x"])
def test_malformed_swaps_are_refused(stage: Stage, body: object) -> None:
    headers = {"X-Marft-Operator-Key": OPERATOR_KEY}
    answer = stage.http.post(f"{stage.url}/marft/swap", json=body, headers=headers)
    assert answer.status_code == 400
