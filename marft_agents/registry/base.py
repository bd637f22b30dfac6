"""What identifies a base model, read without torch.

Invariant: two folders with the same configuration shape and the same weights give the same
fingerprint on any machine, whatever the folder is called; another model gives another one.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from marft_agents.errors import AdapterError, ConfigError, MissingExtraError
from marft_agents.registry.tensors import TensorInfo, read_bytes, read_header
from marft_agents.schema import BaseModelInfo

_SHAPE_FIELDS = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "intermediate_size", "vocab_size", "tie_word_embeddings",
)  # fmt: skip
_SAMPLES = 8
_SAMPLE_BYTES = 4096
_NOT_ADAPTED = ("lm_head", "embed_tokens", "wte", "wpe", "embed_out")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_Headers = dict[str, tuple[Path, TensorInfo]]


def resolve_model_dir(model: str) -> Path:
    """A local model folder as it is; a hub id through ``huggingface_hub``, the local cache first.

    Raises:
        ConfigError: when it is neither, or cannot be downloaded.
        MissingExtraError: for a hub id without ``huggingface_hub`` installed.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ConfigError(
            f"no model folder at {model!r}; give a folder with config.json and *.safetensors,"
            " or a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise MissingExtraError("train", needed_for=f"downloading the model {model!r}") from error
    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        return Path(hub.snapshot_download(model, allow_patterns=patterns, local_files_only=True))
    except Exception:
        try:
            return Path(hub.snapshot_download(model, allow_patterns=patterns))
        except Exception as error:
            raise ConfigError(
                f"{model!r} is no local folder and could not be downloaded"
                f" ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''});"
                " check the id and the network, or give a folder"
            ) from error


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{folder} is no model folder: it has no readable config.json") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no JSON object")
    fields = cast("dict[str, Any]", config)
    nested = fields.get("text_config")
    if "hidden_size" not in fields and isinstance(nested, dict):
        fields = fields | cast("dict[str, Any]", nested)
    for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
        if not isinstance(fields.get(name), int):
            raise ConfigError(f"{path} has no number under {name!r}; is it a language model's?")
    return fields


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names: set[str] = set(
                json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            )
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{index} has no readable weight_map") from error
        return [folder / name for name in sorted(names)]
    single = folder / "model.safetensors"
    files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{folder} has no *.safetensors file; convert the weights with"
            " AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    return files


def _headers(folder: Path) -> _Headers:
    out: _Headers = {}
    for file in _weight_files(folder):
        try:
            out |= {name: (file, tensor) for name, tensor in read_header(file).items()}
        except AdapterError as error:
            raise ConfigError(f"base model: {error}") from error
    return out


def _linear_shapes(headers: _Headers) -> dict[str, tuple[int, int]]:
    """(out, in) of every matrix that an adapter may sit on, by module path, sorted."""
    shapes: dict[str, tuple[int, int]] = {}
    for name in sorted(headers):
        shape = headers[name][1].shape
        module = name.removesuffix(".weight")
        if module != name and len(shape) == 2 and module.rsplit(".", 1)[-1] not in _NOT_ADAPTED:
            shapes[module] = (shape[0], shape[1])
    return shapes


def module_pattern(module: str) -> str:
    """``model.layers.*.self_attn.q_proj`` for ``model.layers.7.self_attn.q_proj``."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", module)


def _patterns(shapes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Shapes by pattern where all layers agree, by full module path where they do not."""
    groups: dict[str, dict[str, tuple[int, int]]] = {}
    for module, shape in shapes.items():
        groups.setdefault(module_pattern(module), {})[module] = shape
    out: dict[str, tuple[int, int]] = {}
    for pattern, members in groups.items():
        same = len(set(members.values())) == 1
        out |= {pattern: next(iter(members.values()))} if same else members
    return out


def _fingerprint(config: Mapping[str, Any], headers: _Headers) -> str:
    digest = hashlib.sha256()
    digest.update(json.dumps([[name, config.get(name)] for name in sorted(_SHAPE_FIELDS)]).encode())
    for name in sorted(headers):
        tensor = headers[name][1]
        digest.update(json.dumps([name, tensor.dtype, tensor.shape]).encode())
    matrices = [name for name in sorted(headers) if len(headers[name][1].shape) > 1]
    step = max(1, len(matrices) // _SAMPLES)
    for name in matrices[::step][:_SAMPLES]:
        file, tensor = headers[name]
        digest.update(read_bytes(file, tensor, _SAMPLE_BYTES))
    return digest.hexdigest()


def _display_name(model: str, folder: Path) -> str:
    """The name to publish: it must not give away where the user keeps things.

    A hub id, ``org/name`` of a local copy too; else the folder's own name.
    """
    if not Path(model).expanduser().is_dir() or _HUB_ID.fullmatch(model):
        return model
    cached = next((p.name for p in folder.parents if p.name.startswith("models--")), None)
    return cached.removeprefix("models--").replace("--", "/") if cached else folder.name


def describe_base(model_dir: str | Path) -> BaseModelInfo:
    """Identity and module shapes of a model folder (or hub id), from its headers and a sample.

    Raises:
        ConfigError: when the folder is no causal language model in safetensors files.
    """
    folder = resolve_model_dir(str(model_dir))
    config = _read_config(folder)
    headers = _headers(folder)
    return BaseModelInfo(
        name=_display_name(str(model_dir), folder),
        hidden_size=config["hidden_size"],
        num_hidden_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        model_type=str(config.get("model_type", "unknown")),
        fingerprint=_fingerprint(config, headers),
        modules=_patterns(_linear_shapes(headers)),
    )


def weight_sizes(model_dir: str | Path) -> dict[str, tuple[int, int]]:
    """(elements, bytes on disk) of every weight of the model, from the files' headers."""
    headers = _headers(resolve_model_dir(str(model_dir)))
    return {
        name: (math.prod(tensor.shape), tensor.end - tensor.start)
        for name, (_, tensor) in headers.items()
    }


def module_shapes(
    model_dir: str | Path, target_modules: Iterable[str]
) -> dict[str, tuple[int, int]]:
    """(out, in) of every module whose last name (or dotted ending) is a target, sorted by path.

    Raises:
        ConfigError: when a target matches no module of the model.
    """
    shapes = _linear_shapes(_headers(resolve_model_dir(str(model_dir))))
    out: dict[str, tuple[int, int]] = {}
    for target in target_modules:
        found = {m: s for m, s in shapes.items() if m == target or m.endswith(f".{target}")}
        if not found:
            known = sorted({module.rsplit(".", 1)[-1] for module in shapes})
            raise ConfigError(
                f"target module {target!r} is in no layer of {model_dir};"
                f" it has {', '.join(known) or 'no linear layer'}"
            )
        out |= found
    return dict(sorted(out.items()))
