"""Which options a kind of machine gets, and how replicas divide it."""

from __future__ import annotations

import pytest

from marft_agents.errors import ConfigError
from marft_agents.serving.presets import PRESETS, choose_preset, replica_env, usable_cores

BOUND = "VLLM_CPU_OMP_THREADS_BIND"


def test_auto_follows_the_build() -> None:
    assert choose_preset("auto", cpu=True).name == "cpu"
    assert choose_preset("auto", cpu=False).name == "gpu"
    assert choose_preset("gpu-shared", cpu=False).name == "gpu-shared"


@pytest.mark.parametrize(
    ("name", "cpu", "said"),
    [
        ("gpu", True, "built for a CPU; use --preset auto"),
        ("cpu", False, "built for a GPU"),
        ("tpu", True, "none of auto, cpu, gpu"),
    ],
)
def test_a_preset_that_the_build_cannot_run(name: str, cpu: bool, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose_preset(name, cpu=cpu)


def test_no_preset_touches_what_keeps_the_record_true() -> None:
    kept = {"--logprobs-mode", "--generation-config", "--enable-lora", "--host", "--port"}
    assert not [p.name for p in PRESETS.values() if kept & set(p.options)]


@pytest.mark.parametrize(
    ("count", "gpus", "environ", "expected"),
    [
        (2, ("0", "1"), {}, ["0", "1"]),
        (2, ("3", "1"), {"CUDA_VISIBLE_DEVICES": "0"}, ["3", "1"]),
        (2, ("0", "1", "2", "3"), {}, ["0,1", "2,3"]),
        (2, (), {}, ["0", "1"]),
        (2, (), {"CUDA_VISIBLE_DEVICES": "4,GPU-7f"}, ["4", "GPU-7f"]),
        (1, ("5",), {}, ["5"]),
    ],
)
def test_each_replica_has_gpus_of_its_own(
    count: int, gpus: tuple[str, ...], environ: dict[str, str], expected: list[str]
) -> None:
    given = [replica_env("gpu", i, count, gpus, environ=environ) for i in range(count)]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in given] == expected


def test_a_single_replica_sees_what_the_caller_sees() -> None:
    assert replica_env("gpu", 0, 1, environ={"CUDA_VISIBLE_DEVICES": "2"}) == {}


@pytest.mark.parametrize(
    ("count", "environ", "expected"),
    [
        (1, {}, ["0,1,2,3,4"]),
        (2, {}, ["0,1", "2,3,4"]),
        (5, {}, ["0", "1", "2", "3", "4"]),
    ],
)
def test_each_replica_has_cores_of_its_own(
    count: int, environ: dict[str, str], expected: list[str]
) -> None:
    given = [
        replica_env("cpu", i, count, cores=range(5), environ=environ)[BOUND] for i in range(count)
    ]
    assert given == expected


def test_a_binding_of_the_caller_is_divided_or_kept() -> None:
    given = {BOUND: "2-5,9"}
    assert replica_env("cpu", 0, 1, environ=given) == given
    assert replica_env("cpu", 1, 2, environ=given) == {BOUND: "4,5,9"}
    assert replica_env("cpu", 0, 1, environ={BOUND: "nobind"}) == {BOUND: "nobind"}
    all_of_them = ",".join(map(str, usable_cores()))
    assert replica_env("cpu", 0, 1, environ={}) == {BOUND: all_of_them}


@pytest.mark.parametrize(
    ("preset", "index", "count", "gpus", "environ", "said"),
    [
        ("gpu", 0, 3, ("0", "1"), {}, "GPUs 0,1 do not divide evenly among 3"),
        ("gpu", 0, 2, ("0", "1", "2"), {}, "evenly"),
        ("gpu", 0, 2, ("1", "1"), {}, "names one GPU twice"),
        ("gpu", 0, 2, (), {"CUDA_VISIBLE_DEVICES": "1"}, "GPUs 1 do not divide"),
        ("cpu", 0, 2, ("0",), {}, "uses no GPU"),
        ("cpu", 0, 9, (), {BOUND: "0-3"}, "9 replicas need a core each, there are 4"),
        ("cpu", 0, 2, (), {BOUND: "0-1|2-3"}, "cannot be divided"),
        ("cpu", 2, 2, (), {}, "no replica 2 of 2"),
        ("auto", 0, 2, (), {}, "none of cpu, gpu"),
    ],
)
def test_what_cannot_be_divided_is_said(
    preset: str,
    index: int,
    count: int,
    gpus: tuple[str, ...],
    environ: dict[str, str],
    said: str,
) -> None:
    with pytest.raises(ConfigError, match=said):
        replica_env(preset, index, count, gpus, environ=environ)
