"""What is refused was refused before anything changed, and the error names what there is."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from click.testing import CliRunner, Result

from marft_agents.cli import cli
from marft_agents.errors import MarftError, SwapError
from marft_agents.registry import CanaryPlan, Change
from marft_agents.serving.loader import Limits
from tests.serving.stage import OPERATOR_KEY, House, running_stage
from tests.serving.test_lease_swaps import ask

ME = Change("me")


def pin(house: House, version: int, *options: str) -> Result:
    (house.registry.root / ".operator-key").write_text(OPERATOR_KEY)
    root = str(house.registry.root)
    command = ["adapters", "pin", "router", str(version), "--adapters", root]
    return CliRunner().invoke(cli, [*command, *options])


@pytest.mark.parametrize("version", [2, 3])
def test_a_pin_beside_a_canary_moves_nothing(house: House, version: int) -> None:
    house.publish("router")
    with running_stage(house) as stage:
        stage.operator.canary("router", 2, 0.5)
        trail = house.registry.audit()
        done = pin(house, version, "--server", stage.url)
        assert isinstance(done.exception, MarftError)
        assert "is a canary; end that first" in str(done.exception)
        assert "--force" not in str(done.exception), "pin has none"
        assert house.registry.current("router") == 1 and house.registry.audit() == trail
        assert stage.operator.state()["agents"]["router"]["canary"]["version"] == 2


def test_a_pin_of_another_version_names_what_pin_has(house: House) -> None:
    assert pin(house, 1).exit_code == 0
    done = pin(house, 2)
    assert "adapters pin router --remove" in str(done.exception)
    assert "--force" not in str(done.exception)


def test_a_refused_move_of_all_episodes_moves_none(house: House) -> None:
    house.publish("router")
    with running_stage(house, limits=Limits(16, max_cpu_loras=3)) as stage:
        assert ask(stage, "e1") == "router@v1"
        stage.operator.swap("router", 2)
        house.registry.pin("router", ME)
        with pytest.raises(SwapError, match="pinned"):
            stage.operator.swap("router", 3, now=True)
        assert ask(stage, "e1") == "router@v1", "it goes on where it was"
        house.registry.unpin("router", ME)
        assert stage.operator.swap("router", 3, now=True)["moved"] == 0, "they made room before"
        assert ask(stage, "e1") == "router@v3"


def test_a_canary_of_a_version_that_is_gone_ends_with_a_line(house: House) -> None:
    plan = CanaryPlan(version=9, share=0.5, key="k", since=datetime.now(UTC), by="me")
    (house.registry.root / "router" / "CANARY").write_text(plan.model_dump_json())
    with running_stage(house) as stage:
        stage.wait(lambda: not (house.registry.root / "router" / "CANARY").exists())
        stage.wait(lambda: house.registry.audit("router")[-1]["action"] == "canary-stop")
        assert json.dumps(house.registry.audit("router")[-1]).count("its version is gone") == 1
        assert stage.operator.swap("router", 2)["to"] == 2
