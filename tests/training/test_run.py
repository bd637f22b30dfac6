"""The whole offline run on the tiny model: what is published, left alone and proved."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from marft_agents.errors import NothingToLearn, RegistryError, TrainingError
from marft_agents.log import LogReader
from marft_agents.registry import Registry
from marft_agents.schema import Sampling
from marft_agents.training import FinetuneResult, MarftConfig, MarftTrainer, finetune
from marft_agents.training._quiet import quiet
from marft_agents.training.checkpoint import CHECKPOINTS, LEARNER, checkpoints, read
from marft_agents.training.results import result_lines
from tests.training.synthetic import (
    BAD,
    GOOD,
    SYSTEM,
    Team,
    TinyModel,
    publish_trained,
    publish_untrained,
    snapshot,
)
from tests.training.test_trainer import Sick


def settings(**values: Any) -> MarftConfig:
    standard: dict[str, Any] = {"use_cpu": True, "learning_rate": 5e-3, "num_train_epochs": 6}
    return MarftConfig(**(standard | values))


class Run:
    """One finished run, kept for several tests."""

    def __init__(self, root: Path, model_dir: Path, tiny: TinyModel) -> None:
        self.root, self.model_dir = root, model_dir
        self.logs, self.adapters = root / "logs", root / "adapters"
        Team(tiny, self.logs).write(24)
        self.registry = publish_untrained(self.adapters, model_dir, ("router", "writer", "poet"))
        self.before = snapshot(self.adapters)
        self.said: list[str] = []
        result = finetune(
            [self.logs],
            model=str(model_dir),
            output=self.adapters,
            config=settings(),
            say=self.said.append,
        )
        assert isinstance(result, FinetuneResult)
        self.result = result
        self.used = {a.adapter: a.used for a in result.adapters}
        self.steps = {name: 6 * math.ceil(count / 8) for name, count in self.used.items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, tiny: TinyModel) -> Run:
    return Run(tmp_path_factory.mktemp("run"), model_dir, tiny)


def served(run: Run, agent: str, version: int, prompt: list[int], reply: list[int]) -> list[float]:
    """Log-probabilities under a published version, loaded afresh from its folder."""
    with quiet(), torch.no_grad():
        base: Any = AutoModelForCausalLM.from_pretrained(run.model_dir, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, str(run.registry.path(agent, version))).eval()
        logits = model(torch.tensor([[*prompt, *reply]])).logits[0].double()
    table = torch.log_softmax(logits, -1)
    return [float(table[len(prompt) + j - 1, token]) for j, token in enumerate(reply)]


def test_good_actions_became_likelier_than_bad_ones(run: Run, tiny: TinyModel) -> None:
    for result in run.result.adapters:
        effect = result.effect
        assert effect.good_change > 1 and effect.as_intended
        assert effect.change_norm > 0 and effect.b_norm > 0
        messages = [
            {"role": "system", "content": SYSTEM[result.adapter]},
            {"role": "user", "content": "ticket 3: please answer the customer"},
        ]
        prompt = tiny.prompt_ids(messages)
        lead = [
            sum(served(run, result.adapter, version, prompt, tiny.reply_ids(GOOD)))
            - sum(served(run, result.adapter, version, prompt, tiny.reply_ids(BAD)))
            for version in (1, 2)
        ]
        assert lead[1] > lead[0] + 0.5, "also on a prompt that was never recorded"


def test_the_probe_is_what_a_fresh_load_answers(run: Run) -> None:
    for agent in ("router", "writer"):
        probe = run.registry.manifest(agent, 2).probe
        assert probe is not None
        now = served(run, agent, 2, probe.prompt_token_ids, probe.token_ids)
        assert now == pytest.approx(probe.logprobs, abs=1e-3)
        first = served(run, agent, 1, probe.prompt_token_ids, probe.token_ids)
        assert first == pytest.approx(probe.base_logprobs, abs=1e-3)
        assert max(abs(a - b) for a, b in zip(now, first, strict=True)) > 0.1


def test_everything_published_before_is_untouched(run: Run) -> None:
    after = snapshot(run.adapters)
    kept = {k: v for k, v in run.before.items() if k != "audit.jsonl"}
    assert {k: after[k] for k in kept} == kept
    assert run.registry.versions("poet") == [1]
    assert [u.name for u in run.result.untouched] == ["poet"]


def test_new_versions_wait_for_a_swap(run: Run) -> None:
    for agent in ("router", "writer"):
        assert run.registry.versions(agent) == [1, 2]
        assert run.registry.current(agent) == 1
        assert run.registry.verify(agent, 2).parent == 1


def test_the_manifest_says_what_it_was_trained_on(run: Run) -> None:
    training = run.registry.manifest("router", 2).training
    assert (training["episodes"], training["turns"], training["agents"]) == (24, 24, ["router"])
    assert training["settings"]["num_train_epochs"] == 6
    assert training["recorded_under"] == {"router@v1": run.used["router"]}
    assert training["effect"]["good_after"] > training["effect"]["good_before"]
    assert {"loss", "logp", "weight_mean", "entropy"} <= set(training["metrics"])


def test_credit_is_written_for_every_action(run: Run) -> None:
    assert run.result.credit_file is not None
    lines = [json.loads(x) for x in run.result.credit_file.read_text().splitlines()]
    assert len(lines) == 48
    assert set(lines[0]) == {
        "episode_id", "turn_id", "agent", "value", "advantage", "delta", "weight",
    }  # fmt: skip
    rewards = {e.episode_id: e.team_reward or 0.0 for e in LogReader(run.logs).episodes()}
    for name, reward in rewards.items():
        own = [x for x in lines if x["episode_id"] == name]
        assert sum(x["delta"] for x in own) == pytest.approx(reward - own[0]["value"])


def test_adam_and_critic_are_kept_beside_the_adapters(run: Run) -> None:
    (folder,) = (run.adapters / LEARNER).iterdir()
    saved = read(folder)
    fingerprint = run.registry.manifest("router", 2).base.fingerprint
    assert saved.facts["base"]["fingerprint"] == fingerprint
    assert saved.facts["versions"] == {"router": 2, "writer": 2}
    assert any(name.startswith("critic/") for name in saved.tensors)
    steps = {
        agent: {float(t) for n, t in saved.tensors.items() if n.startswith(f"adam/{agent}/")
                and n.endswith("/step")}
        for agent in ("router", "writer")
    }  # fmt: skip
    assert steps == {agent: {float(run.steps[agent])} for agent in steps}
    weights = load_file(run.registry.path("router", 2) / "adapter_model.safetensors")
    assert all(torch.equal(t, saved.tensors[f"adapter/router/{n}"]) for n, t in weights.items())
    assert run.registry.agents() == ["poet", "router", "writer"]
    assert checkpoints(run.adapters / CHECKPOINTS) == [], "a run that ended has none"


def test_the_output_says_what_was_done(run: Run) -> None:
    said = "\n".join(run.said)
    used, steps = run.used, run.steps
    for expected in (
        "episodes: 24 of 24 usable",
        "poet: 0 samples; untouched",
        "replay: router under router@v1: 8 turns",
        "value model: read 24 transcripts",
        f"router: {24 - used['router']} turns of little weight are skipped",
        f"WARNING: only {used['router']} turns carry what router learns",
        f"training: {sum(used.values())} turns, router then writer",
        f"router: step {steps['router']}/{steps['router']}",
        f"writer: step {steps['writer']}/{steps['writer']}",
    ):
        assert expected in said
    table = list(result_lines(run.result, {"router": "yes"}))
    assert table[1].split()[0] == "router" and table[1].endswith("v1 -> v2  yes")
    assert table[2].endswith("v1 -> v2  no")


def test_the_same_seed_gives_the_same_bytes(run: Run, model_dir: Path) -> None:
    again = run.root / "again"
    publish_untrained(again, model_dir, ("router", "writer"))
    finetune([run.logs], model=str(model_dir), output=again, config=settings(), say=lambda s: None)
    name = "adapter_model.safetensors"
    for agent in ("router", "writer"):
        path = Registry(again).path(agent, 2) / name
        assert path.read_bytes() == (run.registry.path(agent, 2) / name).read_bytes()


def test_training_goes_on_from_the_version_in_use(
    run: Run, model_dir: Path, tiny: TinyModel, tmp_path: Path
) -> None:
    registry = publish_untrained(tmp_path / "adapters", model_dir)
    registry.promote("router", publish_trained(registry, model_dir, "router"), by="t", evidence={})
    result = finetune(
        [run.logs],
        model=str(model_dir),
        output=registry.root,
        config=settings(num_train_epochs=1, learning_rate=1e-5),
        say=lambda line: None,
    )
    assert result is not None
    assert [(a.adapter, a.parent, a.version) for a in result.adapters] == [
        ("router", 2, 3),
        ("writer", 1, 2),
    ]
    name = "adapter_model.safetensors"
    old, new = (load_file(registry.path("router", v) / name) for v in (2, 3))
    assert all(torch.allclose(old[k], new[k], atol=1e-3) for k in old)
    assert any(not torch.equal(old[k], new[k]) for k in old)


def test_agents_without_an_adapter_get_a_new_one(
    model_dir: Path, tiny: TinyModel, tmp_path: Path
) -> None:
    team = Team(tiny, tmp_path / "logs", adapters={"router": None, "writer": None})
    team.write(8)
    config = settings(lora_rank=2, lora_target_modules=["q_proj", "v_proj"], num_train_epochs=1)
    result = finetune(
        [tmp_path / "logs"],
        model=str(model_dir),
        output=tmp_path / "adapters",
        config=config,
        say=lambda line: None,
    )
    assert result is not None
    manifest = Registry(tmp_path / "adapters").manifest("router", 1)
    assert (manifest.parent, manifest.rank, manifest.untrained) == (None, 2, False)
    assert manifest.target_modules == ["q_proj", "v_proj"]


def test_a_reward_function_scores_what_nobody_scored(
    model_dir: Path, tiny: TinyModel, tmp_path: Path
) -> None:
    Team(tiny, tmp_path / "logs").write(10, reward=lambda router, writer: None)
    said: list[str] = []

    def good_router(episode: Any) -> bool:
        return episode.turns[0].text == " billing"

    result = finetune(
        [tmp_path / "logs"],
        model=str(model_dir),
        output=tmp_path / "adapters",
        config=settings(num_train_epochs=1),
        reward=good_router,
        dry_run=True,
        say=said.append,
    )
    assert result is None
    assert any("reward function: 10 episodes scored" in line for line in said)
    assert not (tmp_path / "adapters").exists(), "a dry run writes nothing"


def test_truncated_episodes_are_bootstrapped_and_trained(
    model_dir: Path, tiny: TinyModel, tmp_path: Path
) -> None:
    Team(tiny, tmp_path / "logs").write(8, end="truncated")
    result = finetune(
        [tmp_path / "logs"],
        model=str(model_dir),
        output=tmp_path / "adapters",
        config=settings(num_train_epochs=1, agents={"writer": "frozen"}),
        say=lambda line: None,
    )
    assert result is not None and [a.adapter for a in result.adapters] == ["router"]
    assert Registry(tmp_path / "adapters").agents() == ["router"]


def _nan_loss(monkeypatch: pytest.MonkeyPatch, dumps: Path) -> None:
    Sick(monkeypatch, dumps, *range(99))


def _no_movement(monkeypatch: pytest.MonkeyPatch, dumps: Path) -> None:
    def stand_still(self: MarftTrainer) -> None:
        optimizer: Any = self.optimizer
        for group in optimizer.param_groups:
            group["lr"] = 0.0

    monkeypatch.setattr(MarftTrainer, "_set_rates", stand_still)


@pytest.mark.parametrize(
    ("sabotage", "message"),
    [(_nan_loss, "not finite"), (_no_movement, "did not move in training")],
)
def test_a_run_that_fails_publishes_nothing(
    sabotage: Callable[[pytest.MonkeyPatch, Path], None],
    message: str,
    run: Run,
    model_dir: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publish_untrained(tmp_path / "adapters", model_dir)
    before = snapshot(tmp_path)
    sabotage(monkeypatch, tmp_path_factory.mktemp("dumps"))
    with pytest.raises(TrainingError, match=message):
        finetune(
            [run.logs],
            model=str(model_dir),
            output=tmp_path / "adapters",
            config=settings(),
            say=lambda line: None,
        )
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("estimator", ["marft", "group"])
def test_a_log_without_reward_spread_changes_nothing(
    estimator: str, model_dir: Path, tiny: TinyModel, tmp_path: Path
) -> None:
    """Case 16: all flat."""
    Team(tiny, tmp_path / "logs").write(6, reward=lambda router, writer: 1.0)
    publish_untrained(tmp_path / "adapters", model_dir)
    before = snapshot(tmp_path)
    with pytest.raises(NothingToLearn, match="no signal"):
        finetune(
            [tmp_path / "logs"],
            model=str(model_dir),
            output=tmp_path / "adapters",
            config=settings(estimator=estimator, beta=0.1, offline="ppo"),
            say=lambda line: None,
        )
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("estimator", ["marft", "group"])
def test_case_15_episodes_that_nobody_scored_have_no_gradient(
    estimator: str, model_dir: Path, tiny: TinyModel, tmp_path: Path
) -> None:
    """Case 15: a missing reward is no zero; the same weights, bit for bit, and the counts said."""
    weights: list[bytes] = []
    for unscored in (0, 4):
        root = tmp_path / str(unscored)
        team = Team(tiny, root / "logs")
        team.write(6, task="the same")
        team.write(unscored, seed=5, reward=lambda r, w: None, prefix="u", task="the same")
        publish_untrained(root / "adapters", model_dir)
        said: list[str] = []
        finetune(
            [root / "logs"],
            model=str(model_dir),
            output=root / "adapters",
            config=settings(estimator=estimator, num_train_epochs=1),
            say=said.append,
        )
        path = Registry(root / "adapters").path("router", 2) / "adapter_model.safetensors"
        weights.append(path.read_bytes())
        assert f"episodes: 6 of {6 + unscored} usable" in said
    assert weights[0] == weights[1]


ONE_STEP: dict[str, Any] = {
    "offline": "ppo", "num_train_epochs": 1, "per_device_train_batch_size": 99,
}  # fmt: skip


def ppo_run(
    model_dir: Path, root: Path, tiny: TinyModel, temperature: float = 1.0, **fields: Any
) -> tuple[FinetuneResult, Registry, list[str]]:
    """One step of every agent on logs of this kind."""
    team = Team(tiny, root / "logs", temperature=temperature)
    team.write(8, seed=2, **fields)
    registry, said = publish_untrained(root / "adapters", model_dir), list[str]()
    result = finetune(
        [root / "logs"],
        model=str(model_dir),
        output=registry.root,
        config=settings(**ONE_STEP),
        say=said.append,
    )
    assert result is not None
    return result, registry, said


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_case_17_every_ratio_is_1_at_step_0(
    temperature: float, model_dir: Path, tiny: TinyModel, tmp_path: Path
) -> None:
    """Case 17: unchanged weights, log-probabilities of the temperature that was sampled at."""
    _, registry, _ = ppo_run(model_dir, tmp_path, tiny, temperature)
    for agent in ("router", "writer"):
        metrics = registry.manifest(agent, 2).training["metrics"]
        assert metrics["ratio"] == pytest.approx(1, abs=1e-3)
        assert metrics["sampling/importance_sampling_ratio"] == pytest.approx(1, abs=1e-3)
        assert metrics["sampling/sampling_logp_difference/max"] < 1e-3


def test_case_17_raw_log_probabilities_of_cold_calls_are_refused_with_the_reason(
    model_dir: Path, tiny: TinyModel, tmp_path: Path
) -> None:
    """Case 17: they can be checked, but no ratio can be made of them."""
    cold = Sampling(temperature=0.5)
    with pytest.raises(NothingToLearn, match=r"16 raw log-probabilities at a temperature that is"):
        ppo_run(model_dir, tmp_path, tiny, logprob_mode="raw", sampling=cold)
    registry = Registry(tmp_path / "adapters")
    assert all(registry.versions(a) == [1] for a in ("router", "writer"))


def test_turns_without_a_ratio_are_counted_and_their_adapter_is_listed(
    model_dir: Path, tiny: TinyModel, tmp_path: Path
) -> None:
    """A greedy writer beside a router that samples."""
    Team(tiny, tmp_path / "logs").write(8, seed=2)
    lines = (path := next((tmp_path / "logs").glob("*.jsonl"))).read_text().splitlines()
    changed: list[str] = []
    for line in lines:
        event = json.loads(line)
        if event.get("agent") == "writer":
            event["sampling"] = {"temperature": 0.0}
        changed.append(json.dumps(event))
    path.write_text("\n".join(changed) + "\n")
    registry, said = publish_untrained(tmp_path / "adapters", model_dir), list[str]()
    result = finetune(
        [tmp_path / "logs"],
        model=str(model_dir),
        output=registry.root,
        config=settings(**ONE_STEP),
        say=said.append,
    )
    assert result is not None and [a.adapter for a in result.adapters] == ["router"]
    assert "writer: turns without a ratio are left out: 8 sampled greedily" in said
    why = "none of its turns allows a ratio with the policy that sampled it"
    assert [(u.name, u.why) for u in result.untouched] == [("writer", why)]
    assert registry.versions("writer") == [1] and registry.versions("router") == [1, 2]


def test_tasks_that_each_earn_the_same_teach_a_group_nothing(
    model_dir: Path, tiny: TinyModel, tmp_path: Path
) -> None:
    """Case 16: the rewards differ between tasks and never within one."""
    for n, value in enumerate((0.0, 0.7, 1.0)):
        team = Team(tiny, tmp_path / "logs")
        team.write(3, reward=lambda r, w, v=value: v, prefix=f"t{n}-", task=f"task {n}")
    publish_untrained(tmp_path / "adapters", model_dir)
    before = snapshot(tmp_path)
    with pytest.raises(NothingToLearn, match=r"no signal|none of the 3 tasks has two"):
        finetune(
            [tmp_path / "logs"],
            model=str(model_dir),
            output=tmp_path / "adapters",
            config=settings(estimator="group"),
            say=lambda line: None,
        )
    assert snapshot(tmp_path) == before


def test_a_registry_that_cannot_be_written_is_named(
    run: Run, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Registry, "publish", full)
    with pytest.raises(
        RegistryError, match=r"cannot publish 'router' in .*No space left on device"
    ):
        finetune(
            [run.logs],
            model=str(model_dir),
            output=tmp_path / "a",
            config=settings(num_train_epochs=1),
            say=lambda line: None,
        )
