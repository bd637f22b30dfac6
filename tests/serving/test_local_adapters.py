"""Adapters enter whole or not at all, and a row keeps the one it began with."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from marft_agents.serving.local.engine import LocalEngine
from marft_agents.serving.local.protocol import Settings
from marft_agents.serving.local.refusal import Refusal
from tests.serving.local_setup import Tensors, World, ask, wait_until, write_adapter

PROMPT = [4, 31, 7, 99, 5, 12, 60]
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def shared(world: World) -> Generator[LocalEngine]:
    """For tests that leave it as it was."""
    with world.engine() as engine:
        yield engine


@pytest.fixture
def engine(world: World) -> Generator[LocalEngine]:
    with world.engine() as engine:
        yield engine


def _drop(key: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[key]

    return change


def _put(key: str, *shape: int, value: float = 1.0) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[key] = torch.full(shape, value)

    return change


BROKEN: dict[str, tuple[dict[str, Any], Callable[[Tensors], None] | None, str]] = {
    "rank": ({"r": 32, "rank_pattern": {}}, None, "rank 32 is greater than max_lora_rank 16"),
    "rank pattern": ({"rank_pattern": {"q_proj": 64}}, None, "rank 64 is greater"),
    "rank disagrees": ({"r": 8}, None, "rank 4 in the file and 8 in adapter_config.json"),
    "no rank": ({"r": "four"}, None, "r='four' is no rank"),
    "dora": ({"use_dora": True}, None, "use_dora=True"),
    "bias": ({"bias": "all"}, None, "bias='all'"),
    "modules to save": ({"modules_to_save": ["lm_head"]}, None, "modules_to_save=['lm_head']"),
    "another kind": ({"peft_type": "IA3"}, None, "peft_type is 'IA3'"),
    "from the future": ({"use_magic": 3}, None, "use_magic=3"),
    "changed base": ({"init_lora_weights": "pissa"}, None, "changes the base model"),
    "unknown target": ({"target_modules": ["q_proj", "qkv"]}, None, "is called 'qkv'"),
    "more targets": ({"target_modules": ["q_proj", "o_proj"]}, None, "do not agree"),
    "layer missing": ({}, _drop(f"{Q0}.lora_A.weight"), "lora_B without the other"),
    "no such layer": ({}, _put(Q0.replace("0", "7") + ".lora_A.weight", 4, 32), "without"),
    "alien tensor": ({}, _put("critic.weight", 2), "'critic.weight' is no LoRA weight"),
    "head": ({}, _put("base_model.model.lm_head.lora_A.weight", 4, 32), "without the other"),
    "hidden size": ({}, _put(f"{Q0}.lora_A.weight", 4, 48), "another base model"),
    "two ranks": ({}, _put(f"{Q0}.lora_A.weight", 5, 32), "two ranks, 5 and 4"),
    "not finite": ({}, _put(f"{Q0}.lora_A.weight", 4, 32, value=float("nan")), "not finite"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_adapter_is_refused_and_the_engine_lives(
    shared: LocalEngine, tmp_path: Path, case: str
) -> None:
    config, change, text = BROKEN[case]
    folder = write_adapter(tmp_path / "bad", config=config, change=change)
    with pytest.raises(Refusal, match=re.escape(text)) as refused:
        shared.load_adapter("bad@v1", folder)
    assert refused.value.status == 400
    assert "bad@v1" not in shared.adapters.paths()
    assert ask(shared, "router@v1", PROMPT).wait().finish_reason == "length"


@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens", "model.layers.5.mlp.up_proj"])
def test_layers_that_no_adapter_may_touch(shared: LocalEngine, tmp_path: Path, module: str) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.zeros(4, 32)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.zeros(64, 4)

    folder = write_adapter(tmp_path / "bad", change=change)
    with pytest.raises(Refusal, match=f"no adaptable layer '{module}'"):
        shared.load_adapter("bad@v1", folder)


@pytest.mark.parametrize("cut", ["adapter_config.json", "adapter_model.safetensors", None])
def test_a_missing_folder_or_file_is_404(
    shared: LocalEngine, tmp_path: Path, cut: str | None
) -> None:
    folder = tmp_path / "gone"
    if cut is not None:
        (write_adapter(folder) / cut).unlink()
    with pytest.raises(Refusal, match="does not exist") as refused:
        shared.load_adapter("gone@v1", folder)
    assert refused.value.status == 404


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("adapter_config.json", b"{", "is not JSON"),
        ("adapter_config.json", b"[1]", "no JSON object"),
        ("adapter_model.safetensors", b"", "no readable safetensors"),
        ("adapter_model.safetensors", b"garbage" * 99, "no readable safetensors"),
    ],
)
def test_unreadable_files(
    shared: LocalEngine, tmp_path: Path, name: str, content: bytes, text: str
) -> None:
    folder = write_adapter(tmp_path / "bad")
    (folder / name).write_bytes(content)
    with pytest.raises(Refusal, match=text):
        shared.load_adapter("bad@v1", folder)


def test_scaling_follows_the_config(world: World, engine: LocalEngine, tmp_path: Path) -> None:
    """Rank-stabilised scaling, patterns and fewer layers, as PEFT reads them."""

    def only_layer_one(tensors: Tensors) -> None:
        for key in [key for key in tensors if ".layers.0." in key]:
            del tensors[key]

    world.folders["odd@v1"] = write_adapter(
        tmp_path / "odd",
        seed=4,
        config={
            "use_rslora": True,
            "alpha_pattern": {"q_proj": 3},
            "layers_to_transform": [1],
            "lora_dropout": 0.5,
        },
        change=only_layer_one,
    )
    engine.load_adapter("odd@v1", world.folders["odd@v1"])
    whole = ask(engine, "odd@v1", PROMPT).wait()
    expected = world.logprobs("odd@v1", PROMPT, whole.token_ids)
    assert whole.logprobs == pytest.approx(expected, abs=1e-4)
    base = world.logprobs("base", PROMPT, whole.token_ids)
    assert max(abs(a - b) for a, b in zip(expected, base, strict=True)) > 0.01


def test_names_that_are_taken(shared: LocalEngine, world: World) -> None:
    folder = world.folders["router@v1"]
    with pytest.raises(Refusal, match="already been loaded"):
        shared.load_adapter("router@v1", folder)
    with pytest.raises(Refusal, match="served base model"):
        shared.load_adapter("base", folder)
    with pytest.raises(Refusal, match="cannot be found") as refused:
        shared.unload_adapter("router@v9")
    assert refused.value.status == 404


def test_a_row_keeps_its_adapter_when_the_name_goes(engine: LocalEngine, world: World) -> None:
    settings = Settings(300, temperature=0.0, ignore_eos=True)
    reply = ask(engine, "router@v1", PROMPT, settings)
    reply.next()
    engine.unload_adapter("router@v1")
    with pytest.raises(Refusal) as refused:
        ask(engine, "router@v1", PROMPT)
    assert refused.value.status == 404
    engine.load_adapter("router@v1", world.folders["writer@v1"])
    assert reply.whole.finish_reason is None, "the reply must outlast the swap"
    new = ask(engine, "router@v1", PROMPT).wait()
    assert new.token_ids == ask(engine, "writer@v1", PROMPT).wait().token_ids
    whole = reply.wait()
    expected = world.logprobs("router@v1", PROMPT, whole.token_ids)
    assert whole.logprobs == pytest.approx(expected, abs=1e-4)


def test_weights_leave_after_the_last_row(engine: LocalEngine) -> None:
    loaded: dict[str, Any] = engine.model.peft.peft_config
    before = len(loaded)
    reply = ask(engine, "router@v1", PROMPT, max_tokens=200)
    reply.next()
    engine.unload_adapter("router@v1")
    ask(engine, "base", PROMPT).wait()
    assert len(loaded) == before
    reply.wait()
    wait_until(lambda: len(loaded) == before - 1)


def test_replacing_in_place_changes_new_replies_only(engine: LocalEngine, world: World) -> None:
    old = ask(engine, "router@v1", PROMPT, max_tokens=200)
    old.next()
    engine.load_adapter("router@v1", world.folders["writer@v1"], replace=True)
    new = ask(engine, "router@v1", PROMPT).wait()
    assert new.token_ids == ask(engine, "writer@v1", PROMPT).wait().token_ids
    expected = world.logprobs("router@v1", PROMPT, old.wait().token_ids)
    assert old.whole.logprobs == pytest.approx(expected, abs=1e-4)


def test_loading_and_unloading_again_and_again_leaves_nothing(
    engine: LocalEngine, world: World, tmp_path: Path
) -> None:
    loaded: dict[str, Any] = engine.model.peft.peft_config
    before = set(loaded)
    base = ask(engine, "base", PROMPT).wait()
    for seed in range(4):
        folder = write_adapter(tmp_path / f"v{seed}", seed=seed + 10)
        world.folders[f"x@v{seed}"] = folder
        engine.load_adapter("x@v1", folder)
        whole = ask(engine, "x@v1", PROMPT).wait()
        expected = world.logprobs(f"x@v{seed}", PROMPT, whole.token_ids)
        assert whole.logprobs == pytest.approx(expected, abs=1e-4)
        engine.unload_adapter("x@v1")
    wait_until(lambda: set(loaded) == before)
    assert ask(engine, "base", PROMPT).wait() == base


def test_a_prefix_of_an_unloaded_adapter_is_not_used_again(
    engine: LocalEngine, world: World
) -> None:
    prompt = PROMPT * 6
    ask(engine, "router@v1", prompt).wait()
    engine.unload_adapter("router@v1")
    engine.load_adapter("router@v1", world.folders["writer@v1"])
    whole = ask(engine, "router@v1", prompt).wait()
    assert engine.reused_tokens == 0
    expected = world.logprobs("writer@v1", prompt, whole.token_ids)
    assert whole.logprobs == pytest.approx(expected, abs=1e-4)


def test_an_adapter_written_by_peft_itself(world: World, engine: LocalEngine) -> None:
    """What PEFT saves today loads: every field it writes is known here."""
    from peft import LoraConfig

    folder = write_adapter(world.model.parent / "saved", seed=5)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj"])
    config.save_pretrained(str(folder))
    assert json.loads((folder / "adapter_config.json").read_text())["peft_version"]
    engine.load_adapter("saved@v1", folder)
    assert "saved@v1" in engine.adapters.paths()
