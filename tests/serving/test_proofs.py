"""A proof is of one run of one engine, one version and one folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from marft_agents.serving.client import EngineClient
from marft_agents.serving.loader import Limits, Loader, StepError
from marft_agents.serving.probe import ProbeReport
from marft_agents.serving.proofs import Brought, Folder, Proofs
from tests.serving.fake_engine import FakeEngine
from tests.serving.stage import House

REPORT = ProbeReport("base", 3, None, 0.2)


def folder(tmp_path: Path) -> Path:
    made = tmp_path / "v0001"
    made.mkdir()
    for name in ("manifest.json", "weights"):
        (made / name).write_text(name)
    return made


def test_what_is_found_after_the_run_has_ended_proves_nothing(tmp_path: Path) -> None:
    proofs, seen = Proofs(), Folder.seen(folder(tmp_path))
    run = proofs.run
    proofs.add(run, "router@v1", REPORT, seen)
    found = proofs.of("router@v1")
    assert found is not None and found.report == REPORT
    assert Brought(found.report, found.time).evidence()["prepared"].startswith("20")
    assert "prepared" not in Brought(REPORT).evidence()
    proofs.forget()
    assert proofs.of("router@v1") is None
    proofs.add(run, "router@v1", REPORT, seen)
    assert proofs.of("router@v1") is None


def test_a_folder_is_another_one_after_any_change(tmp_path: Path) -> None:
    made = folder(tmp_path)
    before = Folder.seen(made)
    assert Folder.seen(made) == before
    times = (made / "weights").stat()
    (made / "weights").write_text("WEIGHTS")
    os.utime(made / "weights", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert Folder.seen(made) != before, "the time of the last change of its entry is not to be set"
    before = Folder.seen(made)
    (made / "more").write_text("")
    assert Folder.seen(made) != before


def test_a_version_that_is_unloaded_or_fails_its_probe_is_not_proved(house: House) -> None:
    with FakeEngine() as engine, EngineClient(engine.url) as client:
        loader = Loader(client, house.registry, house.base, Limits(16))
        loader.bring_up("router", 2)
        assert loader.proofs.of("router@v2") is not None
        loader.unload("router", 2)
        assert loader.proofs.of("router@v2") is None
        engine.faults.extra_effect = 0.5
        with pytest.raises(StepError, match="step probe of router@v2"):
            loader.bring_up("router", 2)
        assert loader.proofs.of("router@v2") is None
