"""A canary is on disk exactly while it runs, and every change of it is in the trail."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from marft_agents.errors import RegistryError
from marft_agents.registry import Bounds, CanaryPlan, Change, Registry, durable
from marft_agents.registry.prune import survey
from marft_agents.registry.verify import check_agent
from tests.serving.stage import House, make_house

ME = Change("me", "test")


@pytest.fixture
def house(tmp_path: Path) -> House:
    """router: v1 in use, v2, v3."""
    house = make_house(tmp_path)
    for untrained in (True, False, False):
        house.publish("router", untrained=untrained)
    return house


@pytest.fixture
def registry(house: House) -> Registry:
    return house.registry


def plan(version: int = 2, **more: Any) -> CanaryPlan:
    fields: dict[str, Any] = {"share": 0.1, "key": "k", "since": datetime.now(UTC), "by": "me"}
    return CanaryPlan(version=version, **(fields | more))


def actions(registry: Registry) -> list[tuple[Any, ...]]:
    entries = registry.audit("router")[3:]
    return [(e["action"], e["from"], e["to"], e["current"]) for e in entries]


def test_start_change_and_end(registry: Registry) -> None:
    assert registry.canary("router") is None
    registry.set_canary("router", plan(), ME)
    assert Registry(registry.root).canary("Router") == registry.canary("router")
    registry.set_canary("router", plan(share=0.5), ME)
    assert (now := registry.canary("router")) is not None and now.share == 0.5
    assert registry.current("router") == 1
    assert registry.end_canary("router", ME) == 2
    assert registry.canary("router") is None
    assert registry.end_canary("router", ME) is None, "ending it again is no line"
    assert actions(registry) == [
        ("canary", 1, 2, 1),
        ("canary", 1, 2, 1),
        ("canary-stop", 2, 1, 1),
    ]
    told = registry.audit("router")[-2]
    assert told["who"] == "me" and told["evidence"]["share"] == 0.5
    assert told["evidence"]["min_requests"] == 50
    assert registry.history("router") == [1], "a canary was never the version in use"


def test_what_is_refused(registry: Registry) -> None:
    with pytest.raises(RegistryError, match="is in use: it answers every episode"):
        registry.set_canary("router", plan(1), ME)
    with pytest.raises(RegistryError, match="no version 9"):
        registry.set_canary("router", plan(9), ME)
    registry.set_canary("router", plan(), ME)
    with pytest.raises(RegistryError, match=r"version 2 .* is a canary already.*--stop"):
        registry.set_canary("router", plan(3), ME)
    with pytest.raises(RegistryError, match=r"version 2 .* is a canary; end that first"):
        registry.pin("router", ME)


def test_a_pinned_agent_has_a_canary_only_by_force(registry: Registry) -> None:
    registry.pin("router", ME)
    with pytest.raises(RegistryError, match=r"pinned to version 1.*--force"):
        registry.set_canary("router", plan(), ME)
    forced = Change("me", force=True)
    with pytest.raises(RegistryError, match="or leave out --then promote"):
        registry.set_canary("router", plan(then="promote"), forced)
    registry.set_canary("router", plan(), forced)
    assert registry.pinned("router") == 1


def test_promoting_the_canary_ends_it(registry: Registry) -> None:
    registry.set_canary("router", plan(), ME)
    registry.move("router", 2, ME)
    assert registry.canary("router") is None and not (registry.root / "router/CANARY").exists()
    assert actions(registry) == [("canary", 1, 2, 1), ("promote", 1, 2, 2)]


def test_promoting_another_needs_force_and_the_one_in_use_does_not(registry: Registry) -> None:
    registry.set_canary("router", plan(), ME)
    with pytest.raises(RegistryError, match=r"version 2 .* is a canary; .*--force, which ends it"):
        registry.move("router", 3, ME)
    registry.move("router", 1, ME)
    assert registry.canary("router") is not None
    registry.move("router", 3, Change("me", force=True))
    assert registry.canary("router") is None
    assert actions(registry)[1:] == [("canary-stop", 2, 1, 1), ("promote", 1, 3, 3)]


def test_a_rollback_is_never_held_up_by_a_canary(registry: Registry) -> None:
    registry.move("router", 2, ME)
    registry.set_canary("router", plan(3), ME)
    assert registry.rollback("router", ME) == 1
    assert registry.canary("router") is None
    registry.set_canary("router", plan(3), ME)
    registry.move("router", 2, Change("me", force=True))
    (registry.root / "router/CANARY").write_text("{")
    assert registry.rollback("router", ME) == 1
    assert not (registry.root / "router/CANARY").exists()


def test_a_trail_that_cannot_be_written_changes_nothing(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "append_line", full)
        with pytest.raises(OSError, match="No space"):
            registry.set_canary("router", plan(), ME)
    assert registry.canary("router") is None
    registry.set_canary("router", plan(), ME)
    with monkeypatch.context() as patch:
        patch.setattr(durable, "append_line", full)
        for act in (
            lambda: registry.end_canary("router", ME),
            lambda: registry.set_canary("router", plan(share=0.9), ME),
            lambda: registry.move("router", 3, Change("me", force=True)),
        ):
            with pytest.raises(OSError, match="No space"):
                act()
    assert (now := registry.canary("router")) is not None and now.share == 0.1
    assert registry.current("router") == 1


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"version": 2}', "\0", "v0002"])
def test_an_unreadable_file_is_said_and_can_be_taken_away(registry: Registry, text: str) -> None:
    (registry.root / "router/CANARY").write_text(text)
    for read in (
        lambda: registry.canary("router"),
        lambda: list(survey(registry, "router", 1)),
        lambda: registry.move("router", 3, ME),
    ):
        with pytest.raises(RegistryError, match=r"CANARY.*--stop takes it away"):
            read()
    assert any("CANARY" in line for line in check_agent(registry, "router"))
    assert registry.end_canary("router", ME) is None
    assert registry.canary("router") is None


def test_prune_keeps_the_canary(house: House) -> None:
    house.publish("router")
    house.registry.set_canary("router", plan(2), ME)
    why = {v.version: v.kept for v in survey(house.registry, "router", 1)}
    assert why == {1: "in use", 2: "a canary", 3: None, 4: "one of the newest 1"}


@pytest.mark.parametrize(
    "bad", [{"share": 0}, {"share": 1}, {"share": math.nan}, {"key": ""}, {"then": "x"}, {"x": 1}]
)
def test_plans_that_are_none(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        plan(**bad)


@pytest.mark.parametrize(
    "bad",
    [
        {"min_requests": 19},
        {"min_requests": True},
        {"max_error_increase": -0.1},
        {"max_latency_ratio": 0.9},
        {"max_latency_ratio": math.inf},
        {"for_s": 0},
    ],
)
def test_bounds_that_are_none(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Bounds(**bad)
