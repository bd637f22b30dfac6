"""What is needed stays; what goes, goes whole, with a line, also when a run is cut off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Collection
from pathlib import Path

import pytest

from marft_agents.errors import RegistryError
from marft_agents.registry import Change, Registry, describe_base, durable
from marft_agents.registry.prune import prune, survey
from tests.registry.bases import make_adapter, make_base


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """Ten versions, each the parent of the next."""
    base, staged = describe_base(make_base(tmp_path / "base")), make_adapter(tmp_path / "staged")
    registry = Registry(tmp_path / "adapters")
    for version in range(1, 11):
        registry.publish("router", staged, base=base, parent=version - 1 or None)
    return registry


def run(registry: Registry, keep: int = 1, loaded: Collection[int] = ()) -> list[int]:
    change = Change("me", "prune")
    return [v.version for v in prune(registry, ["router"], keep, {"router": loaded}, change)]


def test_what_is_needed_stays(registry: Registry) -> None:
    for version in (6, 8, 4):
        registry.promote("router", version, by="me", evidence={})
    registry.pin("router")
    reasons = {v.version: v.kept for v in survey(registry, "router", 2, [1])}
    assert reasons == {
        1: "loaded in the server", 2: None, 3: "parent of the one in use", 4: "in use", 5: None,
        6: None, 7: None, 8: "in use before", 9: "one of the newest 2", 10: "one of the newest 2",
    }  # fmt: skip
    assert run(registry, 2, [1]) == [2, 5, 6, 7]
    assert registry.versions("router") == [1, 3, 4, 8, 9, 10]
    assert not list((registry.root / "router").glob(".*"))
    lines = [e for e in registry.audit() if e["action"] == "prune"]
    assert [(e["from"], e["to"], e["current"]) for e in lines] == [
        (version, None, 4) for version in (2, 5, 6, 7)
    ]
    assert run(registry, 2, [1]) == []


def test_a_pinned_version_that_is_not_in_use_stays(registry: Registry) -> None:
    (registry.root / "router" / "PINNED").write_text("v0004\n")
    assert run(registry) == [2, 3, 5, 6, 7, 8, 9]


def test_rollback_skips_what_was_deleted(registry: Registry) -> None:
    for version in (3, 5, 9):
        registry.promote("router", version, by="me", evidence={})
    assert run(registry) == [1, 2, 3, 4, 6, 7]
    assert registry.rollback("router") == 5
    with pytest.raises(RegistryError, match="nothing came before"):
        registry.rollback("router")


def test_nothing_goes_where_it_is_not_known_what_is_needed(registry: Registry) -> None:
    pointer = registry.root / "router" / "CURRENT"
    pointer.write_text("v0099\n")
    with pytest.raises(RegistryError, match="CURRENT says 'v0099'"):
        run(registry)
    pointer.unlink()
    with pytest.raises(RegistryError, match="no version in use"):
        run(registry)
    assert len(registry.versions("router")) == 10


def test_a_version_that_cannot_be_noted_stays(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "append_line", full)
        with pytest.raises(OSError, match="No space"):
            run(registry)
    assert registry.versions("router") == list(range(1, 11))
    for version in registry.versions("router"):
        registry.verify("router", version)


@pytest.mark.parametrize("step", ["durable.append_line", "durable.fsync_folder", "shutil.rmtree"])
def test_a_killed_run_is_finished_by_the_next(registry: Registry, step: str) -> None:
    code = f"""
        import os, shutil, signal, sys
        from marft_agents.registry import Change, Registry, durable
        from marft_agents.registry.prune import prune
        def die(*a, **k):
            os.kill(os.getpid(), signal.SIGKILL)
        {step} = die
        list(prune(Registry(sys.argv[1]), ["router"], 9, {{}}, Change("killed")))
    """
    registry.promote("router", 10, by="me", evidence={})
    registry.promote("router", 9, by="me", evidence={})
    argv = [sys.executable, "-c", textwrap.dedent(code), str(registry.root)]
    done = subprocess.run(argv, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, b"")
    assert registry.versions("router") == list(range(2, 11))
    assert len(list((registry.root / "router").glob(".pruned-v0001-*"))) == 1
    assert run(registry, 9) == []
    assert not list((registry.root / "router").glob(".*"))
    assert [e["from"] for e in registry.audit() if e["action"] == "prune"] == [1]


def test_a_version_that_went_meanwhile_cannot_be_promoted(registry: Registry) -> None:
    registry.promote("router", 10, by="me", evidence={})
    run(registry)
    with pytest.raises(RegistryError, match="no version 5"):
        registry.promote("router", 5, by="me", evidence={})


def test_a_linked_version_is_unlinked_not_followed(registry: Registry, tmp_path: Path) -> None:
    place, elsewhere = registry.path("router", 5), tmp_path / "elsewhere"
    os.rename(place, elsewhere)
    place.symlink_to(elsewhere)
    registry.promote("router", 10, by="me", evidence={})
    assert 5 in run(registry)
    assert not place.exists() and len(list(elsewhere.iterdir())) == 4
