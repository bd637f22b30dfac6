"""A canary from its start to its end: a share, a watch, and a way back that needs nobody."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import ServerError, SwapError
from marft_agents.registry import Bounds, Change, durable
from tests.serving.conftest import furnished
from tests.serving.stage import OPERATOR_KEY, House, Stage, running_stage

ME = Change("me", "test")
QUICK = Bounds(min_requests=20, for_s=3600)


@pytest.fixture
def house(tmp_path: Path) -> House:
    """router: v1 untrained (current), v2, v3; writer: v1."""
    house = furnished(tmp_path)
    house.publish("router")
    return house


@pytest.fixture
def stage(house: House) -> Iterator[Stage]:
    with running_stage(house) as stage:
        yield stage


def ask(stage: Stage, episode: str | None = None) -> str:
    """The version that answered, or the status of a failure."""
    headers = {} if episode is None else {"X-Marft-Episode": episode}
    body = {"model": "router", "messages": [{"role": "user", "content": "?"}]}
    answer = stage.http.post(f"{stage.url}/v1/chat/completions", json=body, headers=headers)
    return answer.headers["X-Marft-Adapter"]


def told(stage: Stage) -> dict[str, Any]:
    return stage.operator.state()["agents"]["router"]


def trail(stage: Stage) -> list[tuple[Any, ...]]:
    lines = [e for e in stage.house.registry.audit("router") if e["action"] != "publish"]
    return [(e["action"], e["from"], e["to"], e["current"]) for e in lines]


def episodes_of(stage: Stage, version: int, count: int) -> list[str]:
    """Names of episodes that the running canary's split gives to a version."""
    split = stage.gateway.aliases.split("router")
    assert split is not None
    canary = split.version == version
    names = (f"e{n}" for n in range(10_000))
    found = (name for name in names if split.takes("router", name) is canary)
    return [next(found) for _ in range(count)]


def fill(stage: Stage, each: int = 20) -> None:
    """As many requests for each side, each of an episode of its own."""
    split = stage.gateway.aliases.split("router")
    assert split is not None
    for name in (*episodes_of(stage, 1, each), *episodes_of(stage, split.version, each)):
        ask(stage, name)


# -- share ----------------------------------------------------------------------------------------


def test_a_share_of_the_episodes_and_current_stays(stage: Stage) -> None:
    assert ask(stage, "before") == "router@v1"
    done = stage.operator.canary("router", 2, 0.3, ME, bounds=QUICK)
    assert (done["from"], done["version"], done["share"], done["changed"]) == (1, 2, 0.3, True)
    assert ask(stage, "before") == "router@v1", "an episode keeps what it began with"
    got = {name: ask(stage, name) for name in (f"e{n}" for n in range(60))}
    count = sum(name == "router@v2" for name in got.values())
    assert abs(count - 18) < 3.3 * math.sqrt(60 * 0.3 * 0.7)
    assert all(ask(stage, name) == version for name, version in got.items())
    assert stage.house.registry.current("router") == 1
    state = told(stage)
    assert state["kept"] == {
        "router@v1": f"current, {61 - count} leases",
        "router@v2": f"canary, {count} lease{'s' * (count != 1)}",
    }
    assert state["canary"]["seen"]["version"]["requests"] == 2 * count
    assert state["canary"]["seen"]["incumbent"]["requests"] == 2 * (60 - count) + 1
    assert "key" not in state["canary"]
    assert trail(stage) == [("canary", 1, 2, 1)]


def test_saying_it_again_changes_nothing_and_another_share_keeps_the_episodes(
    stage: Stage,
) -> None:
    stage.operator.canary("router", 2, 0.3, ME, bounds=QUICK)
    mine = episodes_of(stage, 2, 5)
    assert not stage.operator.canary("router", 2, 0.3, ME, bounds=QUICK)["changed"]
    assert trail(stage) == [("canary", 1, 2, 1)]
    ask(stage, mine[0])
    done = stage.operator.canary("router", 2, 0.6, ME, bounds=QUICK)
    assert done["changed"] and done["seen"]["version"]["requests"] == 0, "the window begins anew"
    assert {ask(stage, name) for name in mine} == {"router@v2"}
    assert trail(stage) == [("canary", 1, 2, 1)] * 2
    assert stage.engine.events.count("load router@v2") == 1


@pytest.mark.parametrize("now", [False, True])
def test_stop_leaves_episodes_alone_unless_they_are_to_move_now(stage: Stage, now: bool) -> None:
    stage.operator.canary("router", 2, 0.5, ME)
    (mine,) = episodes_of(stage, 2, 1)
    assert ask(stage, mine) == "router@v2"
    done = stage.operator.stop_canary("router", ME, now=now)
    assert (done["version"], done["leases"], done["unloaded"]) == (2, 1 - now, now)
    assert ask(stage, mine) == ("router@v1" if now else "router@v2")
    assert told(stage)["canary"] is None and told(stage)["ended"]["how"] == "stopped"
    stage.operator.release([mine])
    stage.wait(lambda: "router@v2" not in stage.engine.adapters)
    assert stage.operator.stop_canary("router", ME)["version"] is None
    assert trail(stage) == [("canary", 1, 2, 1), ("canary-stop", 2, 1, 1)]
    evidence = stage.house.registry.audit("router")[-1]["evidence"]
    assert evidence["version"]["requests"] == 1


# -- the watch ------------------------------------------------------------------------------------


def test_a_worse_canary_is_taken_out_and_its_episodes_move_over(stage: Stage) -> None:
    stage.operator.canary("router", 2, 0.5, ME, bounds=QUICK)
    (mine,) = episodes_of(stage, 2, 1)
    stage.engine.faults.broken = "router@v2"
    fill(stage)
    stage.wait(lambda: told(stage)["canary"] is None)
    assert ask(stage, mine) == "router@v1"
    stage.wait(lambda: "router@v2" not in stage.engine.adapters)
    stage.wait(lambda: trail(stage)[1:] == [("canary-rollback", 2, 1, 1)])
    line = stage.house.registry.audit("router")[-1]
    assert line["who"] == "automatic"
    assert line["evidence"]["version"]["failed"] == 20 and line["evidence"]["moved"] == 20
    assert "100.0% of its requests failed, 0.0% of the other's" in line["evidence"]["worse"][0]
    assert told(stage)["ended"]["how"] == "rolled back"
    assert stage.house.registry.canary("router") is None


def test_a_disk_that_is_full_does_not_keep_a_bad_canary_alive(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    stage.operator.canary("router", 2, 0.5, ME, bounds=QUICK)
    stage.engine.faults.broken = "router@v2"
    with monkeypatch.context() as patch:
        patch.setattr(durable, "append_line", full)
        fill(stage)
        stage.wait(lambda: "router@v2" not in stage.engine.adapters)
        # It is put back where its line cannot be written; between the two it is not there.
        stage.wait(lambda: stage.house.registry.canary("router") is not None)
    canaries = stage.gateway.canaries
    canaries._retry_at = 0.0  # pyright: ignore[reportPrivateUsage] it is tried again later
    stage.wait(lambda: stage.house.registry.canary("router") is None)
    assert trail(stage)[-1] == ("canary-rollback", 2, 1, 1)


@pytest.mark.parametrize("then", ["tell", "promote", "stop"])
def test_a_canary_that_stood_the_test(stage: Stage, then: Any) -> None:
    bounds = QUICK.model_copy(update={"for_s": 0.05})
    stage.operator.canary("router", 2, 0.5, ME, bounds=bounds, then=then)
    fill(stage)
    done = {"tell": "canary-passed", "promote": "promote", "stop": "canary-stop"}[then]
    stage.wait(lambda: trail(stage)[-1][0] == done)
    stage.wait(lambda: (told(stage)["canary"] is None) == (then != "tell"))
    assert [line[0] for line in trail(stage)][:2] == ["canary", "canary-passed"]
    assert told(stage)["current"] == (2 if then == "promote" else 1)
    assert stage.house.registry.current("router") == told(stage)["current"]
    if then == "tell":
        assert told(stage)["canary"]["passed"] and len(trail(stage)) == 2
        assert told(stage)["canary"]["remaining_s"] == 0
    if then == "promote":
        line = stage.house.registry.audit("router")[-1]
        assert (line["who"], line["command"]) == ("me", "canary --then promote")
        assert line["evidence"]["version"]["requests"] == 20
    assert (stage.house.registry.canary("router") is None) == (then != "tell")


def test_the_window_waits_for_requests(stage: Stage) -> None:
    bounds = QUICK.model_copy(update={"for_s": 0.01})
    stage.operator.canary("router", 2, 0.5, ME, bounds=bounds, then="promote")
    fill(stage, each=19)
    stage.wait(lambda: told(stage)["canary"]["remaining_s"] == 0)
    assert told(stage)["current"] == 1 and not told(stage)["canary"]["seen"]["enough"]
    fill(stage, each=25)
    stage.wait(lambda: told(stage)["current"] == 2)


# -- beside other changes -------------------------------------------------------------------------


def test_promoting_the_canary_ends_it(stage: Stage) -> None:
    stage.operator.canary("router", 2, 0.5, ME)
    (mine,) = episodes_of(stage, 2, 1)
    ask(stage, mine)
    assert stage.operator.swap("router", 2, ME)["from"] == 1
    assert told(stage)["canary"] is None and told(stage)["ended"]["how"] == "promoted"
    assert ask(stage, mine) == "router@v2" == ask(stage, "another")
    assert trail(stage) == [("canary", 1, 2, 1), ("promote", 1, 2, 2)]
    evidence = stage.house.registry.audit("router")[-1]["evidence"]
    assert evidence["canary"]["version"]["requests"] == 1


def test_promoting_another_is_refused_but_by_force(stage: Stage) -> None:
    stage.operator.canary("router", 2, 0.5, ME)
    with pytest.raises(SwapError, match=r"version 2 .* is a canary; .*router@v1 still serves"):
        stage.operator.swap("router", 3, ME)
    assert told(stage)["canary"] is not None and "router@v3" not in stage.engine.adapters
    assert stage.operator.swap("router", 1, ME)["to"] == 1, "the one in use may be probed again"
    assert told(stage)["canary"] is not None
    stage.operator.swap("router", 3, Change("me", force=True))
    assert told(stage)["canary"] is None
    stage.wait(lambda: set(told(stage)["kept"]) == {"router@v3"})
    assert [line[0] for line in trail(stage)] == ["canary", "promote", "canary-stop", "promote"]


def test_a_rollback_ends_it_and_moves_everybody(stage: Stage) -> None:
    stage.operator.swap("router", 3, ME)
    stage.operator.canary("router", 2, 0.5, ME)
    (mine, other) = (*episodes_of(stage, 2, 1), *episodes_of(stage, 3, 1))
    assert (ask(stage, mine), ask(stage, other)) == ("router@v2", "router@v3")
    done = stage.operator.swap("router", 1, Change("me", action="rollback"))
    assert (done["moved"], done["leases"]) == (2, 0)
    assert {ask(stage, mine), ask(stage, other)} == {"router@v1"}
    stage.wait(lambda: set(stage.engine.adapters) == {"router@v1", "writer@v1"})


def test_a_promotion_that_fails_leaves_the_canary_as_it_was(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    stage.operator.canary("router", 2, 0.5, ME)
    (mine,) = episodes_of(stage, 2, 1)
    ask(stage, mine)
    with monkeypatch.context() as patch:
        patch.setattr(stage.house.registry, "commit_move", full)
        with pytest.raises(SwapError, match=r"step record of router@v2"):
            stage.operator.swap("router", 2, ME)
    stage.gateway.fleet.replicas[0].loader.proofs.forget()  # or it is not probed once more
    stage.engine.faults.extra_effect = 0.5
    with pytest.raises(SwapError, match=r"step probe of router@v2"):
        stage.operator.swap("router", 2, ME)
    assert told(stage)["canary"]["version"] == 2 and ask(stage, mine) == "router@v2"
    assert "router@v2" in stage.engine.adapters


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (1, "router@v1 is in use"),
        (9, "no version 9"),
        (2, "step probe of router@v2.*not answer as it was trained"),
    ],
)
def test_what_cannot_be_a_canary(stage: Stage, version: int, message: str) -> None:
    stage.engine.faults.extra_effect = 0.5 if version == 2 else 0.0
    with pytest.raises(SwapError, match=message):
        stage.operator.canary("router", version, 0.5, ME)
    assert told(stage)["canary"] is None and trail(stage) == []
    stage.wait(lambda: set(stage.engine.adapters) == {"router@v1", "writer@v1"})
    with pytest.raises(SwapError, match="no agent 'nobody'"):
        stage.operator.canary("nobody", 2, 0.5, ME)


# -- restarts -------------------------------------------------------------------------------------


def test_a_restarted_server_goes_on_with_it(house: House) -> None:
    with running_stage(house) as stage:
        stage.operator.canary("router", 2, 0.5, ME, bounds=QUICK)
        (mine,) = episodes_of(stage, 2, 1)
    with running_stage(house) as stage:
        stage.wait(lambda: "router@v2" in stage.engine.adapters)
        stage.wait(lambda: "seen" in (told(stage)["canary"] or {}))
        assert ask(stage, mine) == "router@v2", "the same episodes as before"
        assert 3500 < told(stage)["canary"]["remaining_s"] <= 3600
        stage.engine.faults.broken = "router@v2"
        fill(stage, each=30)
        stage.wait(lambda: house.registry.canary("router") is None)
    assert trail(stage) == [("canary", 1, 2, 1), ("canary-rollback", 2, 1, 1)]


def test_a_canary_that_cannot_be_loaded_any_more_keeps_no_server_from_starting(
    house: House,
) -> None:
    with running_stage(house) as stage:
        stage.operator.canary("router", 2, 0.5, ME)
    weights = house.registry.path("router", 2) / "adapter_model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(b"")
    with running_stage(house) as stage:
        stage.wait(lambda: house.registry.canary("router") is None)
        assert ask(stage) == "router@v1" and "checksum" in told(stage)["ended"]["how"]
    assert trail(stage)[-1] == ("canary-stop", 2, 1, 1)


def test_a_canary_that_an_engine_cannot_load_again_is_given_up(house: House) -> None:
    with running_stage(house) as stage:
        stage.operator.canary("router", 2, 0.5, ME)
        (mine, other) = (*episodes_of(stage, 2, 1), *episodes_of(stage, 1, 1))
        assert ask(stage, mine) == "router@v2"
        weights = house.registry.path("router", 2) / "adapter_model.safetensors"
        weights.chmod(0o644)
        weights.write_bytes(b"")
        stage.engine.restart_empty()
        assert ask(stage, other) == "router@v1", "the engine is as it should be without it"
        assert ask(stage, mine) == "router@v1"
        stage.wait(lambda: house.registry.canary("router") is None)
        assert stage.states == ["ready"]
    assert trail(stage)[-1] == ("canary-rollback", 2, 1, 1)
    evidence = house.registry.audit("router")[-1]["evidence"]
    assert evidence["worse"] == ["it could not be loaded again"]


def test_a_canary_is_on_every_replica(house: House) -> None:
    with running_stage(house, replicas=2) as stage:
        stage.operator.canary("router", 2, 0.5, ME)
        assert all("router@v2" in engine.adapters for engine in stage.engines)
        assert {ask(stage, name) for name in episodes_of(stage, 2, 8)} == {"router@v2"}
        asked = [len(engine.bodies("/v1/chat/completions")) for engine in stage.engines]
        assert all(asked) and sum(asked) == 8
        stage.operator.stop_canary("router", ME, now=True)
        assert not any("router@v2" in engine.adapters for engine in stage.engines)


# -- a watch after a promotion --------------------------------------------------------------------


def test_a_promoted_version_that_does_worse_goes_back_by_itself(stage: Stage) -> None:
    for n in range(30):
        ask(stage, f"before{n}")
    done = stage.operator.swap("router", 2, ME, watch=QUICK)
    assert done["watch"]["seen"]["incumbent"]["requests"] == 30
    assert ask(stage, "first") == "router@v2"
    stage.engine.faults.broken = "router@v2"
    for n in range(30):
        ask(stage, f"after{n}")
    stage.wait(lambda: told(stage)["current"] == 1)
    assert ask(stage, "first") == "router@v1"
    stage.wait(lambda: told(stage)["watch"] is None)
    assert told(stage)["ended"]["how"] == "rolled back"
    line = stage.house.registry.audit("router")[-1]
    assert (line["action"], line["who"], line["command"]) == (
        "rollback",
        "automatic",
        "promote --watch",
    )
    assert line["evidence"]["worse"] and stage.house.registry.history("router") == [1]


def test_a_watch_ends_with_its_time_or_the_next_move(stage: Stage) -> None:
    short = QUICK.model_copy(update={"for_s": 0.05})
    stage.operator.swap("router", 2, ME, watch=short)
    stage.wait(lambda: told(stage)["watch"] is None)
    assert told(stage)["ended"]["how"].startswith("not judged: too few requests")
    stage.operator.swap("router", 3, ME, watch=QUICK)
    stage.operator.swap("router", 2, ME)
    assert told(stage)["watch"] is None and told(stage)["current"] == 2


# -- who may, and how -----------------------------------------------------------------------------

ROUTES = ("canary", "canary/stop", "release", "swap")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("key", [None, "wrong"])
def test_only_an_operator(stage: Stage, route: str, key: str | None) -> None:
    headers = {} if key is None else {"X-Marft-Operator-Key": key}
    body = {"agent": "router", "version": 2, "share": 0.5, "episodes": []}
    answer = stage.http.post(f"{stage.url}/marft/{route}", json=body, headers=headers)
    assert answer.status_code == 401
    assert trail(stage) == []


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("canary", {"agent": "router", "version": 2}),
        ("canary", {"agent": "router", "version": 2, "share": 1.5}),
        ("canary", {"agent": "router", "version": 2, "share": "NaN"}),
        ("canary", {"agent": "router", "version": True, "share": 0.5}),
        ("canary", {"agent": "router", "version": 2, "share": 0.5, "bounds": {"for_s": -1}}),
        ("canary", {"agent": "router", "version": 2, "share": 0.5, "then": "delete"}),
        ("canary", {"agent": "router", "version": 2, "share": 0.5, "shrae": 1}),
        ("canary/stop", {}),
        ("canary/stop", {"agent": "router", "now": "yes"}),
        ("release", {"episodes": "e1"}),
        ("release", {"episodes": [1]}),
        ("release", []),
        ("swap", {"agent": "router", "version": 2, "watch": {"for_s": 0}}),
        ("swap", {"agent": "router", "version": "2"}),
    ],
)
def test_bodies_are_checked(stage: Stage, route: str, body: object) -> None:
    headers = {"X-Marft-Operator-Key": OPERATOR_KEY}
    answer = stage.http.post(f"{stage.url}/marft/{route}", json=body, headers=headers)
    assert answer.status_code == 400 and "send {" in answer.json()["error"]["message"]
    assert trail(stage) == []


def test_many_episodes_are_released_in_parts(stage: Stage) -> None:
    names = [f"{'x' * 100}{n}" for n in range(12_000)]
    for name in (names[0], names[-1]):
        ask(stage, name)
    assert stage.operator.release(names) == 2
    assert stage.operator.release(names) == 0
    headers = {"X-Marft-Operator-Key": OPERATOR_KEY}
    body = {"episodes": ["e"] * 10_001}
    url = f"{stage.url}/marft/release"
    assert stage.http.post(url, json=body, headers=headers).status_code == 400
    with pytest.raises(ServerError):
        stage.operator.release(["x" * (1 << 20)])
