"""What a run refuses before it trains: nothing is loaded, nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import AdapterError, MarftError, RegistryError
from marft_agents.training import MarftConfig, finetune
from tests.training.synthetic import Team, TinyModel, publish_untrained, snapshot


def refuse(tiny: TinyModel, root: Path, output: Path, **settings: Any) -> tuple[MarftError, str]:
    """The error of a run, and what was said before it."""
    Team(tiny, root / "logs").write(6)
    before, said = snapshot(root), list[str]()
    with pytest.raises(MarftError) as refused:
        finetune(
            [root / "logs"],
            model=str(tiny.folder),
            output=output,
            config=MarftConfig(use_cpu=True, num_train_epochs=1, **settings),
            say=said.append,
        )
    assert snapshot(root) == before
    return refused.value, "\n".join(said)


@pytest.mark.parametrize("where", ["file", "file/adapters", "file/adapters/deeper"])
def test_a_folder_that_cannot_be_made(tiny: TinyModel, tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("a file")
    error, said = refuse(tiny, tmp_path, tmp_path / where)
    assert isinstance(error, RegistryError) and str(tmp_path / "file") in str(error)
    assert "loaded" not in said


def test_a_read_only_folder(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_untrained(tmp_path / "adapters", tiny.folder)
    # The owner of the tests may be root, who may write anywhere.
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != "router")  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType] os.access
    error, said = refuse(tiny, tmp_path, tmp_path / "adapters")
    assert isinstance(error, RegistryError) and "router is read-only" in str(error)
    assert "loaded" not in said


def test_an_agents_folder_that_is_a_file(tiny: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "router").write_text("a file")
    error, _ = refuse(tiny, tmp_path, tmp_path / "adapters")
    assert isinstance(error, RegistryError) and "router/CURRENT" in str(error)


def test_a_starting_point_that_was_changed(tiny: TinyModel, tmp_path: Path) -> None:
    registry = publish_untrained(tmp_path / "adapters", tiny.folder)
    weights = registry.path("writer", 1) / "adapter_model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:100])
    error, said = refuse(tiny, tmp_path, tmp_path / "adapters")
    assert isinstance(error, AdapterError) and str(weights) in str(error)
    assert "loaded" not in said


@pytest.mark.parametrize("name", ["CURRENT is a folder", "CURRENT is no text"])
def test_a_pointer_that_cannot_be_read(tiny: TinyModel, tmp_path: Path, name: str) -> None:
    registry = publish_untrained(tmp_path / "adapters", tiny.folder)
    pointer = registry.root / "router" / "CURRENT"
    pointer.unlink()
    if name == "CURRENT is a folder":
        pointer.mkdir()
    else:
        pointer.write_bytes(b"\xff\xfe")
    error, _ = refuse(tiny, tmp_path, tmp_path / "adapters")
    assert isinstance(error, RegistryError) and str(pointer) in str(error)
