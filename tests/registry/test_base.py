"""A base model is recognised by its shape and weights, wherever its folder lies."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from marft_agents.errors import AdapterError, ConfigError
from marft_agents.registry import (
    describe_base,
    module_shapes,
    resolve_model_dir,
    write_untrained_adapter,
)
from marft_agents.registry.tensors import read_header
from tests.registry.bases import make_base, write_tensors


def test_fingerprint_follows_the_content_not_the_folder(tmp_path: Path) -> None:
    one = describe_base(make_base(tmp_path / "one"))
    shutil.copytree(tmp_path / "one", tmp_path / "elsewhere")
    assert describe_base(tmp_path / "elsewhere").fingerprint == one.fingerprint
    assert describe_base(tmp_path / "elsewhere").name == "elsewhere"
    others = [make_base(tmp_path / "seed", seed=1), make_base(tmp_path / "deep", layers=3)]
    assert len({one.fingerprint, *(describe_base(o).fingerprint for o in others)}) == 3


def test_known_fingerprint_stays_the_same_across_releases(tmp_path: Path) -> None:
    base = make_base(tmp_path / "b", hidden=2, layers=1)
    write_tensors(base / "model.safetensors", {"model.x.weight": (2, 2)}, fill=1.0)
    assert describe_base(base).fingerprint == (
        "bc367ac96ecee02aa833621ee835c0bcf011e6b2c9ea04c17797e707a0c3e1f1"
    )


def test_description_counts_layers_once(tmp_path: Path) -> None:
    base = describe_base(make_base(tmp_path / "b"))
    assert base.modules["model.layers.*.self_attn.k_proj"] == (4, 8)
    assert not any("embed" in name for name in base.modules)
    assert (base.hidden_size, base.num_hidden_layers, base.vocab_size) == (8, 2, 32)


def test_layers_of_different_shape_are_listed_one_by_one(tmp_path: Path) -> None:
    base = make_base(tmp_path / "b")
    shapes = {
        "model.layers.0.mlp.up_proj.weight": (4, 8),
        "model.layers.1.mlp.up_proj.weight": (6, 8),
    }
    write_tensors(base / "model.safetensors", shapes)
    assert describe_base(base).modules == {
        "model.layers.0.mlp.up_proj": (4, 8),
        "model.layers.1.mlp.up_proj": (6, 8),
    }


def test_sharded_weights_equal_one_file_in_shapes(tmp_path: Path) -> None:
    base = make_base(tmp_path / "b")
    shapes = {n: t.shape for n, t in read_header(base / "model.safetensors").items()}
    before = describe_base(base).modules
    (base / "model.safetensors").unlink()
    names = sorted(shapes)
    parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for file, part in parts.items():
        write_tensors(base / file, {n: shapes[n] for n in part})
    weight_map = {n: file for file, part in parts.items() for n in part}
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert describe_base(base).modules == before
    (base / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"b\.safetensors"):
        describe_base(base)


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "no-such-folder", "a/b/c"])
def test_a_missing_model_is_named(model: str) -> None:
    with pytest.raises(ConfigError, match=model):
        resolve_model_dir(model)


def test_folders_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        describe_base(tmp_path)
    base = make_base(tmp_path / "b")
    (base / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors.*save_pretrained"):
        describe_base(base)
    (base / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="hidden_size"):
        describe_base(base)


def test_module_shapes_and_unknown_targets(tmp_path: Path) -> None:
    base = make_base(tmp_path / "b", layers=1)
    assert module_shapes(base, ["q_proj", "self_attn.k_proj"]) == {
        "model.layers.0.self_attn.k_proj": (4, 8),
        "model.layers.0.self_attn.q_proj": (8, 8),
    }
    with pytest.raises(ConfigError, match=r"'w1'.*down_proj, k_proj"):
        module_shapes(base, ["w1"])


def test_untrained_adapter_is_the_same_everywhere(tmp_path: Path) -> None:
    base = make_base(tmp_path / "b")
    one, two, other = (
        write_untrained_adapter(
            tmp_path / n, base, rank=4, alpha=8, target_modules=["q_proj"], seed=s
        )
        for n, s in (("one", 0), ("two", 0), ("other", 1))
    )
    weights = [(f / "adapter_model.safetensors").read_bytes() for f in (one, two, other)]
    assert weights[0] == weights[1] != weights[2]
    with pytest.raises(AdapterError, match="lm_head"):
        write_untrained_adapter(tmp_path / "x", base, target_modules=["lm_head"])


def test_untrained_adapter_is_what_peft_reads(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    base = make_base(tmp_path / "b")
    folder = write_untrained_adapter(tmp_path / "a", base, rank=4, target_modules=["q_proj"])
    tensors = load_file(folder / "adapter_model.safetensors")
    a = tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    b = tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    assert a.shape == (4, 8) and b.shape == (8, 4)
    assert torch.all(a.abs() <= 8**-0.5) and a.std() > 0.1
    assert torch.count_nonzero(b) == 0


def test_registry_loads_no_torch() -> None:
    code = "import sys, marft_agents.registry; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
