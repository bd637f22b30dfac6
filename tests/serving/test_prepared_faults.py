"""Whatever goes wrong while a version is prepared, or swapped after that, on whichever replica: the
old version serves, nobody sees the new one, and it works when it is repeated.
"""

from __future__ import annotations

import pytest

from marft_agents.errors import SwapError
from marft_agents.registry import durable
from tests.serving.fake_engine import KINDS
from tests.serving.stage import LOOK_OFTEN, NEVER_LOOK, House, Stage, running_stage, short
from tests.serving.test_swap_faults import (
    AFTER,
    BEFORE,
    PLACES,
    Then,
    asking,
    break_one,
    loaded,
    mend,
    settled,
    swap_back,
)

PREPARED = {*BEFORE, "router@v2"}


def unchanged(stage: Stage, answers: set[str]) -> None:
    assert answers <= {"router@v1"}
    assert stage.chat("router@v2").status_code == 404
    assert stage.house.registry.current("router") == 1


@PLACES
@pytest.mark.parametrize("step", ["load", "list", "probe"])
def test_a_fault_while_it_is_prepared_leaves_nothing(
    house: House, replicas: int, faulty: int, step: str
) -> None:
    with running_stage(
        house, replicas=replicas, timeout_s=short(0.5), load_timeout_s=short(0.5), pace=NEVER_LOOK
    ) as stage:
        for kind in KINDS:
            break_one(stage.engines[faulty], step, kind)
            with asking(stage) as answers:
                if (step, kind) == ("load", "late"):  # it was done, which is found out
                    assert not stage.operator.prepare("router", 2)["already"]
                else:
                    named = "load" if step == "list" else step
                    match = f"step {named} of router@v2 on engine-{faulty}"
                    with pytest.raises(SwapError, match=match):
                        stage.operator.prepare("router", 2)
            unchanged(stage, answers)
            mend(stage.engines[faulty])
            if (step, kind) != ("load", "late"):
                settled(stage, BEFORE)
            stage.operator.prepare("router", 2)
            assert loaded(stage) == [PREPARED] * replicas, kind
            assert stage.operator.swap("router", 2)["prepared"], kind
            settled(stage, AFTER)
            swap_back(stage)


@PLACES
def test_an_engine_that_does_not_say_what_it_has_when_it_is_swapped(
    house: House, replicas: int, faulty: int
) -> None:
    with running_stage(
        house, replicas=replicas, timeout_s=short(0.5), load_timeout_s=short(0.5), pace=NEVER_LOOK
    ) as stage:
        for kind in KINDS:
            stage.operator.prepare("router", 2)
            break_one(stage.engines[faulty], "list", kind)
            match = f"step load of router@v2 on engine-{faulty}.*router@v1 still serves"
            with asking(stage) as answers, pytest.raises(SwapError, match=match):
                stage.operator.swap("router", 2)
            unchanged(stage, answers)
            mend(stage.engines[faulty])
            settled(stage, BEFORE)
            assert not stage.operator.swap("router", 2)["prepared"], kind
            swap_back(stage)


@pytest.mark.parametrize("step", ["load", "probe"])
def test_a_swap_after_it_needs_neither_load_nor_probe(house: House, step: str) -> None:
    with running_stage(house, replicas=3, timeout_s=short(0.5), load_timeout_s=short(0.5)) as stage:
        for kind in KINDS:
            stage.operator.prepare("router", 2)
            break_one(stage.engines[1], step, kind)
            with asking(stage) as answers:
                assert stage.operator.swap("router", 2)["prepared"], kind
                stage.wait(lambda seen=answers: "router@v2" in seen)
            assert answers <= {"router@v1", "router@v2"}
            mend(stage.engines[1])
            swap_back(stage)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("fault", ["prepare", "rename", "trail"])
def test_a_disk_that_fails_leaves_it_prepared_and_nothing_else(
    house: House, monkeypatch: pytest.MonkeyPatch, replicas: int, fault: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with running_stage(house, replicas=replicas) as stage, asking(stage) as answers:
        stage.operator.prepare("router", 2)
        with monkeypatch.context() as patch:
            broken: dict[str, tuple[object, str, object]] = {
                "prepare": (durable, "write_files", full),
                "rename": (durable, "fsync_folder", Then(full, durable.fsync_folder, 1)),
                "trail": (durable, "append_line", full),
            }
            patch.setattr(*broken[fault])
            with pytest.raises(SwapError, match=r"step record of router@v2.*router@v1 still"):
                stage.operator.swap("router", 2)
        unchanged(stage, answers)
        assert loaded(stage) == [PREPARED] * replicas
        assert not [*(house.registry.root / "router").glob(".*")], "nothing is left of the try"
        assert stage.operator.swap("router", 2)["prepared"]
        stage.wait(lambda: "router@v2" in answers)


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_expires_and_cannot_be_unloaded_is_unloaded_later(house: House, kind: str) -> None:
    with running_stage(
        house, timeout_s=short(0.3), load_timeout_s=short(0.3), pace=LOOK_OFTEN
    ) as stage:
        stage.gateway.swapper.preparations.keep_s = 0.02
        break_one(stage.engine, "unload", kind)
        stage.operator.prepare("router", 2)
        stage.wait(lambda: len(stage.engine.bodies("/v1/unload_lora_adapter")) > 0)
        assert stage.chat("router@v2").status_code == 404
        mend(stage.engine)
        settled(stage, BEFORE)
