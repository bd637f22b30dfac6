"""Two processes on gloo end as one does: the same weights, one voice, and nobody left waiting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from marft_agents.registry import Registry

AGENTS = ("router", "writer")
Reports = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def hall(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def reports(hall: Path) -> Reports:
    """Every scenario of ``ranks``, run once."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.ranks", str(hall)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def weights(hall: Path, name: str, agent: str) -> dict[str, torch.Tensor]:
    """Of the version that a scenario published."""
    return load_file(
        Registry(hall / name / "adapters").path(agent, 3) / "adapter_model.safetensors"
    )


def test_no_process_of_any_scenario_hangs_or_dies(reports: Reports) -> None:
    for name, ranks in reports.items():
        for report in ranks:
            assert report["error"] != "hangs" and "Traceback" not in str(report["error"]), (
                name,
                report["error"],
            )


@pytest.mark.parametrize("kind", ["awr", "ppo"])
def test_every_process_holds_the_same_adapters_and_one_publishes_them(
    kind: str, hall: Path, reports: Reports
) -> None:
    first, second = reports[f"{kind}-two"]
    assert first["checksums"] == second["checksums"]
    assert first["steps"] == second["steps"] == 12, "nine rows in blocks of four, two passes"
    for agent in AGENTS:
        assert Registry(hall / f"{kind}-two" / "adapters").versions(agent) == [1, 2, 3]
        published = weights(hall, f"{kind}-two", agent)
        before = load_file(
            Registry(hall / f"{kind}-two" / "adapters").path(agent, 2) / "adapter_model.safetensors"
        )
        assert any(not torch.equal(before[n], t) for n, t in published.items())


@pytest.mark.parametrize("kind", ["awr", "ppo"])
def test_two_processes_learn_what_one_does(kind: str, hall: Path, reports: Reports) -> None:
    """Blocks of four rows either way; the last one of a pass leaves a process without any."""
    assert reports[f"{kind}-one"][0]["error"] is None
    for agent in AGENTS:
        one, two = (weights(hall, f"{kind}-{n}", agent) for n in ("one", "two"))
        for name, tensor in one.items():
            assert torch.allclose(tensor, two[name], rtol=0, atol=1e-5), name


@pytest.mark.parametrize("kind", ["awr", "ppo"])
def test_the_first_process_speaks_as_one_does_and_the_other_is_silent(
    kind: str, reports: Reports
) -> None:
    """That the other writes nothing is checked where it runs: it may not."""
    first, second = reports[f"{kind}-two"]
    (alone,) = reports[f"{kind}-one"]
    assert second["said"] == []
    timeless = [
        [line for line in report["said"] if not line.endswith(" s")] for report in (alone, first)
    ]
    assert timeless[0] == timeless[1]
    assert second["error"] is None


def test_a_resumed_run_of_two_processes_ends_bit_for_bit_as_an_uninterrupted_one(
    hall: Path, reports: Reports
) -> None:
    assert [r["error"] for r in reports["ppo-cut"]] == ["interrupted"] * 2
    sums = [r["checksums"] for r in (*reports["ppo-two"], *reports["ppo-resumed"])]
    assert all(one == sums[0] for one in sums)
    assert "4 steps were taken before" in "\n".join(reports["ppo-resumed"][0]["said"])
    for agent in AGENTS:
        one, two = (weights(hall, name, agent) for name in ("ppo-two", "ppo-resumed"))
        assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_a_loss_that_is_none_in_one_process_drops_the_step_in_all(
    hall: Path, reports: Reports
) -> None:
    first, second = reports["sick"]
    assert first["nonfinite"] == second["nonfinite"] == {"router": 1}
    assert first["checksums"] == second["checksums"]
    healthy = reports["awr-two"][0]["checksums"]
    assert first["checksums"]["router"] != healthy["router"]
    assert first["checksums"]["writer"] == healthy["writer"], "the other agent goes on as it was"
    (dump,) = hall.glob("marft-nonfinite-router-*.json")
    assert len(json.loads(dump.read_text())["turns"]) == 4, "all processes' turns, written once"


def test_online_one_process_runs_the_app_publishes_and_swaps(hall: Path, reports: Reports) -> None:
    first, second = reports["online"]
    assert first["error"] is None and second["error"] is None
    assert first["checksums"] == second["checksums"]
    assert first["steps"] == second["steps"] == 2 * 2 * 3
    assert first["said"].count("collected") == 2 and second["said"] == []
    registry = Registry(hall / "online" / "adapters")
    for agent in AGENTS:
        assert registry.versions(agent) == [1, 2, 3, 4] and registry.current(agent) == 4


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("replay", "ReplayError: agent 'router', recorded under router@v1"),
        ("flat", "NothingToLearn: no signal"),
        ("no-room", "RegistryError: cannot publish 'router'"),
        ("broken", "ServerError: the server went away"),
    ],
)
def test_an_error_of_the_first_process_ends_every_one(
    name: str, error: str, reports: Reports
) -> None:
    assert [r["error"][: len(error)] for r in reports[name]] == [error] * 2


def test_a_mistake_is_said_once(reports: Reports) -> None:
    first, second = reports["mistake"]
    assert first["code"] == second["code"] == 2
    said = "marft-agents: --set: unknown setting 'gama'; did you mean 'gamma'?\n"
    assert (first["out"], first["err"]) == ("", said)
    assert (second["out"], second["err"]) == ("", "")
