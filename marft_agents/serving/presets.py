"""Engine options for a kind of machine, and the share of it that one of several replicas gets.

Invariant: a preset holds only options that change no answer beyond rounding; what keeps recorded
numbers true is in ``commands`` and belongs to no preset.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from marft_agents.errors import ConfigError

PresetName = Literal["auto", "cpu", "gpu", "gpu-throughput", "gpu-shared"]
Device = Literal["cpu", "gpu"]
_BOUND = "VLLM_CPU_OMP_THREADS_BIND"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Preset:
    """Options of vLLM for one kind of machine; ``None`` marks a bare flag."""

    name: str
    device: Device
    options: Mapping[str, str | None]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Set unless the caller's environment has the variable."""


_GPU: dict[str, str | None] = {"--dtype": "auto", "--enable-prefix-caching": None}
PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "cpu",
            "cpu",
            {"--dtype": "float32", "--enforce-eager": None},
            {"VLLM_CPU_KVCACHE_SPACE": "1"},
        ),
        Preset("gpu", "gpu", _GPU | {"--gpu-memory-utilization": "0.90"}),
        Preset(
            "gpu-throughput",
            "gpu",
            _GPU | {"--gpu-memory-utilization": "0.95", "--performance-mode": "throughput"},
        ),
        Preset(
            "gpu-shared", "gpu", _GPU | {"--gpu-memory-utilization": "0.40", "--max-num-seqs": "64"}
        ),
    )
}
PRESET_NAMES: tuple[str, ...] = ("auto", *PRESETS)


def choose_preset(name: str, *, cpu: bool) -> Preset:
    """The preset for a vLLM that was built for a CPU, or for a GPU; ``auto`` follows the build.

    Raises:
        ConfigError: when the build cannot run it, or there is no such preset.
    """
    device: Device = "cpu" if cpu else "gpu"
    if name == "auto":
        return PRESETS[device]
    if name not in PRESETS:
        raise ConfigError(f"--preset {name!r} is none of {', '.join(PRESET_NAMES)}")
    preset = PRESETS[name]
    if preset.device != device:
        raise ConfigError(
            f"--preset {name} is for a {preset.device.upper()}, the vLLM that was found is built"
            f" for a {device.upper()}; use --preset auto, or name another Python with"
            " --engine-python"
        )
    return preset


def usable_cores() -> tuple[int, ...]:
    """Every core that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def replica_env(
    preset: str,
    index: int,
    count: int,
    gpus: Sequence[str] = (),
    *,
    cores: Sequence[int] | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Variables that give replica ``index`` of ``count`` its own part of the machine.

    Args:
        preset: a name of ``PRESETS``; its device decides between GPUs and cores. ``auto`` must
            have been settled with ``choose_preset``.
        gpus: ids as CUDA takes them, divided in order; empty: those that ``environ`` shows, else
            the first ``count``.
        cores: cores to divide; all that this process may use unless given.
        environ: the caller's environment; this process' own unless given.

    Raises:
        ConfigError: when there is less than one GPU or core for each.
    """
    if not 0 <= index < count:
        raise ConfigError(f"there is no replica {index} of {count}")
    if preset not in PRESETS:
        raise ConfigError(f"--preset {preset!r} is none of {', '.join(PRESETS)}")
    given = os.environ if environ is None else environ
    if PRESETS[preset].device == "gpu":
        return _gpu_env(index, count, tuple(gpus), given)
    if gpus:
        raise ConfigError(f"--gpus {','.join(gpus)}: the {preset} preset uses no GPU")
    if count == 1 and cores is None and given.get(_BOUND):
        return {_BOUND: given[_BOUND]}
    return _core_env(index, count, _cores_to_divide(cores, given.get(_BOUND)))


def _cores_to_divide(cores: Sequence[int] | None, bound: str | None) -> tuple[int, ...]:
    if cores is not None or not bound:
        return tuple(usable_cores() if cores is None else cores)
    found: list[int] = []
    for part in bound.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ConfigError(
                f"{_BOUND}={bound} cannot be divided among replicas; give a list such as 0-7,"
                " or unset it"
            )
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _core_env(index: int, count: int, cores: tuple[int, ...]) -> dict[str, str]:
    if len(cores) < count:
        raise ConfigError(
            f"{count} replicas need a core each, there are {len(cores)}; use"
            f" --replicas {len(cores)}"
        )
    return {_BOUND: ",".join(map(str, _share(cores, index, count)))}


def _gpu_env(
    index: int, count: int, gpus: tuple[str, ...], environ: Mapping[str, str]
) -> dict[str, str]:
    if not gpus and count == 1:
        return {}
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    shown = tuple(name.strip() for name in visible.split(",") if name.strip())
    every = gpus or shown or tuple(map(str, range(count)))
    if len(set(every)) < len(every):
        raise ConfigError(f"--gpus {','.join(every)} names one GPU twice")
    if len(every) < count or len(every) % count:
        raise ConfigError(
            f"the GPUs {','.join(every)} do not divide evenly among {count} replicas; give each as"
            " many as the others, at least one: --gpus"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(_share(every, index, count))}


def _share(items: Sequence[_T], index: int, count: int) -> tuple[_T, ...]:
    """Part ``index`` of ``count``, in order, sizes as equal as can be."""
    start, end = (len(items) * i // count for i in (index, index + 1))
    return tuple(items[start:end])
