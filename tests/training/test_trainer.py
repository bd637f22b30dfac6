"""The optimizer steps: one adapter moves at a time; how rows fall into batches is no matter."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from marft_agents.errors import ConfigError, TrainingError
from marft_agents.training import trainer as trainer_module
from marft_agents.training.batch import TrainRow
from marft_agents.training.objective import PackLoss
from marft_agents.training.trainer import MarftTrainer
from tests.training.learning import (
    AGENTS,
    Watch,
    adam_of,
    learn,
    make_learner,
    make_rows,
    make_work,
    recorded,
    same,
    states,
)


def of(adapter: str, *, episodes: int = 4) -> list[TrainRow]:
    """Eight rows of one adapter; one adapter's plan needs no other."""
    return [r for r in make_rows(episodes=episodes) if r.adapter == adapter]


def base_of(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if ".lora_" not in n}


@pytest.mark.parametrize("objective", ["awr", "ppo"])
@pytest.mark.parametrize("order", [["router", "writer"], ["writer", "router"]])
def test_each_step_moves_one_adapter_and_its_own_adam_state_only(
    objective: str, order: list[str], model_dir: Path, tmp_path: Path
) -> None:
    """The second update starts with moments of every adapter, and weight decay pulls on all."""
    learner = make_learner(model_dir, tmp_path, weight_decay=0.5)
    rows, base = recorded(learner, make_rows()), base_of(learner.session.model)
    watch = Watch(learner)
    groups = [[adapter] for adapter in order]
    works = [make_work(learner, rows, objective=objective, order=groups) for _ in range(2)]
    learn(learner, works)
    steps = {"router": 6, "writer": 4}
    assert watch.moved == [[a] for a in order for _ in range(steps[a])] * 2
    assert watch.adam_moved == watch.moved
    now = base_of(learner.session.model)
    assert same(base, now)


def test_an_adapter_without_rows_stays_bit_identical_under_weight_decay(
    model_dir: Path, tmp_path: Path
) -> None:
    learner = make_learner(model_dir, tmp_path, weight_decay=0.5)
    before = states(learner)
    learn(learner, [make_work(learner, recorded(learner, of("router")), order=[["router"]])])
    after = states(learner)
    assert same(before["writer"], after["writer"])
    assert not same(before["router"], after["router"])


@pytest.mark.parametrize("adapter", ["rotary_emb", "v_proj-2", "router-2"])
def test_an_adapter_named_like_a_module_or_another_adapter_is_itself_only(
    adapter: str, model_dir: Path, tmp_path: Path
) -> None:
    learner = make_learner(model_dir, tmp_path, adapters=("router", adapter))
    named = dict(learner.session.model.named_parameters())
    for one in ("router", adapter):
        mine = [name for name, _ in learner.trainer.parameters_of(one)]
        assert mine and all(f".{one}.weight" in name and ".lora_" in name for name in mine)
    assert sum(".lora_" in name for name in named) == 2 * len(mine)


def test_a_module_of_the_base_with_an_adapters_name_is_not_the_adapters(
    model_dir: Path, tmp_path: Path
) -> None:
    """Models with experts have a module called ``router``."""
    learner = make_learner(model_dir, tmp_path)
    mlp = learner.session.model.get_base_model().model.layers[0].mlp
    mlp.router = torch.nn.Linear(2, 2)
    assert all(".lora_" in name for name, _ in learner.trainer.parameters_of("router"))


@dataclass
class Once:
    """One pass over hand-made rows: the first gradient, unclipped, and where it ended."""

    gradient: dict[str, torch.Tensor]
    end: dict[str, torch.Tensor]


def once(objective: str, level: str, model_dir: Path, root: Path, **values: Any) -> Once:
    """The step size is small beside Adam's epsilon, so rounding is not blown up to full steps."""
    common: dict[str, Any] = {
        "level": level, "entropy_coef": 0.01, "beta": 0.1, "max_grad_norm": 0.0,
        "num_train_epochs": 1.0, "adam_epsilon": 1e-2,
    }  # fmt: skip
    learner = make_learner(model_dir, root, **(common | values))
    rows = recorded(learner, make_rows(level=level), noise=0.3)
    seen: list[dict[str, torch.Tensor]] = []

    def look() -> None:
        moments = adam_of(learner, "router").items()
        seen.append({n: 10 * t for n, t in moments if n.endswith("exp_avg")})

    learner.after_step = look
    learn(learner, [make_work(learner, rows, objective=objective)])
    end = {f"{a}/{n}": t for a, state in states(learner).items() for n, t in state.items()}
    return Once(seen[0], end)


@pytest.fixture(scope="module")
def plain(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Once]:
    root = tmp_path_factory.mktemp("plain")
    return {kind: once(*kind, model_dir, root) for kind in KINDS}


KINDS = [("awr", "token"), ("ppo", "action"), ("ppo", "token")]


@pytest.mark.parametrize(("objective", "level"), KINDS)
@pytest.mark.parametrize(
    "other",
    [
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        {"pack_tokens": 16},
        {"share": False},
    ],
)
def test_batches_accumulation_and_packing_do_not_change_the_gradient(
    objective: str,
    level: str,
    other: dict[str, Any],
    plain: dict[tuple[str, str], Once],
    model_dir: Path,
    tmp_path: Path,
) -> None:
    one, two = plain[objective, level], once(objective, level, model_dir, tmp_path, **other)
    assert max(float(t.abs().max()) for t in one.gradient.values()) > 0.05
    for name, tensor in one.gradient.items():
        assert torch.allclose(tensor, two.gradient[name], rtol=1e-5, atol=1e-6), name
    for name, tensor in one.end.items():
        assert torch.allclose(tensor, two.end[name], rtol=0, atol=1e-5), name


def test_the_weight_decides_what_is_imitated(model_dir: Path, tmp_path: Path) -> None:
    learner = make_learner(model_dir, tmp_path, num_train_epochs=20, adapters=("router",))
    template = replace(of("router")[0], prompt_ids=[1, 40, 41], temperature=1.0, behaviour_L=[0.0])
    rows = [
        replace(template, token_ids=[token], weight_L=[weight], advantage_L=[weight])
        for token, weight in ((60, 10.0), (61, 0.01))
    ]
    learn(learner, [make_work(learner, rows, objective="awr")])
    with torch.no_grad():
        logits = learner.session.model(torch.tensor([[1, 40, 41]])).logits[0, -1]
    assert logits.argmax() == 60


def test_a_token_of_a_row_has_a_weight_of_its_own(model_dir: Path, tmp_path: Path) -> None:
    scores: list[list[float]] = []
    for weights in ([3.0, 0.0], [0.0, 3.0]):
        learner = make_learner(model_dir, tmp_path, num_train_epochs=20, adapters=("router",))
        template = next(r for r in of("router") if len(r.token_ids) == 2)
        row = replace(template, weight_L=weights, advantage_L=[1.0, -1.0])
        learn(learner, [make_work(learner, [row, row], objective="awr")])
        scores += learner.session.score([row], "router")
    assert scores[0][0] > scores[1][0] + 0.3
    assert scores[1][1] > scores[0][1] + 0.3


def test_training_is_repeatable(model_dir: Path, tmp_path: Path) -> None:
    ends: list[Any] = []
    for _ in range(2):
        learner = make_learner(model_dir, tmp_path)
        learn(learner, [make_work(learner, recorded(learner, make_rows()))])
        ends.append(states(learner))
    assert all(same(ends[0][a], ends[1][a]) for a in AGENTS)


# -- losses and gradients that are not finite --------------------------------------------------


class Sick:
    """Spoils the loss (or its gradient) of some packs, counted from 0; dumps go to a folder."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, dumps: Path, *packs: int, gradient: bool = False
    ) -> None:
        self.packs, self.gradient, self.count = set(packs), gradient, 0
        monkeypatch.setattr("tempfile.tempdir", str(dumps))
        for name in ("ppo_pack", "awr_pack"):
            self._wrap(monkeypatch, name)

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        real: Any = getattr(trainer_module, name)

        def spoiled(*args: Any) -> PackLoss:
            part: PackLoss = real(*args)
            if self.count in self.packs:
                if self.gradient:
                    part.loss.register_hook(_infinite)
                else:
                    part.loss = part.loss * float("nan")
            self.count += 1
            return part

        monkeypatch.setattr(trainer_module, name, spoiled)


def _infinite(grad: torch.Tensor) -> torch.Tensor:
    return grad * float("inf")


@pytest.mark.parametrize("objective", ["awr", "ppo"])
@pytest.mark.parametrize("gradient", [False, True])
def test_a_step_that_is_not_finite_changes_nothing_and_the_others_go_on(
    gradient: bool,
    objective: str,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner = make_learner(model_dir, tmp_path, weight_decay=0.5)
    rows = recorded(learner, of("router"))
    watch = Watch(learner)
    learn(learner, [make_work(learner, rows, objective=objective, order=[["router"]])])
    Sick(monkeypatch, tmp_path, 1, gradient=gradient)
    again = make_work(learner, rows, objective=objective, order=[["router"]])
    (report,) = learn(learner, [again])
    assert learner.trainer.nonfinite == {"router": 1}
    wanted = [["router"]] * 4 + [["router"], [], ["router"], ["router"]]
    assert watch.moved == wanted and watch.adam_moved == wanted
    assert report.metrics and all(math.isfinite(value) for value in report.metrics.values())


def test_a_step_of_several_packs_is_dropped_whole(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pack's gradient was there already when the second pack's loss went wrong."""
    learner = make_learner(model_dir, tmp_path, share=False, num_train_epochs=1.0)
    rows = recorded(learner, of("router"))
    watch = Watch(learner)
    Sick(monkeypatch, tmp_path, 1)
    learn(learner, [make_work(learner, rows, order=[["router"]])])
    assert watch.moved == [[], ["router"]] == watch.adam_moved


def test_too_many_of_them_stop_the_run_and_name_the_turns(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(model_dir, tmp_path, max_nonfinite_steps=1)
    rows = recorded(learner, of("router"))
    Sick(monkeypatch, tmp_path, *range(99))
    work = make_work(learner, rows, order=[["router"]])
    before = states(learner)
    with pytest.raises(TrainingError, match="'router': 2 steps gave a loss that is not") as caught:
        learn(learner, [work])
    assert all(same(before[a], states(learner)[a]) for a in AGENTS)
    named = str(caught.value).split("the turns of the last one: ")[1].split(")")[0]
    assert Path(named).parent == tmp_path
    dump = json.loads(Path(named).read_text())
    block = learner.trainer.block
    assert dump["turns"] == [rows[i].turn_id for i in block.rows] and len(dump["turns"]) == 4


# -- the loop ----------------------------------------------------------------------------------


def test_metrics_are_logged_per_adapter(model_dir: Path, tmp_path: Path) -> None:
    learner = make_learner(model_dir, tmp_path, logging_steps=1)
    learn(learner, [make_work(learner, recorded(learner, make_rows()))])
    for adapter, steps in (("router", 6), ("writer", 4)):
        history = learner.trainer.state.log_history
        logged = [entry for entry in history if f"{adapter}/loss" in entry]
        assert len(logged) == steps
        assert {f"{adapter}/ratio", f"{adapter}/kl", f"{adapter}/entropy"} <= set(logged[0])
        assert 0 < logged[0][f"{adapter}/entropy"] < 6
        assert logged[0][f"{adapter}/ratio"] == pytest.approx(1, abs=1e-5)


def test_gradient_checkpointing_learns_the_same(model_dir: Path, tmp_path: Path) -> None:
    ends: list[Any] = []
    for checkpointing in (False, True):
        learner = make_learner(model_dir, tmp_path, gradient_checkpointing=checkpointing)
        learn(learner, [make_work(learner, recorded(learner, make_rows()))])
        ends.append(states(learner))
    for adapter in AGENTS:
        for name, tensor in ends[0][adapter].items():
            assert torch.allclose(tensor, ends[1][adapter][name], atol=2e-4)


def test_settings_of_the_run_are_not_changed_by_the_loop(model_dir: Path, tmp_path: Path) -> None:
    learner = make_learner(model_dir, tmp_path, num_train_epochs=3, gradient_accumulation_steps=2)
    learn(learner, [make_work(learner, recorded(learner, of("router")), order=[["router"]])])
    config = learner.trainer.config
    assert (config.num_train_epochs, config.gradient_accumulation_steps) == (3, 2)
    assert config.per_device_train_batch_size == 4
    assert learner.trainer.state.global_step == 3 == learner.steps_taken


def test_a_program_without_a_step_never_starts_the_loop(model_dir: Path, tmp_path: Path) -> None:
    learner = make_learner(model_dir, tmp_path)
    learn(learner, [])
    assert learner.trainer.state.global_step == 0
    with pytest.raises(TrainingError, match="after the end of the program"):
        _ = learner.trainer.block


@pytest.mark.parametrize(
    "values",
    [
        {"report_to": "no-such-tracker"},
        {"optim": "paged_adamw_8bit"},  # needs a package that is not installed here
    ],
)
def test_a_setting_that_the_loop_cannot_carry_out_is_the_users_mistake(
    values: dict[str, Any], model_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="a setting was refused"):
        make_learner(model_dir, tmp_path, **values)


def test_a_trainer_is_trls(model_dir: Path, tmp_path: Path) -> None:
    from trl.trainer.base_trainer import _BaseTrainer  # pyright: ignore[reportPrivateUsage]

    assert issubclass(MarftTrainer, _BaseTrainer)
