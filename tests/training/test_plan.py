"""What is refused before training, and what is said about everybody else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import (
    AdapterError,
    ConfigError,
    LogError,
    MarftError,
    NothingToLearn,
    RewardError,
)
from marft_agents.registry import Registry, describe_base
from marft_agents.schema import Episode, EpisodeEnded, EpisodeStarted, RewardEvent, Sampling, Turn
from marft_agents.training.dataset import EpisodeView, read_training_set
from marft_agents.training.plan import NewAdapter, Plan, ServerLimits, context_length, make_plan
from marft_agents.training.preflight import plan_lines
from marft_agents.training.roles import resolve_adapters
from marft_agents.training.signal import flat_tasks, has_spread
from tests.tiny_model import make_tiny_model
from tests.training.synthetic import publish_untrained

CASES = Path(__file__).parents[1] / "cases"
LIMITS = ServerLimits(max_lora_rank=16)
NEW = NewAdapter(rank=4, alpha=8, target_modules=["q_proj", "v_proj"])


def episode(
    name: str, reward: float | None, agents: tuple[str, ...] = ("planner",), task: Any = None,
    **fields: Any,
) -> Episode:  # fmt: skip
    standard: dict[str, Any] = {
        "prompt_token_ids": [1, 9, 4],
        "token_ids": [5, 2],
        "logprobs": [-0.1, -0.2],
        "sampling": Sampling(temperature=1.0),
    }
    return Episode(
        episode_id=name,
        started=EpisodeStarted(episode_id=name, task=task),
        turns=[
            Turn(episode_id=name, turn_id=f"{name}.{i}", agent=a, index=i, **(standard | fields))
            for i, a in enumerate(agents)
        ],
        rewards=[] if reward is None else [RewardEvent(episode_id=name, value=reward)],
        ended=EpisodeEnded(episode_id=name),
    )


def plan(
    episodes: list[Episode],
    model_dir: Path,
    root: Path,
    *,
    agents: dict[str, str] | None = None,
    new: NewAdapter = NEW,
    shapes: dict[str, NewAdapter] | None = None,
    max_length: int | None = None,
    limits: ServerLimits = LIMITS,
    settings: tuple[str, ...] = (),
) -> Plan:
    return make_plan(
        read_training_set(episodes),
        registry=Registry(root),
        base=describe_base(model_dir),
        model_dir=model_dir,
        agents=agents or {},
        new=lambda adapter: (shapes or {}).get(adapter, new),
        max_length=max_length,
        limits=limits,
        settings=settings,
    )


def case_30() -> list[Episode]:
    turns: dict[str, list[Turn]] = {}
    rewards: dict[str, float] = {}
    for line in (CASES / "30-silent-agent.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "reward":
            rewards[record["episode"]] = record["value"]
            continue
        turns.setdefault(record["episode"], []).append(
            Turn(
                episode_id=record["episode"],
                turn_id=record["response_id"],
                agent=record["agent"],
                prompt_token_ids=[t % 300 for t in record["prompt_token_ids"]],
                token_ids=[t % 300 for t in record["token_ids"]],
                logprobs=record["logprobs"],
                sampling=Sampling(temperature=record["temperature"]),
            )
        )
    return [
        Episode(
            episode_id=name,
            turns=calls,
            rewards=[RewardEvent(episode_id=name, value=rewards[name])],
            ended=EpisodeEnded(episode_id=name),
        )
        for name, calls in turns.items()
    ]


MIXED = [episode("a", 0.0), episode("b", 1.0)]


def test_case_30_a_silent_agent_is_listed_and_left_alone(model_dir: Path, tmp_path: Path) -> None:
    config = json.loads((CASES / "30-config.json").read_text())
    publish_untrained(tmp_path / "adapters", model_dir, tuple(config["adapters"]))
    mapping = {agent: agent for agent in config["adapters"]}
    made = plan(case_30(), model_dir, tmp_path / "adapters", agents=mapping)
    assert [(a.adapter, a.start, len(a.rows)) for a in made.adapters] == [("planner", 1, 2)]
    assert [(u.name, u.why) for u in made.untouched] == [("critic", "0 samples")]
    assert "  critic: 0 samples; untouched" in list(plan_lines(made))


def test_a_published_adapter_that_nobody_asked_for_is_listed_too(
    model_dir: Path, tmp_path: Path
) -> None:
    publish_untrained(tmp_path / "adapters", model_dir, ("planner", "poet"))
    made = plan(MIXED, model_dir, tmp_path / "adapters")
    assert [u.name for u in made.untouched] == ["poet"]


def test_frozen_and_external_agents_are_not_trained(model_dir: Path, tmp_path: Path) -> None:
    team = ("planner", "judge", "old")
    made = plan(
        [episode("a", 0.0, team), episode("b", 1.0, team)],
        model_dir,
        tmp_path,
        agents={"judge": "external", "old": "frozen"},
    )
    assert [a.adapter for a in made.adapters] == ["planner"]
    assert [(u.name, u.why) for u in made.untouched] == [("judge", "external"), ("old", "frozen")]


def test_agents_may_share_an_adapter_when_the_config_says_so(
    model_dir: Path, tmp_path: Path
) -> None:
    team = ("coder-1", "coder-2")
    made = plan(
        [episode("a", 0.0, team), episode("b", 1.0, team)],
        model_dir,
        tmp_path,
        agents=dict.fromkeys(team, "coder"),
    )
    assert [(a.adapter, a.agents, len(a.rows)) for a in made.adapters] == [
        ("coder", ["coder-1", "coder-2"], 4)
    ]


def test_an_agent_answered_by_another_agents_adapter_is_said_loudly(
    model_dir: Path, tmp_path: Path
) -> None:
    team = ("poet", "editor")
    answered = {"adapter_start": "poet@v1", "adapter_end": "poet@v1"}
    made = plan(
        [episode("a", 0.0, team, **answered), episode("b", 1.0, team, **answered)],
        model_dir,
        tmp_path,
    )
    loud = [line for line in plan_lines(made) if line.startswith("WARNING")]
    assert len(loud) == 1
    assert "2 turns of agent 'editor' were answered by poet@v1" in loud[0]
    assert "Give it model='editor'" in loud[0]
    shared = plan(
        [episode("a", 0.0, team, **answered), episode("b", 1.0, team, **answered)],
        model_dir,
        tmp_path,
        agents={"editor": "poet", "poet": "poet"},
    )
    assert [line for line in plan_lines(shared) if line.startswith("WARNING")] == []


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"planer": "planer"}, "neither the logs nor the adapters know .*did you mean 'planner'"),
        ({"planner": "The Planner"}, "write 'the-planner'"),
        ({"planner": "default"}, "reserved"),
        ({"planner": 3}, "give an adapter name, frozen or external"),
    ],
)
def test_names_that_cannot_be_are_refused(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_adapters(["planner"], mapping, recorded=["planner"], published=[])


def test_two_agents_never_share_an_adapter_by_accident() -> None:
    with pytest.raises(ConfigError, match="both give the adapter name"):
        resolve_adapters(["A b", "a-b"], {}, recorded=["A b", "a-b"], published=[])
    with pytest.raises(ConfigError, match="name 'coder' under `agents:` too"):
        resolve_adapters(["coder", "x"], {"x": "coder"}, recorded=["coder", "x"], published=[])


def test_another_models_logs_are_refused(model_dir: Path, tmp_path: Path) -> None:
    alien = [episode("a", 0.0), episode("b", 1.0, token_ids=[49000, 2])]
    with pytest.raises(LogError, match="token id 49000, and tiny has only 384 tokens"):
        plan(alien, model_dir, tmp_path)
    made = plan([episode("c", 0.5, ("judge",), token_ids=[49000, 2]), *MIXED], model_dir, tmp_path,
                agents={"judge": "external"})  # fmt: skip
    assert len(made.adapters) == 1


def test_an_adapter_of_another_base_is_refused(model_dir: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", seed=5)
    publish_untrained(tmp_path / "adapters", other, ("planner",))
    with pytest.raises(AdapterError, match=r"planner@v1 .*was trained for the base other .*tiny"):
        plan(MIXED, model_dir, tmp_path / "adapters")


CASE_12: dict[str, Any] = json.loads((CASES / "12-limits.json").read_text())


def published_with(root: Path, model_dir: Path, settings: dict[str, Any]) -> None:
    """A planner@v1 whose adapter config says ``settings``, and whose manifest agrees."""
    publish_untrained(root, model_dir, ("planner",))
    folder = root / "planner" / "v0001"
    config_file, manifest_file = folder / "adapter_config.json", folder / "manifest.json"
    config = json.loads(config_file.read_text()) | {"r": 8} | settings
    manifest = json.loads(manifest_file.read_text())
    manifest["files"][config_file.name] = sha256(json.dumps(config).encode()).hexdigest()
    for file, content in ((config_file, config), (manifest_file, manifest)):
        file.chmod(0o644)
        file.write_text(json.dumps(content))


@pytest.mark.parametrize("refused", CASE_12["refuse"], ids=json.dumps)
def test_case_12_what_the_server_would_refuse_is_refused_before_training(
    refused: dict[str, Any], model_dir: Path, tmp_path: Path
) -> None:
    root = tmp_path / "adapters"
    published_with(root, model_dir, refused)
    with pytest.raises(AdapterError, match="planner@v1") as caught:
        plan(MIXED, model_dir, root, limits=ServerLimits(CASE_12["server_max_lora_rank"]))
    message = str(caught.value)
    setting = next(name for name in reversed(refused))
    assert setting in message
    if setting in ("r", "rank_pattern"):
        value = refused["r"] if setting == "r" else refused["rank_pattern"]["q_proj"]
        assert f"is {value}, the server's limit is 16" in message
        assert "serve with --max-lora-rank 32 (it takes only 1 8 16 32 64 128 256 320 512)" in (
            message
        )
    else:
        assert str(refused[setting]) in message
        assert "train with" in message, "the fix"


@pytest.mark.parametrize("accepted", CASE_12["accept"], ids=json.dumps)
def test_case_12_what_the_server_takes_is_planned(
    accepted: dict[str, Any], model_dir: Path, tmp_path: Path
) -> None:
    published_with(tmp_path / "adapters", model_dir, accepted)
    made = plan(MIXED, model_dir, tmp_path / "adapters", limits=ServerLimits(16))
    assert [(a.adapter, a.start) for a in made.adapters] == [("planner", 1)]


def test_case_12_the_message_names_value_limit_and_fix(model_dir: Path, tmp_path: Path) -> None:
    case = json.loads((CASES / "12-adapter-r24" / "adapter_config.json").read_text())
    wide = NewAdapter(case["r"], case["lora_alpha"], case["target_modules"])
    with pytest.raises(AdapterError) as caught:
        plan(MIXED, model_dir, tmp_path, new=wide)
    assert "r is 24, the server's limit is 16; serve with --max-lora-rank 32" in str(caught.value)
    made = plan(MIXED, model_dir, tmp_path, new=wide, limits=ServerLimits(32))
    assert made.adapters[0].rank == 24


def test_modules_that_the_server_would_drop_are_refused(model_dir: Path, tmp_path: Path) -> None:
    narrow = ServerLimits(16, ["k_proj", "q_proj"])
    with pytest.raises(AdapterError, match=r"trains v_proj.*--target-modules k_proj,q_proj,v"):
        plan(MIXED, model_dir, tmp_path, limits=narrow)
    assert plan(MIXED, model_dir, tmp_path, limits=ServerLimits(16, ["q_proj", "v_proj"]))


def test_each_new_adapter_has_a_shape_of_its_own(model_dir: Path, tmp_path: Path) -> None:
    team = ("planner", "coder")
    made = plan(
        [episode("a", 0.0, team), episode("b", 1.0, team)],
        model_dir,
        tmp_path,
        shapes={"coder": NewAdapter(8, 16, ["q_proj"])},
        settings=("coder",),
    )
    assert [(a.adapter, a.rank) for a in made.adapters] == [("coder", 8), ("planner", 4)]
    with pytest.raises(AdapterError, match=r"new adapter coder: .*r is 24"):
        plan(
            [episode("a", 0.0, team), episode("b", 1.0, team)],
            model_dir,
            tmp_path,
            shapes={"coder": NewAdapter(24, 16, ["q_proj"])},
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("planer",),
            r"`adapters:` has settings of 'planer'.*known: planner, poet\); did you mean",
        ),
        (("external",), "'external', which is no adapter of this run"),
        (("judge",), "'judge', which is no adapter of this run"),
    ],
)
def test_settings_of_an_adapter_that_is_not_there_are_refused(
    settings: tuple[str, ...], message: str, model_dir: Path, tmp_path: Path
) -> None:
    publish_untrained(tmp_path / "adapters", model_dir, ("poet",))
    team = ("planner", "judge")
    with pytest.raises(ConfigError, match=message):
        plan(
            [episode("a", 0.0, team), episode("b", 1.0, team)],
            model_dir,
            tmp_path / "adapters",
            agents={"judge": "external"},
            settings=settings,
        )


def test_an_unknown_target_module_is_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'w_proj' is in no layer"):
        plan(MIXED, model_dir, tmp_path, new=NewAdapter(4, 8, ["w_proj"]))


def test_a_turn_longer_than_the_context_is_left_out_whole(model_dir: Path, tmp_path: Path) -> None:
    long = episode("c", 0.5, prompt_token_ids=[1] * 40)
    made = plan([*MIXED, long], model_dir, tmp_path, max_length=20)
    assert len(made.adapters[0].rows) == 2
    assert "1 of planner: longer than the context of 20 tokens" in "\n".join(plan_lines(made))
    assert context_length(model_dir) == 1024


def views(*groups: list[float]) -> Sequence[EpisodeView]:
    return read_training_set(
        episode(f"{n}.{i}", reward, task=f"task {n}")
        for n, group in enumerate(groups)
        for i, reward in enumerate(group)
    ).episodes


def test_case_16_repetitions_that_earn_the_same_are_no_signal() -> None:
    case = json.loads((CASES / "16-flat-groups.json").read_text())
    assert has_spread(views(*case["groups"]))
    assert not has_spread(views(*case["groups"][:3]))


def test_flat_repeated_tasks_are_counted() -> None:
    case = json.loads((CASES / "16-flat-groups.json").read_text())
    assert flat_tasks(views(*case["groups"])) == (3, 2)


def test_tasks_tried_once_carry_signal_when_they_differ() -> None:
    assert has_spread(views([0.0], [1.0]))
    assert not has_spread(views([1.0], [1.0]))


def test_agents_rewards_that_differ_are_signal_even_when_their_sum_is_flat() -> None:
    def shared(name: str, first: float, second: float) -> Episode:
        made = episode(name, None, ("a", "b"))
        made.rewards.append(RewardEvent(episode_id=name, value=first, agent="a"))
        made.rewards.append(RewardEvent(episode_id=name, value=second, agent="b"))
        return made

    differ = read_training_set([shared("x", 1, -1), shared("y", -1, 1)]).episodes
    same = read_training_set([shared("x", 1, -1), shared("y", 1, -1)]).episodes
    assert has_spread(differ) and not has_spread(same)


@pytest.mark.parametrize(
    ("episodes", "kind", "message"),
    [
        ([episode("a", None)], RewardError, "1 no reward.*pass --reward"),
        ([episode("a", float("nan"))], RewardError, "1 refused reward"),
        ([], NothingToLearn, "no usable episode among 0"),
        ([episode("a", 1.0, cached=True)], NothingToLearn, "1 of planner: answered from a cache"),
        ([episode("a", 0.5), episode("b", 0.5)], NothingToLearn, "no signal: all 2 usable .*0.5"),
    ],
)
def test_nothing_to_learn_is_said_with_the_reason(
    episodes: list[Episode],
    kind: type[MarftError],
    message: str,
    model_dir: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(kind, match=message):
        plan(episodes, model_dir, tmp_path)


def test_nobody_left_to_train_is_said(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(NothingToLearn, match="planner: frozen"):
        plan(MIXED, model_dir, tmp_path, agents={"planner": "frozen"})
