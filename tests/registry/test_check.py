"""A staged folder that an engine would serve wrongly is refused at publishing."""

from __future__ import annotations

from pathlib import Path

import pytest

from marft_agents.errors import AdapterError
from marft_agents.registry import describe_base, inspect_adapter
from marft_agents.schema import BaseModelInfo
from tests.registry.bases import Shapes, adapter_shapes, make_adapter, make_base


@pytest.fixture
def base(tmp_path: Path) -> BaseModelInfo:
    return describe_base(make_base(tmp_path / "base"))


def test_a_good_adapter_says_what_it_is(tmp_path: Path, base: BaseModelInfo) -> None:
    facts = inspect_adapter(make_adapter(tmp_path / "a"), base)
    assert (facts.rank, facts.target_modules, facts.has_effect) == (2, ["q_proj"], True)


def test_all_zero_b_is_noticed(tmp_path: Path, base: BaseModelInfo) -> None:
    assert not inspect_adapter(make_adapter(tmp_path / "a", fill=0.0), base).has_effect


def test_rank_pattern_gives_the_shape_of_its_modules(tmp_path: Path, base: BaseModelInfo) -> None:
    config = {"r": 1, "rank_pattern": {"q_proj": 2}}
    facts = inspect_adapter(make_adapter(tmp_path / "a", rank=2, config=config), base)
    assert facts.rank == 2


def _renamed(old: str, new: str) -> Shapes:
    return {name.replace(old, new): shape for name, shape in adapter_shapes().items()}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (_renamed("base_model.model.", ""), "base_model.model.<module>"),
        (_renamed("model.layers", "transformer.layers"), "does not have"),
        (_renamed("q_proj", "qkv_proj"), "qkv_proj.*k_proj, o_proj, q_proj, v_proj"),
        (_renamed("layers.1.", "layers.2."), r"layer 2.*2 layers \(0 to 1\)"),
        (adapter_shapes(hidden=16), r"hidden size 8.*\[2, 8\]"),
        (adapter_shapes(rank=3), r"\[3, 8\].*rank 2"),
        (dict(list(adapter_shapes().items())[1:]), "no lora_A for model.layers.0"),
        ({}, "no tensor"),
        (adapter_shapes() | {"base_model.model.lm_head.weight": (2, 2)}, "lm_head.weight"),
    ],
    ids=["prefix", "names", "module", "layers", "hidden", "rank", "pair", "empty", "extra"],
)
def test_weights_of_another_model_are_refused(
    tmp_path: Path, base: BaseModelInfo, shapes: Shapes, message: str
) -> None:
    folder = make_adapter(tmp_path / "a", shapes=shapes)
    with pytest.raises(AdapterError, match=message):
        inspect_adapter(folder, base)


def test_a_base_described_without_modules_still_limits_layers(
    tmp_path: Path, base: BaseModelInfo
) -> None:
    bare = base.model_copy(update={"modules": {}})
    inspect_adapter(make_adapter(tmp_path / "a"), bare)
    folder = make_adapter(tmp_path / "b", shapes=adapter_shapes(layers=3))
    with pytest.raises(AdapterError, match="layer 2"):
        inspect_adapter(folder, bare)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_weights_are_refused(tmp_path: Path, base: BaseModelInfo, value: float) -> None:
    with pytest.raises(AdapterError, match="NaN or infinity"):
        inspect_adapter(make_adapter(tmp_path / "a", fill=value), base)


@pytest.mark.parametrize("keep", [0, 7, 60, -1])
def test_a_cut_file_is_refused(tmp_path: Path, base: BaseModelInfo, keep: int) -> None:
    weights = make_adapter(tmp_path / "a") / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(AdapterError, match="damaged"):
        inspect_adapter(weights.parent, base)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, base: BaseModelInfo, name: str) -> None:
    folder = make_adapter(tmp_path / "a")
    (folder / name).unlink()
    with pytest.raises(AdapterError, match=f"no (readable )?{name}"):
        inspect_adapter(folder, base)


def test_garbage_is_refused(tmp_path: Path, base: BaseModelInfo) -> None:
    folder = make_adapter(tmp_path / "a")
    (folder / "adapter_model.safetensors").write_bytes(b"\x08" + bytes(7) + b"not json" + bytes(9))
    with pytest.raises(AdapterError, match="no JSON"):
        inspect_adapter(folder, base)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterError, match="no valid JSON"):
        inspect_adapter(folder, base)
