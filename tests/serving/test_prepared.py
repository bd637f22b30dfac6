"""A version that is prepared is loaded and probed before its swap, which then does neither again.

Whatever could make the preparation worth nothing (another engine, an adapter that is gone, other
files) leads to the whole swap, never to one that trusts it.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest

from marft_agents.errors import ServerError, SwapError
from marft_agents.registry import Change
from marft_agents.serving.calls import AnswerError
from marft_agents.serving.gateway_client import GatewayClient
from tests.serving.fake_engine import FakeEngine
from tests.serving.stage import LOOK_OFTEN, House, Stage, running_stage

CURRENT = {"router@v1", "writer@v1"}
BOTH = {*CURRENT, "router@v2"}
BACK = Change("me", action="rollback")


def asked(engine: FakeEngine) -> tuple[int, int]:
    """How often an engine was asked to load, and to compute log-probabilities."""
    loads = len(engine.bodies("/v1/load_lora_adapter"))
    return loads, sum("prompt_logprobs" in body for body in engine.bodies("/v1/completions"))


def told(stage: Stage, agent: str = "router") -> dict[str, Any]:
    return stage.operator.state()["agents"][agent]


def answers(stage: Stage, model: str = "router") -> str | int:
    answer = stage.chat(model)
    return answer.headers.get("X-Marft-Adapter", answer.status_code)


def assert_nothing_prepared(stage: Stage) -> None:
    stage.wait(lambda: all(set(engine.adapters) == CURRENT for engine in stage.engines))
    assert told(stage)["prepared"] is None and told(stage)["kept"] == {"router@v1": "current"}


# -- what a preparation saves, and what it leaves alone -------------------------------------------


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_swap_of_a_prepared_version_neither_loads_nor_probes(house: House, replicas: int) -> None:
    with running_stage(house, replicas=replicas) as stage:
        done = stage.operator.prepare("Router", 2)
        assert (done["agent"], done["version"], done["already"]) == ("router", 2, False)
        assert done["probe"]["against"] == "trainer" and done["probe"]["effect"] > 0.1
        assert set(done["seconds"]) >= {"check", "load", "probe"}
        assert house.registry.current("router") == 1
        before = [asked(engine) for engine in stage.engines]
        swapped = stage.operator.swap("router", 2, Change("me"))
        assert swapped["prepared"] and swapped["probe"] == done["probe"]
        assert set(swapped["seconds"]) == {"check", "list", "prepare", "record"}
        assert [asked(engine) for engine in stage.engines] == before
        assert {answers(stage) for _ in range(6)} == {"router@v2"}
        evidence = house.registry.audit("router")[-1]["evidence"]
        assert evidence["probe"] == done["probe"] and evidence["prepared"] < done["until"]
        assert told(stage)["prepared"] is None
        back = stage.operator.swap("router", 1)
        assert not back["prepared"], "its last request had ended, so it was unloaded"
        assert "prepared" not in house.registry.audit("router")[-1]["evidence"]


def test_a_prepared_version_gets_no_request(stage: Stage) -> None:
    done = stage.operator.prepare("router", 2)
    assert set(stage.engine.adapters) == BOTH
    state = told(stage)
    assert state["prepared"] == {"version": 2, "until": done["until"]}
    assert state["kept"] == {"router@v1": "current", "router@v2": "prepared"}
    assert (state["current"], state["served"]) == (1, ["router@v1", "router@v2"])
    assert answers(stage) == "router@v1" and answers(stage, "router@v2") == 404
    assert stage.operator.swap("router", 2)["prepared"]
    assert answers(stage, "router@v2") == "router@v2"


def test_saying_it_again_keeps_it_anew_and_does_nothing_else(stage: Stage) -> None:
    stage.gateway.swapper.preparations.keep_s = 100.0
    first = stage.operator.prepare("router", 2)
    stage.gateway.swapper.preparations.keep_s = 10_000.0
    before = asked(stage.engine)
    again = stage.operator.prepare("router", 2)
    assert again["already"] and again["probe"] == first["probe"]
    assert again["until"] > first["until"] and asked(stage.engine) == before


def test_another_version_of_the_agent_takes_its_place(stage: Stage) -> None:
    stage.house.publish("router")
    stage.house.publish("writer")
    stage.operator.prepare("router", 2)
    stage.operator.prepare("writer", 2)
    stage.operator.prepare("router", 3)
    stage.wait(lambda: set(stage.engine.adapters) == {*CURRENT, "router@v3", "writer@v2"})
    assert (told(stage)["prepared"]["version"], told(stage, "writer")["prepared"]["version"]) == (
        3,
        2,
    )
    assert not stage.operator.swap("router", 2)["prepared"]
    assert stage.operator.swap("router", 3)["prepared"], "it is kept beside another swap"


def test_it_is_kept_for_a_while_only(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stage.gateway.swapper.preparations.keep_s = 0.05
    stage.operator.prepare("router", 2)
    assert_nothing_prepared(stage)
    assert "expired agent=router version=2" in caplog.text
    before = asked(stage.engine)
    assert not stage.operator.swap("router", 2)["prepared"]
    assert asked(stage.engine) == (before[0] + 1, before[1] + 1)


def test_an_old_time_does_not_end_what_was_prepared_anew(stage: Stage) -> None:
    preparations = stage.gateway.swapper.preparations
    preparations.keep_s = 0.2
    stage.operator.prepare("router", 2)
    stage.operator.swap("router", 2)
    stage.operator.swap("router", 1)
    preparations.keep_s = 600.0
    stage.operator.prepare("router", 2)
    stage.house.publish("writer")
    preparations.keep_s = 0.3
    stage.operator.prepare("writer", 2)  # goes after the time that router@v2 first had
    stage.wait(lambda: "writer@v2" not in stage.engine.adapters)
    assert "router@v2" in stage.engine.adapters and stage.operator.swap("router", 2)["prepared"]


# -- when a preparation is worth nothing any more -------------------------------------------------


def assert_whole_swap(stage: Stage) -> None:
    before = [asked(engine) for engine in stage.engines]
    done = stage.operator.swap("router", 2)
    assert not done["prepared"] and {"load", "probe"} <= set(done["seconds"])
    assert [asked(e)[1] for e in stage.engines] == [probes + 1 for _, probes in before]
    assert answers(stage) == "router@v2"
    assert "prepared" not in stage.house.registry.audit("router")[-1]["evidence"]


def test_an_engine_that_was_restarted_has_to_prove_it_again(house: House) -> None:
    with running_stage(house, replicas=2, pace=LOOK_OFTEN) as stage:
        stage.operator.prepare("router", 2)
        stage.engines[1].restart_empty()
        stage.wait(lambda: "engine-1 takes requests" in stage.said)
        assert set(stage.engines[0].adapters) == BOTH and set(stage.engines[1].adapters) == CURRENT
        assert_whole_swap(stage)


def test_also_one_that_has_the_adapter_again_when_it_is_back(house: House) -> None:
    """As an engine that loads adapters at its start would: its list is no proof."""
    with running_stage(house, replicas=2, pace=LOOK_OFTEN) as stage:
        stage.operator.prepare("router", 2)
        stage.engines[1].faults.unwell = True
        stage.wait(lambda: stage.states == ["ready", "down"])
        stage.engines[1].faults.unwell = False
        stage.wait(lambda: stage.states == ["ready", "ready"])
        assert set(stage.engines[1].adapters) == BOTH
        stage.engines[1].faults.extra_effect = 0.05
        with pytest.raises(SwapError, match="step probe of router@v2 on engine-1"):
            stage.operator.swap("router", 2)
        stage.engines[1].faults.extra_effect = 0.0
        assert_nothing_prepared(stage)
        assert answers(stage) == "router@v1"
        assert_whole_swap(stage)


def test_an_engine_that_lost_it_gets_it_again(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with running_stage(house, replicas=2) as stage:
        stage.operator.prepare("router", 2)
        del stage.engines[1].adapters["router@v2"]
        assert_whole_swap(stage)
        assert "router@v2 is loaded and probed once more" in caplog.text
        assert "does not list it" in caplog.text


def test_under_its_name_from_elsewhere_is_not_it(stage: Stage) -> None:
    stage.operator.prepare("router", 2)
    stage.engine.adapters["router@v2"] = "/elsewhere/router/v0002"
    with pytest.raises(SwapError, match="step load of router@v2"):
        stage.operator.swap("router", 2)
    assert answers(stage) == "router@v1"


def test_an_engine_that_does_not_say_what_it_has_is_asked_to_load(house: House) -> None:
    with running_stage(house, timeout_s=0.5) as stage:
        stage.operator.prepare("router", 2)
        stage.engine.faults.at["list"] = "refuse"
        with pytest.raises(SwapError, match="step load of router@v2"):
            stage.operator.swap("router", 2)
        stage.engine.faults.at.clear()
        assert_nothing_prepared(stage)
        assert_whole_swap(stage)


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
def test_files_that_changed_since_are_refused(stage: Stage, file: str) -> None:
    stage.operator.prepare("router", 2)
    path = stage.house.registry.path("router", 2) / file
    whole = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(SwapError, match=r"step check of router@v2.*checksum.*router@v1 still"):
        stage.operator.swap("router", 2)
    assert_nothing_prepared(stage)
    path.write_bytes(whole)
    assert_whole_swap(stage)


def test_files_that_were_touched_are_compared_again(stage: Stage) -> None:
    stage.operator.prepare("router", 2)
    path = stage.house.registry.path("router", 2) / "manifest.json"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes())
    assert_whole_swap(stage)


def test_a_version_that_is_gone_is_refused(stage: Stage) -> None:
    stage.operator.prepare("router", 2)
    folder = stage.house.registry.path("router", 2)
    folder.rename(folder.with_name("elsewhere"))
    with pytest.raises(SwapError, match=r"no version 2.*router@v1 still serves"):
        stage.operator.swap("router", 2)
    assert answers(stage) == "router@v1"


def test_what_may_not_be_moved_is_not_moved(stage: Stage) -> None:
    stage.operator.prepare("router", 2)
    stage.house.registry.pin("router")
    refused = r"step check of router@v2: .*pinned to version 1.*router@v1 still serves"
    with pytest.raises(SwapError, match=refused):
        stage.operator.swap("router", 2)
    assert answers(stage) == "router@v1" and told(stage)["prepared"]["version"] == 2
    assert stage.operator.swap("router", 2, Change("me", force=True))["prepared"]


@pytest.mark.parametrize("method", ["prepare_move", "commit_move"])
def test_a_disk_that_refuses_leaves_it_prepared(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    stage.operator.prepare("router", 2)
    with monkeypatch.context() as patch:
        patch.setattr(stage.house.registry, method, full)
        with pytest.raises(SwapError, match=r"step record of router@v2.*router@v1 still"):
            stage.operator.swap("router", 2)
    assert answers(stage) == "router@v1" and stage.house.registry.current("router") == 1
    assert told(stage)["prepared"]["version"] == 2 and answers(stage, "router@v2") == 404
    assert stage.operator.swap("router", 2)["prepared"]


# -- what an earlier server left ------------------------------------------------------------------


def test_what_an_earlier_server_prepared_is_taken_out(house: House) -> None:
    with running_stage(house, pace=LOOK_OFTEN) as stage:
        stage.engine.adapters["router@v2"] = str(house.registry.path("router", 2))
        assert_nothing_prepared(stage)


def test_what_an_earlier_server_prepared_is_not_trusted(stage: Stage) -> None:
    stage.engine.adapters["router@v2"] = str(stage.house.registry.path("router", 2))
    stage.engine.faults.extra_effect = 0.05
    with pytest.raises(SwapError, match="step probe of router@v2"):
        stage.operator.swap("router", 2)
    stage.engine.faults.extra_effect = 0.0
    assert_whole_swap(stage)


# -- preparations that fail -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agent", "version", "message"),
    [
        ("router", 1, "router@v1 is in use already"),
        ("router", 9, "no version 9.*it has 1, 2"),
        ("nobody", 1, "no agent 'nobody'"),
        ("base", 1, "reserved"),
    ],
)
def test_what_cannot_be_prepared(stage: Stage, agent: str, version: int, message: str) -> None:
    before = asked(stage.engine)
    with pytest.raises(SwapError, match=message):
        stage.operator.prepare(agent, version)
    assert asked(stage.engine) == before
    assert_nothing_prepared(stage)


@pytest.mark.parametrize(
    ("fault", "value", "message"),
    [
        ("load_status", 500, "step load of router@v2 on engine-1.*what serves is as before"),
        ("extra_effect", 0.05, "step probe of router@v2 on engine-1.*not answer as it was trained"),
    ],
)
def test_one_engine_that_fails_leaves_it_prepared_nowhere(
    house: House, fault: str, value: Any, message: str
) -> None:
    with running_stage(house, replicas=2) as stage:
        setattr(stage.engines[1].faults, fault, value)
        with pytest.raises(SwapError, match=message):
            stage.operator.prepare("router", 2)
        assert_nothing_prepared(stage)
        assert len(house.registry.audit("router")) == 2, "the trail is of what moves"


def test_preparing_wants_the_operator(stage: Stage) -> None:
    with (
        GatewayClient(stage.url, operator_key="x") as client,
        pytest.raises(ServerError, match="operator key"),
    ):
        client.prepare("router", 2)
    url, headers = f"{stage.url}/marft/prepare", {"X-Marft-Operator-Key": "wrong"}
    assert stage.http.post(url, json={}, headers=headers).status_code == 401
    for body in ({"agent": "router"}, {"agent": "router", "version": 2, "share": 1}):
        with pytest.raises(AnswerError, match="send") as caught:
            stage.operator._post("prepare", body, sign="until")  # pyright: ignore[reportPrivateUsage] what no method sends
        assert caught.value.status == 400


def test_a_server_that_stops_prepares_nothing(stage: Stage) -> None:
    stage.gateway.fleet.stopping = True
    with pytest.raises(AnswerError, match="being stopped"):
        stage.operator.prepare("router", 2)
    stage.gateway.fleet.stopping = False
    assert_nothing_prepared(stage)
