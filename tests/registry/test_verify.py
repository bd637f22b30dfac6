"""Whatever is wrong with a version on disk is found and named, and never exported."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import AdapterError, RegistryError
from marft_agents.registry import Registry, describe_base, durable
from marft_agents.registry.export import export
from marft_agents.registry.tensors import write_float32
from marft_agents.registry.verify import check_agent, check_version, file_states
from marft_agents.schema import Probe
from tests.registry.bases import adapter_shapes, make_adapter, make_base, write_tensors

Damage = Callable[[Path, dict[str, Any]], None]
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    base = describe_base(make_base(tmp_path / "base"))
    staged = make_adapter(
        tmp_path / "staged", config={"base_model_name_or_path": "/home/somebody/models/base"}
    )
    registry = Registry(tmp_path / "adapters")
    probe = Probe(prompt_token_ids=[1], token_ids=[2], logprobs=[-1.5], base_logprobs=[-2.0])
    for parent in (None, 1):
        registry.publish("router", staged, base=base, parent=parent, probe=probe)
    return registry


def damage(registry: Registry, how: Damage, *, rehash: bool = True) -> None:
    """Change version 2; with ``rehash``, its manifest then says that this was published."""
    folder = registry.path("router", 2)
    for file in folder.iterdir():
        file.chmod(0o644)
    manifest = json.loads((folder / "manifest.json").read_text())
    how(folder, manifest)
    if rehash:
        for name in manifest["files"]:
            if (folder / name).is_file():
                manifest["files"][name] = durable.sha256_file(folder / name)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def found(registry: Registry) -> list[str]:
    return list(check_version(registry, "router", 2))


def test_a_sound_registry_has_no_finding(registry: Registry, tmp_path: Path) -> None:
    assert found(registry) == list(check_agent(registry, "router")) == []
    other = describe_base(make_base(tmp_path / "other", seed=9))
    (finding,) = check_version(registry, "router", 2, other)
    assert "of the base base" in finding and "not of other" in finding


def _rank(folder: Path, manifest: dict[str, Any]) -> None:
    manifest["rank"] = 4


def _modules(folder: Path, manifest: dict[str, Any]) -> None:
    manifest["target_modules"] = ["k_proj", "q_proj"]


def _untrained(folder: Path, manifest: dict[str, Any]) -> None:
    manifest["untrained"] = True


def _shapes(folder: Path, manifest: dict[str, Any]) -> None:
    write_tensors(folder / WEIGHTS, adapter_shapes(hidden=16))


def _layers(folder: Path, manifest: dict[str, Any]) -> None:
    write_tensors(folder / WEIGHTS, adapter_shapes(layers=3))


def _names(folder: Path, manifest: dict[str, Any]) -> None:
    write_tensors(folder / WEIGHTS, {"lora.weight": (2, 2)})


def _nan(folder: Path, manifest: dict[str, Any]) -> None:
    tensors = {
        name: (shape, array("f", [float("nan")] * (shape[0] * shape[1])))
        for name, shape in adapter_shapes().items()
    }
    write_float32(folder / WEIGHTS, tensors)


def _short(folder: Path, manifest: dict[str, Any]) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-9])


def _dora(folder: Path, manifest: dict[str, Any]) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))


def _gone(folder: Path, manifest: dict[str, Any]) -> None:
    (folder / "adapter_config.json").unlink()


def _moved(folder: Path, manifest: dict[str, Any]) -> None:
    manifest["agent"], manifest["version"] = "writer", 7


def _parent(folder: Path, manifest: dict[str, Any]) -> None:
    manifest["parent"] = 2


def _probe(folder: Path, manifest: dict[str, Any]) -> None:
    manifest["probe"]["token_ids"] = [32, 1]


def _more(folder: Path, manifest: dict[str, Any]) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"?")


def _unlisted(folder: Path, manifest: dict[str, Any]) -> None:
    del manifest["files"][WEIGHTS]


def _outside(folder: Path, manifest: dict[str, Any]) -> None:
    manifest["files"]["../v0001/README.md"] = "0"


@pytest.mark.parametrize(
    ("how", "parts"),
    [
        (_rank, ["its rank is 2, its manifest says 4"]),
        (_modules, ["it adapts q_proj, its manifest says k_proj, q_proj"]),
        (_untrained, ["its B is not zero, its manifest says untrained"]),
        (_shapes, ["lora_A [2, 16]", "hidden size 8"]),
        (_layers, ["layer 2", "has 2 layers"]),
        (_names, ["'lora.weight' is no LoRA weight"]),
        (_nan, ["NaN or infinity"]),
        (_short, ["is damaged"]),
        (_dora, ["use_dora"]),
        (_gone, ["adapter_config.json is gone"]),
        (_moved, ["its manifest is of writer@v7"]),
        (_parent, ["its parent is the later version 2"]),
        (_probe, ["not as many log-probabilities", "outside the vocabulary of 32"]),
        (_more, ["pytorch_model.bin was not published with it"]),
        (_unlisted, ["no checksum of adapter_model.safetensors"]),
        (_outside, ["names a file outside its folder: '../v0001/README.md'"]),
    ],
)
def test_what_is_broken_is_named(registry: Registry, how: Damage, parts: list[str]) -> None:
    damage(registry, how)
    findings = found(registry)
    assert all(line.startswith("router@v2: ") and "\n" not in line for line in findings)
    for part in parts:
        assert any(part in line for line in findings), findings
    assert list(check_version(registry, "router", 1)) == []


def test_a_changed_file_is_named_once_and_not_exported(registry: Registry, tmp_path: Path) -> None:
    damage(registry, _zero, rehash=False)
    states = dict(file_states(registry.path("router", 2), registry.manifest("router", 2)))
    assert states[WEIGHTS] == "is not the file that was published (checksum)"
    assert states["adapter_config.json"] == states["README.md"] == ""
    with pytest.raises(AdapterError, match=r"checksum differs.*nothing was exported"):
        export(registry, "router", 2, tmp_path / "out" / "router")
    assert list((tmp_path / "out").iterdir()) == []


def _zero(folder: Path, manifest: dict[str, Any]) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-4] + bytes(4))


def test_names_that_lead_elsewhere_are_refused(registry: Registry, tmp_path: Path) -> None:
    damage(registry, _outside)
    with pytest.raises(AdapterError, match="names a file outside"):
        registry.verify("router", 2)
    export(registry, "router", 2, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "README.md", "adapter_config.json", WEIGHTS,
    ]  # fmt: skip


def test_pointers_and_trail(registry: Registry) -> None:
    folder = registry.root / "router"
    (folder / "CURRENT").write_text("v0002\n")
    (folder / "PINNED").write_text("v0001\n")
    assert list(check_agent(registry, "router")) == [
        "router: version 1 is pinned and 2 is in use",
        "router: CURRENT says version 2, and the audit trail says version 1",
    ]
    (folder / "CURRENT").write_text("latest")
    (finding,) = check_agent(registry, "router")
    assert "CURRENT says 'latest'" in finding


def test_an_export_is_whole_new_and_says_nothing_of_this_machine(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "deep" / "router"
    export(registry, "router", 1, target)
    config = json.loads((target / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "base" and config["r"] == 2
    assert (target / WEIGHTS).read_bytes() == (registry.path("router", 1) / WEIGHTS).read_bytes()
    assert "# router@v1" in (target / "README.md").read_text()
    assert not any(str(tmp_path).encode() in file.read_bytes() for file in target.iterdir())
    (tmp_path / "empty").mkdir()
    for taken in (target, tmp_path / "empty", registry.root / "router"):
        with pytest.raises(RegistryError, match="exists already"):
            export(registry, "router", 1, taken)
    with pytest.raises(RegistryError, match="lies inside the registry"):
        export(registry, "router", 1, registry.root / "new" / "copy")

    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "write_file", full)
    with pytest.raises(OSError, match="No space"):
        export(registry, "router", 1, tmp_path / "second")
    assert not [p for p in tmp_path.iterdir() if "second" in p.name]
