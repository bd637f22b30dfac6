"""State on disk: whole or not there, matched by name, refused before any of it is loaded."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from marft_agents.errors import ConfigError
from marft_agents.registry import durable, write_untrained_adapter
from marft_agents.training._quiet import quiet
from marft_agents.training.checkpoint import (
    checkpoints,
    learner_state,
    load_learner,
    read,
    remove,
    write,
)
from marft_agents.training.loop import Learner
from marft_agents.training.session import Session
from tests.log.events import CASES
from tests.training.learning import (
    AGENTS,
    adam_of,
    learn,
    make_learner,
    make_rows,
    make_work,
    recorded,
    same,
    settings,
    states,
)


@pytest.fixture(scope="module")
def worked(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Learner:
    """A learner with moments, references, and an update under way (its first adapter is done)."""
    learner = make_learner(model_dir, tmp_path_factory.mktemp("worked"), beta=0.1)
    rows = recorded(learner, make_rows(level="token"))
    learn(learner, [make_work(learner, rows)])
    work = make_work(learner, rows)
    learner.open(work)
    work.position, work.step = 1, 2
    work.sums = {"writer/loss": [0.1, 1 / 3]}
    work.batch.old = {i: [-0.1 * i] * len(rows[i].token_ids) for i in work.batch.rows_of("writer")}
    work.batch.reference = {3: [1e-300, 0.1 + 0.2]}
    work.batch.factor = {1: 1.5, 4: 1 / 7}
    work.batch.log_ratio = {0: 0.25}
    learner.work = work
    return learner


def facts() -> dict[str, Any]:
    return {"said": "by the run"}


def test_what_is_read_is_what_was_written_bit_for_bit(
    worked: Learner, model_dir: Path, tmp_path: Path
) -> None:
    folder = write(tmp_path / "c", worked, facts(), keep=2)
    other = make_learner(model_dir, tmp_path, beta=0.1, scale=0.1)
    saved = read(folder)
    assert saved.facts["said"] == "by the run" and saved.facts["steps"] == worked.steps_taken
    load_learner(other, saved)
    one, two = learner_state(worked), learner_state(other)
    assert one[1] == two[1] and same(one[0], two[0])
    assert other.work is not None and worked.work is not None
    assert other.work.batch == worked.work.batch
    assert other.steps_taken == worked.steps_taken == 10
    for adapter in AGENTS:
        assert same(adam_of(worked, adapter), adam_of(other, adapter))
        assert same(worked.references[adapter], other.references[adapter])
        before = worked.work.meters[adapter].before, other.work.meters[adapter].before
        assert (before[0].good, before[0].bad) == (before[1].good, before[1].bad)


def test_newer_ones_are_numbered_on_and_the_oldest_go(worked: Learner, tmp_path: Path) -> None:
    for _ in range(4):
        write(tmp_path, worked, facts(), keep=2)
    assert [f.name for f in checkpoints(tmp_path)] == ["checkpoint-000003", "checkpoint-000004"]
    write(tmp_path, worked, facts(), keep=None)
    assert len(checkpoints(tmp_path)) == 3
    remove(checkpoints(tmp_path)[-1])
    assert [f.name for f in checkpoints(tmp_path)][-1] == "checkpoint-000004"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("number", [0, 1])
def test_case_20_a_full_disk_leaves_the_checkpoint_before(
    number: int, worked: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 20: the first or the second file of a checkpoint does not fit."""
    first = write(tmp_path, worked, facts(), keep=2)
    real, count = durable.write_file, iter(range(9))

    def full(path: Path, data: bytes) -> None:
        if next(count) == number:
            path.write_bytes(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data)

    monkeypatch.setattr(durable, "write_file", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, worked, facts(), keep=2)
    assert list(tmp_path.iterdir()) == [first] == checkpoints(tmp_path)
    assert read(first).facts["steps"] == worked.steps_taken


def test_a_checkpoint_is_not_seen_before_all_of_it_is_on_the_disk(
    worked: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write(tmp_path, worked, facts(), keep=2)
    real, seen = durable.write_file, list[list[Path]]()

    def watched(path: Path, data: bytes) -> None:
        real(path, data)
        seen.append(checkpoints(tmp_path))

    monkeypatch.setattr(durable, "write_file", watched)
    write(tmp_path, worked, facts(), keep=2)
    assert seen == [[first], [first]] and len(checkpoints(tmp_path)) == 2


def test_what_an_interrupted_write_left_is_no_checkpoint_and_is_swept(
    worked: Learner, tmp_path: Path
) -> None:
    whole = write(tmp_path, worked, facts(), keep=2)
    for name in (".checkpoint-000002-partial", ".checkpoint-000000-gone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{}")
    assert checkpoints(tmp_path) == [whole]
    write(tmp_path, worked, facts(), keep=2)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["checkpoint-000001", "checkpoint-000002"]


# -- damage --------------------------------------------------------------------------------------


def _torn(folder: Path) -> None:
    path = folder / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _no_json(folder: Path) -> None:
    (folder / "state.json").write_text('{"format": 1')


def _missing(folder: Path) -> None:
    (folder / "state.safetensors").unlink()


def _newer(folder: Path) -> None:
    path = folder / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (_torn, "cannot read the checkpoint"),
        (_no_json, "cannot read the checkpoint"),
        (_missing, "cannot read the checkpoint"),
        (_newer, "has format 99, and this version reads 1"),
    ],
)
def test_a_damaged_checkpoint_is_named(
    damage: Callable[[Path], None], match: str, worked: Learner, tmp_path: Path
) -> None:
    folder = write(tmp_path, worked, facts(), keep=2)
    damage(folder)
    with pytest.raises(ConfigError, match=match) as caught:
        read(folder)
    assert str(folder) in str(caught.value)


def _drop(prefix: str) -> Callable[[dict[str, Tensor]], None]:
    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors[next(name for name in sorted(tensors) if name.startswith(prefix))]

    return drop


def _cut(prefix: str) -> Callable[[dict[str, Tensor]], None]:
    def cut(tensors: dict[str, Tensor]) -> None:
        name = next(n for n in sorted(tensors) if n.startswith(prefix) and tensors[n].dim() > 1)
        tensors[name] = tensors[name][:, :-1].contiguous()

    return cut


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (_drop("adapter/writer/"), "other tensors for adapter 'writer'.*15 saved, 16 expected"),
        (_cut("adapter/writer/"), "'writer'"),
        (_cut("adam/writer/"), "another Adam state for adapter 'writer'"),
        (_drop("work/token_ids"), "is damaged"),
        (_drop("work/old/lengths"), "is damaged"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_none_of_it_is_loaded(
    damage: Callable[[dict[str, Tensor]], None],
    match: str,
    worked: Learner,
    model_dir: Path,
    tmp_path: Path,
) -> None:
    folder = write(tmp_path / "c", worked, facts(), keep=2)
    tensors = load_file(folder / "state.safetensors")
    damage(tensors)
    save_file(tensors, folder / "state.safetensors")
    other = make_learner(model_dir, tmp_path, beta=0.1, scale=0.1)
    before = learner_state(other)
    with pytest.raises(ConfigError, match=match):
        load_learner(other, read(folder))
    after = learner_state(other)
    assert same(before[0], after[0]) and before[1] == after[1]
    assert other.work is None and other.steps_taken == 0


# -- case 35 -------------------------------------------------------------------------------------


def planner(
    model_dir: Path, root: Path, *, rank: int, modules: list[str], agents: tuple[str, ...]
) -> Learner:
    """A learner whose adapters have this shape; each agent's start is its own."""
    folders: dict[str, Path] = {}
    for agent in agents:
        folders[agent] = root / f"{agent}-{rank}-{'-'.join(modules)}"
        if not folders[agent].exists():
            write_untrained_adapter(
                folders[agent], model_dir, rank=rank, target_modules=modules, seed=len(agent)
            )
    config = settings(output_dir=str(root / "loop"))
    with quiet():
        return Learner(
            Session(model_dir, folders, config, lambda line: None), config, lambda s: None
        )


def case_35() -> dict[str, Any]:
    return json.loads((CASES / "35-resume.json").read_text())


AGENTS_35 = ("planner", "critic")


@pytest.fixture(scope="module")
def saved_35(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the case's adapter, and of a critic beside it, with moments."""
    root = tmp_path_factory.mktemp("case35")
    shape = case_35()["saved"]
    learner = planner(
        model_dir, root, rank=shape["r"], modules=shape["target_modules"], agents=AGENTS_35
    )
    learn(learner, [make_work(learner, recorded(learner, make_rows(AGENTS_35)))])
    moments = adam_of(learner, shape["agent"])
    # the case counts one layer's: A and B of two modules
    assert sum(n.endswith("exp_avg") and ".layers.0." in n for n in moments) == 4
    return write(root / "c", learner, {}, keep=1)


def shape_of(change: Any) -> dict[str, Any]:
    shape: dict[str, Any] = {"rank": 8, "modules": ["q_proj", "v_proj"], "agents": AGENTS_35}
    if isinstance(change, dict):
        names = {"r": "rank", "target_modules": "modules"}
        return shape | {names[key]: value for key, value in change.items()}
    return shape | ({"agents": ("critic", "planner")} if "reordered" in change else {})


@pytest.mark.parametrize("run", case_35()["runs"], ids=lambda run: str(run["change"]))
def test_case_35_six_ways_to_resume(
    run: dict[str, Any], saved_35: Path, model_dir: Path, tmp_path: Path
) -> None:
    """Case 35: match by agent and tensor name; never a part; refuse with both values named."""
    saved = read(saved_35)
    learner = planner(model_dir, tmp_path, **shape_of(run["change"]))
    before = states(learner)
    if run["want"].startswith("refuse"):
        both = {"r": "at rank 8, and this run at rank 16", "target_modules": "8 saved, 12 expected"}
        (changed,) = run["change"]
        with pytest.raises(ConfigError, match=both[changed]):
            load_learner(learner, saved)
        assert all(same(before[a], states(learner)[a]) for a in before)
        assert all(adam_of(learner, a) == {} for a in before)
        return
    fresh = run["change"] == "--fresh-optimizer"
    load_learner(learner, saved, fresh_optimizer=fresh)
    for adapter in AGENTS_35:
        own = f"adapter/{adapter}/"
        wanted = {k.removeprefix(own): t for k, t in saved.tensors.items() if k.startswith(own)}
        assert same(states(learner)[adapter], wanted)
        moments = adam_of(learner, adapter)
        if fresh:
            assert moments == {}
            continue
        assert len(moments) == 3 * 8
        for name, tensor in moments.items():
            plain = name.replace(f".{adapter}.", ".")
            assert torch.equal(tensor, saved.tensors[f"adam/{adapter}/{plain}"])
    learn(learner, [make_work(learner, recorded(learner, make_rows(AGENTS_35)))])
    steps = {a: {float(t) for n, t in adam_of(learner, a).items() if n.endswith("step")}
             for a in AGENTS_35}  # fmt: skip
    taken = {"planner": 6.0, "critic": 4.0}
    assert steps == {a: {n if fresh else 2 * n} for a, n in taken.items()}
