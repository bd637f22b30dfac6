"""The engine's command line is the measured one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from marft_agents.errors import EngineError
from marft_agents.serving.commands import (
    VllmInstall,
    find_vllm,
    local_command,
    lora_slots,
    model_length,
    vllm_command,
)

CPU = VllmInstall("/opt/py", "0.32.0", cpu=True)
GPU = VllmInstall("/opt/py", "0.32.0", cpu=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 8192}))
    return tmp_path


def _command(model: Path, install: VllmInstall, **more: object) -> str:
    command = vllm_command(
        model,
        port=9,
        install=install,
        max_lora_rank=16,
        max_loras=4,
        target_modules=["v_proj", "q_proj"],
        extra=["--seed", "1"],
        **more,  # type: ignore[arg-type]
    )
    return " ".join(command.argv)


def test_vllm_on_a_cpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _command(model, CPU) == (
        f"/opt/py -m vllm.entrypoints.openai.api_server --model {model} --served-model-name base"
        " --host 127.0.0.1 --port 9 --max-lora-rank 16 --max-loras 4 --max-cpu-loras 8"
        " --logprobs-mode processed_logprobs --generation-config vllm --max-model-len 4096"
        " --dtype float32 --enforce-eager --enable-lora --lora-target-modules q_proj v_proj"
        " --seed 1"
    )
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    command = vllm_command(
        model, port=9, install=CPU, max_lora_rank=8, max_loras=2, target_modules=["q_proj"]
    )
    env = command.env
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert env["VLLM_CPU_OMP_THREADS_BIND"]
    assert env["HF_HUB_OFFLINE"] == "1" and env["VLLM_NO_USAGE_STATS"] == "1"
    assert env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    # Doors that stay shut whatever the caller's environment says.
    assert env["VLLM_SERVER_DEV_MODE"] is None and env["VLLM_LORA_RESOLVER_CACHE_DIR"] is None


def test_vllm_on_a_gpu(model: Path) -> None:
    line = _command(model, GPU)
    for word in ("float32", "--enforce-eager", "--max-model-len"):
        assert word not in line


def test_context_length(model: Path) -> None:
    assert "--max-model-len 512" in _command(model, CPU, max_model_len=512)
    (model / "config.json").write_text("{}")
    assert model_length(model, cpu=True) == 4096
    (model / "config.json").write_text('{"max_position_embeddings": 1024}')
    assert model_length(model, cpu=True) == 1024


def test_slots_for_old_and_new_of_every_agent() -> None:
    assert [lora_slots(n) for n in (1, 2, 5)] == [2, 4, 10]


def test_local(model: Path) -> None:
    command = local_command(
        model, port=9, max_lora_rank=8, max_model_len=64, extra=["--max-batch", "4"]
    )
    assert " ".join(command.argv) == (
        f"{sys.executable} -m marft_agents.serving.local --model {model} --host 127.0.0.1 --port 9"
        " --served-model-name base --max-lora-rank 8 --max-model-len 64 --max-batch 4"
    )


def _python(folder: Path, answer: str) -> str:
    script = folder / "python"
    script.write_text(f"#!/bin/sh\necho '{answer}'\n")
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize(
    ("names", "cpu"),
    [({"vllm": "0.32.0"}, False), ({"vllm-cpu": "0.32.0"}, True), ({"vllm": "0.32+cpu"}, True)],
)
def test_finding_vllm(tmp_path: Path, names: dict[str, str], cpu: bool) -> None:
    install = find_vllm(_python(tmp_path, json.dumps({"found": True, "names": names})))
    assert install.cpu is cpu


def test_no_vllm_names_the_cure(tmp_path: Path) -> None:
    python = _python(tmp_path, json.dumps({"found": False, "names": {}}))
    with pytest.raises(EngineError, match=r"not installed for .*--engine local"):
        find_vllm(python)
    with pytest.raises(EngineError, match=r"no Python that can be run.*--engine local"):
        find_vllm(str(tmp_path / "nowhere"))
    with pytest.raises(EngineError, match="no Python that can be run"):
        find_vllm(_python(tmp_path, "hello"))
