"""Whatever goes wrong at whichever step on whichever replica: the old version serves, nobody sees
the new one, nothing stays loaded, and the swap works when it is repeated.

Case 27: every call has a time-out and is safe to repeat.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator

import pytest

from marft_agents.errors import RegistryError, ServerError, SwapError
from marft_agents.registry import durable
from marft_agents.serving import loader
from marft_agents.serving.gateway_client import GatewayClient
from tests.serving.fake_engine import KINDS, FakeEngine
from tests.serving.stage import (
    LOOK_OFTEN,
    NEVER_LOOK,
    OPERATOR_KEY,
    House,
    Stage,
    running_stage,
    short,
)

BEFORE = {"router@v1", "writer@v1"}
AFTER = {"router@v2", "writer@v1"}
PLACES = pytest.mark.parametrize(("replicas", "faulty"), [(1, 0), (3, 0), (3, 2)])


@contextlib.contextmanager
def asking(stage: Stage) -> Generator[set[str]]:
    """Ask all the time; which versions answered."""
    answers: set[str] = set()
    stop = threading.Event()

    def ask() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            headers = {"X-Marft-Episode": f"e{turn}"}
            body = {"model": "router", "messages": []}
            url = f"{stage.url}/v1/chat/completions"
            answer = stage.http.post(url, json=body, headers=headers)
            answers.add(answer.headers.get("X-Marft-Adapter", answer.text))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answers
    finally:
        stop.set()
        thread.join()
        # Episodes keep their version; the next swap is not to wait for them.
        stage.gateway.aliases.leases.drop("router")


def loaded(stage: Stage) -> list[set[str]]:
    return [set(engine.adapters) for engine in stage.engines]


def swap_back(stage: Stage) -> None:
    assert stage.operator.swap("router", 1)["to"] == 1
    stage.wait(lambda: all(names == BEFORE for names in loaded(stage)))


def settled(stage: Stage, names: set[str]) -> None:
    stage.wait(lambda: all(found == names for found in loaded(stage)))


def break_one(engine: FakeEngine, step: str, kind: str) -> None:
    engine.release.clear()
    engine.faults.at[step] = kind


def mend(engine: FakeEngine) -> None:
    engine.faults.at.clear()
    engine.release.set()


@PLACES
@pytest.mark.parametrize("step", ["load", "list", "probe"])
def test_a_fault_before_the_alias_moves_changes_nothing(
    house: House, replicas: int, faulty: int, step: str
) -> None:
    with running_stage(
        house, replicas=replicas, timeout_s=short(0.4), load_timeout_s=short(0.4), pace=NEVER_LOOK
    ) as stage:
        engine = stage.engines[faulty]
        for kind in KINDS:
            break_one(engine, step, kind)
            if (step, kind) == ("load", "late"):  # it was done, which is found out
                assert stage.operator.swap("router", 2)["to"] == 2, kind
                mend(engine)
                swap_back(stage)
                continue
            with asking(stage) as answers, pytest.raises(SwapError) as caught:
                stage.operator.swap("router", 2)
            named = "load" if step == "list" else step
            for part in (f"step {named} of router@v2 on engine-{faulty}", "router@v1 still serves"):
                assert part in str(caught.value), kind
            assert answers <= {"router@v1"}, kind
            assert stage.chat("router@v2").status_code == 404, kind
            assert stage.operator.state()["agents"]["router"]["served"] == ["router@v1"], kind
            assert stage.house.registry.current("router") == 1, kind
            mend(engine)
            assert loaded(stage) == [BEFORE] * replicas, kind
            assert stage.operator.swap("router", 2)["to"] == 2, kind
            assert loaded(stage) == [AFTER] * replicas, kind
            swap_back(stage)


@PLACES
@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_unloaded_is_unloaded_later(
    house: House, replicas: int, faulty: int, kind: str
) -> None:
    with running_stage(
        house, replicas=replicas, timeout_s=short(0.3), load_timeout_s=short(0.3), pace=LOOK_OFTEN
    ) as stage:
        engine = stage.engines[faulty]
        # The way back after a failed probe ...
        break_one(engine, "unload", kind)
        engine.faults.extra_effect = 0.05
        with pytest.raises(SwapError, match=f"step probe of router@v2 on engine-{faulty}"):
            stage.operator.swap("router", 2)
        assert stage.chat().headers["X-Marft-Adapter"] == "router@v1"
        assert stage.chat("router@v2").status_code == 404
        engine.faults.extra_effect = 0.0
        # ... and the old version after a swap.
        assert stage.operator.swap("router", 2)["to"] == 2
        assert stage.chat().headers["X-Marft-Adapter"] == "router@v2"
        mend(engine)
        settled(stage, AFTER)
        swap_back(stage)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("fault", ["prepare", "lock", "commit", "rename", "trail"])
def test_a_version_that_cannot_be_recorded_goes_from_every_replica(
    house: House, monkeypatch: pytest.MonkeyPatch, replicas: int, fault: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    def locked(*_: object, **__: object) -> None:
        raise RegistryError("another process has been changing it for 60 s")

    with running_stage(house, replicas=replicas) as stage, asking(stage) as answers:
        with monkeypatch.context() as patch:
            broken: dict[str, tuple[object, str, object]] = {
                "prepare": (durable, "write_files", full),
                "lock": (house.registry, "prepare_move", locked),
                "commit": (house.registry, "commit_move", full),
                "rename": (durable, "fsync_folder", Then(full, durable.fsync_folder, 1)),
                "trail": (durable, "append_line", full),
            }
            patch.setattr(*broken[fault])
            with pytest.raises(SwapError, match=r"step record of router@v2.*router@v1 still"):
                stage.operator.swap("router", 2)
        settled(stage, BEFORE)
        assert answers <= {"router@v1"}
        assert house.registry.current("router") == 1
        assert not [*(house.registry.root / "router").glob(".*")], "nothing is left of the try"
        assert stage.operator.swap("router", 2)["to"] == 2
        stage.wait(lambda: "router@v2" in answers)


def test_a_line_that_the_disk_does_not_confirm_is_said_and_kept(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with running_stage(house) as stage:
        with monkeypatch.context() as patch:
            patch.setattr(durable, "flush_file", flush := Then(broken, durable.flush_file, 2))
            assert stage.operator.swap("router", 2)["to"] == 2
        assert flush.calls == 3, "the next CURRENT, the line beforehand, and then the trail"
        assert "the disk does not confirm its line" in caplog.text
        assert house.registry.current("router") == 2
        swap_back(stage)  # nobody is kept from the registry
        told = [(e["from"], e["to"]) for e in house.registry.audit("router") if e["from"]]
        assert told == [(1, 2), (2, 1)]


def _probes(engine: FakeEngine) -> int:
    return sum(seen.path == "/v1/completions" for seen in engine.seen)


class Then:
    """As before for a number of calls, then otherwise."""

    def __init__(self, then: Callable[..., None], before: Callable[..., None], times: int) -> None:
        self.calls, self._times, self._before, self._then = 0, times, before, then

    def __call__(self, *arguments: object) -> None:
        self.calls += 1
        (self._before if self.calls <= self._times else self._then)(*arguments)


@pytest.mark.parametrize("refused", [False, True])
def test_long_weights_that_are_not_those_published_get_no_request(
    house: House, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """They are compared while the engine loads them, which may fail for the same reason."""
    monkeypatch.setattr(loader, "LONG_FILE", 10)
    weights = house.registry.path("router", 2) / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.chmod(0o644)
    with running_stage(house, replicas=2) as stage:
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        if refused:
            stage.engines[0].faults.load_status = 500
        probes = [_probes(engine) for engine in stage.engines]
        with asking(stage) as answers, pytest.raises(SwapError) as caught:
            stage.operator.swap("router", 2)
        for part in ("step check of router@v2", "checksum", "router@v1 still serves"):
            assert part in str(caught.value)
        assert answers <= {"router@v1"}
        assert [_probes(engine) for engine in stage.engines] == probes
        assert loaded(stage) == [BEFORE] * 2
        weights.write_bytes(whole)
        stage.engines[0].faults.load_status = 200
        assert stage.operator.swap("router", 2)["to"] == 2


def test_the_whole_swap_has_a_limit(house: House) -> None:
    with running_stage(
        house, replicas=3, timeout_s=2.0, load_timeout_s=2.0, deadline_s=0.2, pace=LOOK_OFTEN
    ) as stage:
        break_one(stage.engines[1], "load", "hang")
        with pytest.raises(SwapError, match=r"load of router@v2 on engine-1: it did not end in"):
            stage.operator.swap("router", 2)
        assert loaded(stage) == [BEFORE] * 3
        mend(stage.engines[1])
        assert stage.operator.swap("router", 2)["to"] == 2
        settled(stage, AFTER)


def test_a_swap_may_be_repeated_after_the_operator_gave_up(house: House) -> None:
    with running_stage(house, replicas=2, load_timeout_s=1.0) as stage:
        break_one(stage.engines[1], "load", "hang")
        with (
            GatewayClient(stage.url, operator_key=OPERATOR_KEY, swap_timeout_s=0.2) as hasty,
            pytest.raises(ServerError, match=r"no answer within 0\.2 s; it goes on there"),
        ):
            hasty.swap("router", 2)
        mend(stage.engines[1])
        assert stage.operator.swap("router", 2)["to"] == 2
        settled(stage, AFTER)


def test_every_replica_that_failed_is_named(house: House) -> None:
    with running_stage(house, replicas=3) as stage:
        for i in (0, 2):
            stage.engines[i].faults.load_status = 500
        with pytest.raises(SwapError, match=r"router@v2 on engine-0.*router@v2 on engine-2"):
            stage.operator.swap("router", 2)
        assert loaded(stage) == [BEFORE] * 3


def test_a_load_that_ends_after_its_time_is_found_and_taken_out(house: House) -> None:
    with running_stage(house, replicas=2, load_timeout_s=0.2, pace=LOOK_OFTEN) as stage:
        engine = stage.engines[1]
        engine.faults.hang_loads = True
        with pytest.raises(SwapError, match="step load of router@v2 on engine-1"):
            stage.operator.swap("router", 2)
        engine.adapters["router@v2"] = str(house.registry.path("router", 2))
        stage.wait(lambda: "router@v2" not in engine.adapters)


def test_what_others_loaded_is_left_alone(house: House) -> None:
    with running_stage(house, pace=LOOK_OFTEN) as stage:
        stage.engine.adapters["router@v9"] = "/elsewhere/router/v0009"
        stage.engine.adapters["mine"] = str(house.registry.path("router", 2))
        stage.engine.adapters["router@v2"] = str(house.registry.path("router", 2))
        stage.wait(lambda: "router@v2" not in stage.engine.adapters)
        assert {"router@v9", "mine"} <= set(stage.engine.adapters)
