"""``adapters prepare``: what it says, what ``swap`` and ``list`` say after it, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from marft_agents.serving import free_port
from marft_agents.serving.loader import Limits
from tests.cli.test_adapters import Program, adapters, house  # pyright: ignore[reportUnusedImport]
from tests.serving.stage import House, running_stage

__all__ = ["adapters", "house"]  # fixtures


def test_prepare_then_swap(adapters: Program, house: House) -> None:
    with adapters.serving() as stage:
        out = adapters("prepare", "Router", "v3", "--server", stage.url)
        assert out == (
            "router: v3 is loaded and probed beside v1; served log-probabilities equal the"
            " trainer's to 0.0e+00; it differs from the base's by 0.3\n"
            "  kept for 10 min; to use it: marft-agents swap router --version 3 --adapters"
            f" {house.registry.root} --server {stage.url}\n"
        )
        assert house.registry.current("router") == 1
        lines = adapters("list", "--server", stage.url).splitlines()
        assert lines[3].split()[:3] == ["router", "v3", "prepared"], lines
        told = json.loads(adapters("list", "--json", "--server", stage.url))["agents"][0]
        assert [r["version"] for r in told["versions"] if r["prepared"]] == [3]
        assert [r["version"] for r in told["versions"] if r["loaded"]] == [1, 3]
        out = adapters("prepare", "router", 3, "--server", stage.url)
        assert out.startswith("router: v3 was loaded and probed already, and is kept anew;")
        out = adapters("promote", "router", 3, "--server", stage.url)
        assert out.startswith("router: v1 -> v3, which was loaded and probed before; served")


def test_the_highest_version_by_default_and_a_canary(adapters: Program) -> None:
    with adapters.serving() as stage:
        assert ": v5 is loaded" in adapters("prepare", "router", "--server", stage.url)
        adapters("canary", "router", 5, "--share", "10%", "--server", stage.url)
        out = adapters("prepare", "router", "--server", stage.url)
        assert "v5 is its canary, and needs nothing before it is promoted" in out
        assert "kept for" not in out


def test_a_prepared_version_is_not_pruned(adapters: Program, house: House) -> None:
    with adapters.serving() as stage:
        adapters("prepare", "router", 2, "--server", stage.url)
        adapters("prune", "--keep", 1, "--yes", "--server", stage.url)
        assert house.registry.versions("router") == [1, 2, 5]


def test_mistakes(adapters: Program, house: House, tmp_path: Path) -> None:
    assert "name it with --server URL" in adapters.refuses("prepare", "router")
    url = f"http://127.0.0.1:{free_port()}"
    assert f"cannot reach {url}" in adapters.refuses("prepare", "router", "--server", url)
    with adapters.serving() as stage:
        to = ("--server", stage.url)
        assert "router@v1 is in use already" in adapters.refuses("prepare", "router", 1, *to)
        assert "no version 9" in adapters.refuses("prepare", "router", 9, *to)
        assert "no agent 'nobody'" in adapters.refuses("prepare", "nobody", *to)
        stage.engine.faults.extra_effect = 0.5
        error = adapters.refuses("prepare", "router", 2, *to)
        assert "step probe of router@v2" in error and "what serves is as before" in error
        assert house.registry.current("router") == 1
    with running_stage(house, limits=Limits(16, max_loras=1)) as stage:
        error = adapters.refuses("prepare", "router", 2, "--server", stage.url)
        assert "keeps 1 adapters and has 1: router@v1 (current)" in error


def test_a_server_that_cannot_prepare(adapters: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        before = "marft_agents.serving.gateway.control_routes"
        patch.setattr(before, lambda canaries, access: [])  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType] as it was
        with adapters.serving() as stage:
            error = adapters.refuses("prepare", "router", 2, "--server", stage.url)
            assert "is of a version that cannot prepare; swap without" in error
