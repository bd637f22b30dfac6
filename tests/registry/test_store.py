"""Versions appear whole or not at all, are never reused, and every change leaves a line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import AdapterError, ConfigError, RegistryError
from marft_agents.registry import Change, Registry, describe_base, durable
from marft_agents.schema import AdapterManifest, BaseModelInfo, Probe
from tests.registry.bases import make_adapter, make_base


@pytest.fixture
def base(tmp_path: Path) -> BaseModelInfo:
    return describe_base(make_base(tmp_path / "base"))


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "staged")


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "adapters")


def _publish(
    registry: Registry, staged: Path, base: BaseModelInfo, agent: str = "router", **more: Any
) -> AdapterManifest:
    return registry.publish(agent, staged, base=base, parent=None, **more)


def test_publish_writes_a_whole_folder(
    registry: Registry, staged: Path, base: BaseModelInfo
) -> None:
    probe = Probe(prompt_token_ids=[1], token_ids=[2], logprobs=[-1.5], base_logprobs=[-2.0])
    manifest = _publish(registry, staged, base, "Router", probe=probe, training={"episodes": 3})
    folder = registry.path("router", 1)
    assert folder == registry.root / "router" / "v0001"
    assert sorted(p.name for p in folder.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
    ]
    assert registry.manifest("router", 1) == manifest == registry.verify("router", 1)
    assert manifest.files["adapter_model.safetensors"] == durable.sha256_file(
        staged / "adapter_model.safetensors"
    )
    assert manifest.served_name == "router@v1"
    assert "| episodes | 3 |" in (folder / "README.md").read_text()
    assert staged.is_dir()


def test_first_version_becomes_current_later_ones_do_not(
    registry: Registry, staged: Path, base: BaseModelInfo
) -> None:
    assert registry.current("router") is None
    assert registry.agents() == [] == registry.versions("router")
    assert [_publish(registry, staged, base).version for _ in range(3)] == [1, 2, 3]
    assert (registry.current("router"), registry.versions("router")) == (1, [1, 2, 3])
    assert registry.agents() == ["router"]
    assert (registry.root / "router" / "CURRENT").read_text() == "v0001\n"


def test_promote_and_rollback_leave_their_evidence(
    registry: Registry, staged: Path, base: BaseModelInfo
) -> None:
    for _ in range(4):
        _publish(registry, staged, base)
    registry.promote("router", 2, by="ci", evidence={"gain": 0.1})
    registry.promote("router", 4, by="ci", evidence={})
    assert registry.rollback("router", Change("ops")) == 2
    assert registry.rollback("router", Change("ops")) == 1
    with pytest.raises(RegistryError, match="nothing came before"):
        registry.rollback("router", Change("ops"))
    moves = [(e["action"], e["from"], e["to"], e["who"]) for e in registry.audit()[4:]]
    assert moves == [
        ("promote", 1, 2, "ci"),
        ("promote", 2, 4, "ci"),
        ("rollback", 4, 2, "ops"),
        ("rollback", 2, 1, "ops"),
    ]
    assert registry.audit()[4]["evidence"] == {"gain": 0.1}


def test_rollback_without_an_audit_trail_does_not_guess(
    registry: Registry, staged: Path, base: BaseModelInfo
) -> None:
    for _ in range(3):
        _publish(registry, staged, base)
    registry.promote("router", 3, by="x", evidence={})
    (registry.root / "audit.jsonl").unlink()
    with pytest.raises(RegistryError, match=r"says the audit trail.*has 1, 2, 3.*promote router"):
        registry.rollback("router")
    assert registry.current("router") == 3


def test_unknown_names_list_the_known_ones(
    registry: Registry, staged: Path, base: BaseModelInfo
) -> None:
    with pytest.raises(RegistryError, match="no agent at all"):
        registry.path("router", 1)
    _publish(registry, staged, base)
    calls: list[Callable[[], object]] = [
        lambda: registry.manifest("writer", 1),
        lambda: registry.promote("writer", 1, by="x", evidence={}),
        lambda: registry.rollback("writer"),
        lambda: registry.publish("router", staged, base=base, parent=7),
    ]
    for call in calls[:3]:
        with pytest.raises(RegistryError, match=r"no agent 'writer'.*it has router"):
            call()
    with pytest.raises(RegistryError, match=r"no version 7.*it has 1"):
        calls[3]()
    with pytest.raises(ConfigError, match="reserved"):
        registry.versions("base")


def test_refused_folders_leave_nothing(registry: Registry, tmp_path: Path) -> None:
    base = describe_base(make_base(tmp_path / "base"))
    flat = make_adapter(tmp_path / "flat", fill=0.0)
    with pytest.raises(AdapterError, match="no effect"):
        _publish(registry, flat, base)
    with pytest.raises(AdapterError, match="announced as untrained"):
        _publish(registry, make_adapter(tmp_path / "full"), base, untrained=True)
    with pytest.raises(AdapterError, match="limit is 1"):
        _publish(registry, make_adapter(tmp_path / "r2"), base, max_lora_rank=1)
    assert not registry.root.exists()
    assert _publish(registry, flat, base, untrained=True).untrained


def test_a_changed_published_file_is_noticed(
    registry: Registry, staged: Path, base: BaseModelInfo
) -> None:
    _publish(registry, staged, base)
    weights = registry.path("router", 1) / "adapter_model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-4] + b"abcd")
    with pytest.raises(AdapterError, match="checksum differs"):
        registry.verify("router", 1)
    weights.unlink()
    with pytest.raises(AdapterError, match="is gone"):
        registry.verify("router", 1)


def test_concurrent_publishers_get_different_versions(
    registry: Registry, staged: Path, base: BaseModelInfo
) -> None:
    got: list[int] = []
    start = threading.Barrier(6)

    def work() -> None:
        start.wait()
        got.append(_publish(registry, staged, base).version)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == [1, 2, 3, 4, 5, 6] == registry.versions("router")
    assert [registry.manifest("router", v).version for v in range(1, 7)] == [1, 2, 3, 4, 5, 6]
    assert registry.current("router") == 1
    assert len(registry.audit()) == 6


def test_a_number_is_never_reused(registry: Registry, staged: Path, base: BaseModelInfo) -> None:
    for _ in range(2):
        _publish(registry, staged, base)
    folder = registry.path("router", 2)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    assert _publish(registry, staged, base).version == 3


@pytest.mark.parametrize("content", ["", "v", "v0009\n", "latest", "v0000"])
def test_a_broken_current_is_an_error_not_a_guess(
    registry: Registry, staged: Path, base: BaseModelInfo, content: str
) -> None:
    _publish(registry, staged, base)
    (registry.root / "router" / "CURRENT").write_text(content)
    with pytest.raises(RegistryError, match=r"CURRENT says.*there are \[1\]"):
        registry.current("router")


def test_a_torn_audit_line_is_skipped_and_swallows_nothing(
    registry: Registry, staged: Path, base: BaseModelInfo
) -> None:
    _publish(registry, staged, base)
    with (registry.root / "audit.jsonl").open("ab") as file:
        file.write(b'{"action": "prom')
    _publish(registry, staged, base)
    assert [e["to"] for e in registry.audit()] == [1, 2]


def test_old_leftovers_go_young_ones_stay(
    registry: Registry, staged: Path, base: BaseModelInfo
) -> None:
    _publish(registry, staged, base)
    old, young = (registry.root / "router" / f".staging-1-{n}" for n in ("old", "young"))
    for folder in (old, young):
        folder.mkdir()
    long_ago = time.time() - 7200
    os.utime(old, (long_ago, long_ago))
    _publish(registry, staged, base)
    assert (old.exists(), young.exists()) == (False, True)
    assert registry.versions("router") == [1, 2]


_STEPS = ["copy_file", "write_file", "fsync_folder", "create_file", "append_line"]


@pytest.mark.parametrize("step", [*_STEPS, "rename"])
def test_a_failing_disk_at_any_step_leaves_whole_versions_only(
    registry: Registry,
    staged: Path,
    base: BaseModelInfo,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    def fail(*_: object, **__: object) -> object:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "rename") if step == "rename" else (durable, step)), fail)
        with pytest.raises(OSError, match="No space"):
            _publish(registry, staged, base)
    for version in registry.versions("router"):
        registry.verify("router", version)
    manifest = _publish(registry, staged, base)
    registry.verify("router", manifest.version)
    assert registry.current("router") == registry.versions("router")[0]
    assert not list((registry.root / "router").glob(".*"))


@pytest.mark.parametrize(
    "step", ["copy_file", "write_file", "fsync_folder", "append_line", "rename", "replace"]
)
def test_case_20_a_publish_or_promotion_that_fails_leaves_the_previous_version_intact(
    registry: Registry,
    staged: Path,
    base: BaseModelInfo,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    def fail(*_: object, **__: object) -> object:
        raise OSError(28, "No space left on device")

    def kept() -> dict[str, bytes]:
        names = ["v0001/adapter_model.safetensors", "v0001/adapter_config.json"]
        names += ["v0001/manifest.json", "CURRENT"]
        return {name: (registry.root / "router" / name).read_bytes() for name in names}

    _publish(registry, staged, base)
    before = kept()
    with monkeypatch.context() as patch:
        target = (os, step) if step in ("rename", "replace") else (durable, step)
        patch.setattr(*target, fail)
        with pytest.raises(OSError, match="No space"):
            version = _publish(registry, staged, base).version
            registry.promote("router", version, by="me", evidence={})
    assert kept() == before
    registry.verify("router", 1)
    assert registry.current("router") == 1


@pytest.mark.parametrize("step", ["append_line", "fsync_folder"])
def test_case_20_a_promotion_that_cannot_be_noted_does_not_happen(
    registry: Registry,
    staged: Path,
    base: BaseModelInfo,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    """Case 20: the disk fills up between ``CURRENT`` and the audit trail."""

    def fail(*_: object, **__: object) -> object:
        raise OSError(28, "No space left on device")

    for _ in range(2):
        _publish(registry, staged, base)
    with monkeypatch.context() as patch:
        patch.setattr(durable, step, fail)
        with pytest.raises(OSError, match="No space"):
            registry.promote("router", 2, by="me", evidence={})
    assert registry.current("router") == 1
    assert [entry["action"] for entry in registry.audit()] == ["publish", "publish"]
    assert not list((registry.root / "router").glob(".*"))
    registry.promote("router", 2, by="me", evidence={})
    assert registry.current("router") == 2


def test_case_20_a_short_write_does_not_tear_the_audit_trail(
    registry: Registry, staged: Path, base: BaseModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 20: the system takes a part of a line at a time."""
    whole = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: whole(fd, data[:7]))  # pyright: ignore[reportUnknownLambdaType] stands in for os.write
        _publish(registry, staged, base)
    assert [entry["to"] for entry in registry.audit()] == [1]


def test_case_27_a_version_is_flushed_before_it_appears(
    registry: Registry, staged: Path, base: BaseModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 27: written elsewhere, every file flushed, the folder flushed, then renamed."""
    order: list[str] = []
    fsync, rename = os.fsync, os.rename

    def flushed(handle: int) -> None:
        order.append(f"flush {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        fsync(handle)

    def renamed(source: Path, target: Path) -> None:
        order.append(f"rename {Path(source).name} -> {Path(target).name}")
        assert not Path(target).exists()
        rename(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", renamed)
    _publish(registry, staged, base)
    place = next(n for n, step in enumerate(order) if step.startswith("rename"))
    work = order[place].split()[1]
    assert order[place].endswith("-> v0001") and work.startswith(".")
    files = {path.name for path in registry.path("router", 1).iterdir()}
    assert {f"flush {name}" for name in files} <= set(order[:place])
    assert order[place - 1] == f"flush {work}" and order[place + 1] == "flush router"


@pytest.mark.parametrize("step", ["copy", "manifest", "rename"])
def test_a_killed_publisher_leaves_nothing_half_visible(
    registry: Registry, staged: Path, base: BaseModelInfo, step: str
) -> None:
    patch = {
        "copy": "durable.copy_file = die",
        "manifest": "durable.write_file = die",
        "rename": "os.rename = die",
    }[step]
    code = f"""
        import os, signal, sys
        from pathlib import Path
        from marft_agents.registry import Registry, durable
        from marft_agents.schema import BaseModelInfo
        def die(*a, **k):
            os.kill(os.getpid(), signal.SIGKILL)
        {patch}
        base = BaseModelInfo.model_validate_json(sys.argv[3])
        Registry(sys.argv[1]).publish("router", Path(sys.argv[2]), base=base, parent=None)
    """
    argv = [str(registry.root), str(staged), base.model_dump_json()]
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), *argv], check=False)
    assert done.returncode == -signal.SIGKILL
    assert registry.versions("router") == [] == registry.agents()
    assert _publish(registry, staged, base).version == 1


def test_a_folder_that_was_renamed_by_hand_is_named(
    registry: Registry, staged: Path, base: BaseModelInfo
) -> None:
    _publish(registry, staged, base)
    (registry.root / "router").rename(registry.root / "My Router")
    with pytest.raises(RegistryError, match=r"My Router holds .* rename it to 'my-router'"):
        registry.agents()
