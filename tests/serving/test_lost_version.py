"""A version in use that the disk has lost keeps an engine that comes back from no other agent."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from marft_agents.cli import cli
from marft_agents.registry import Change
from tests.serving.stage import LOOK_OFTEN, OPERATOR_KEY, House, Stage, running_stage


def damage(folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    weights.chmod(weights.stat().st_mode | stat.S_IWUSR)
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")


LOSSES: list[Callable[[Path], object]] = [damage, shutil.rmtree]


def ready(stage: Stage) -> httpx.Response:
    return stage.http.get(f"{stage.url}/ready")


def restart_without_version(stage: Stage) -> None:
    """The engine comes back, and router's version in use does not."""
    stage.engine.adapters.clear()
    stage.wait(lambda: ready(stage).json()["status"] == "degraded")


@pytest.mark.parametrize("lose", LOSSES)
def test_other_agents_are_answered_and_a_rollback_cures(
    house: House, lose: Callable[[Path], object]
) -> None:
    house.registry.move("router", 2, Change("me"))
    with running_stage(house, pace=LOOK_OFTEN) as stage:
        lose(house.registry.path("router", 2))
        restart_without_version(stage)
        assert stage.chat("writer").status_code == 200
        reply = stage.chat("router")
        assert reply.status_code == 503 and reply.headers["retry-after"]
        assert "adapters rollback router" in reply.json()["error"]["message"]
        told = ready(stage)
        assert told.status_code == 200 and list(told.json()["lost"]) == ["router"]
        assert "router@v2" in stage.operator.state()["agents"]["router"]["lost"]
        house.root.joinpath("adapters", ".operator-key").write_text(OPERATOR_KEY)
        back = ["adapters", "rollback", "router", "--server", stage.url]
        done = CliRunner().invoke(cli, [*back, "--adapters", str(house.registry.root)])
        assert done.exit_code == 0, (done.output, done.exception)
        assert stage.chat("router").headers["x-marft-adapter"] == "router@v1"
        assert ready(stage).json()["status"] == "ok"
        assert house.registry.current("router") == 1


def test_a_version_that_the_disk_has_again_answers_by_itself(house: House, tmp_path: Path) -> None:
    folder = house.registry.path("router", 1)
    with running_stage(house, pace=LOOK_OFTEN) as stage:
        shutil.move(folder, tmp_path / "aside")
        restart_without_version(stage)
        assert stage.chat("router").status_code == 503
        shutil.move(tmp_path / "aside", folder)
        stage.wait(lambda: ready(stage).json()["status"] == "ok")
        assert stage.chat("router").headers["x-marft-adapter"] == "router@v1"


def test_a_server_that_answers_nobody_is_not_ready(house: House) -> None:
    with running_stage(house, pace=LOOK_OFTEN) as stage:
        for agent in ("router", "writer"):
            damage(house.registry.path(agent, 1))
        stage.engine.adapters.clear()
        stage.wait(lambda: "lost" in ready(stage).json() and len(ready(stage).json()["lost"]) == 2)
        assert ready(stage).status_code == 503


def test_while_another_engine_has_the_version_it_is_not_lost(house: House) -> None:
    with running_stage(house, replicas=2, pace=LOOK_OFTEN) as stage:
        damage(house.registry.path("router", 1))
        stage.engines[0].adapters.clear()
        stage.wait(lambda: stage.states[0] == "down")
        assert stage.states[1] == "ready" and stage.chat("router").status_code == 200
        assert ready(stage).json()["status"] == "ok"
