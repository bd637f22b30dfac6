"""Real failures of real users, from logs and runs of an app to the versions that are published."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import AdapterError, ConfigError, SwapError
from marft_agents.log import LogReader, LogWriter
from marft_agents.registry import Registry
from marft_agents.schema import EpisodeEnded, EpisodeStarted, RewardEvent
from marft_agents.training import FinetuneResult, MarftConfig, Online, finetune
from marft_agents.training.dataset import TrainingSet, read_training_set
from marft_agents.training.packing import pack_turns
from marft_agents.training.plan import NewAdapter, ServerLimits
from marft_agents.training.signal import has_spread
from marft_agents.training.stages import Source
from marft_agents.training.tasks import Task
from tests.log.events import CASES, at, case_event
from tests.training.online_kit import App, make_source
from tests.training.synthetic import Team, TinyModel, publish_untrained, snapshot
from tests.training.test_dataset import episode, turn
from tests.training.test_plan import MIXED, plan, published_with


def records(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (CASES / name).read_text().splitlines()]


class Given:
    """The same logs every iteration."""

    def __init__(self, logs: Path) -> None:
        self.data = read_training_set(LogReader(logs).episodes())
        self.signal = has_spread(self.data.episodes)
        self.collected = 0

    def collect(self, iteration: int, current: Mapping[str, int]) -> TrainingSet:
        self.collected += 1
        return self.data

    def lines(self) -> list[str]:
        return []

    def metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        raise AssertionError("nothing is resumed here")


def online_run(
    source: Source, registry: Registry, model_dir: Path, swap: Callable[[str, int], Any], **kw: Any
) -> tuple[FinetuneResult, list[str]]:
    """A run without logs, and what it said."""
    standard: dict[str, Any] = {"use_cpu": True, "offline": "none", "iterations": 1}
    said: list[str] = []
    result = finetune(
        [],
        model=str(model_dir),
        output=registry.root,
        config=MarftConfig(**(standard | kw)),
        online=Online(source, swap),
        say=said.append,
    )
    assert result is not None
    return result, said


# -- 16, 30: nothing to learn online --------------------------------------------------------------


def test_case_16_online_iterations_without_spread_move_and_swap_nothing(
    model_dir: Path, tmp_path: Path
) -> None:
    """Case 16: only flat groups; not even the KL term moves a weight."""
    groups = json.loads((CASES / "16-flat-groups.json").read_text())["groups"][:3]

    def score(task: int, number: int) -> float | None:
        flat: list[float] = groups[task]
        return flat[number % 4] if number % 4 < len(flat) else None

    sampling: dict[str, Any] = {
        "group_size": 4, "episodes_per_iteration": 12, "max_resample": 0,
    }  # fmt: skip
    tasks = [Task(f"g{n}", n) for n in range(3)]
    registry = publish_untrained(tmp_path / "adapters", model_dir)
    before = snapshot(registry.root)
    swaps: list[Any] = []
    with make_source(tmp_path / "online", App(score), tasks, **sampling) as source:
        result, said = online_run(
            source, registry, model_dir, lambda a, v: swaps.append((a, v)),
            iterations=2, estimator="group", beta=0.1, **sampling,
        )  # fmt: skip
    after = {k: v for k, v in snapshot(registry.root).items() if not k.startswith(".learner")}
    assert after == before and swaps == [] and result.adapters == []
    nothing = "nothing to learn in iteration {}: no signal in the rewards; going on"
    assert [line for line in said if "no signal" in line] == [nothing.format(n) for n in (1, 2)]


def silent_logs(tiny: TinyModel, logs: Path, agents: Mapping[str, str]) -> None:
    """Case 30's two calls and rewards, with ids and log-probabilities of the tiny model."""
    team = Team(tiny, logs, adapters={agent: f"{agent}@v1" for agent in agents})
    with LogWriter(logs) as log:
        for record in records("30-silent-agent.jsonl"):
            name = record["episode"]
            if record["kind"] == "reward":
                log.write(RewardEvent(episode_id=name, value=record["value"]))
                log.write(EpisodeEnded(episode_id=name))
                continue
            log.write(EpisodeStarted(episode_id=name))
            said = record["messages"][-1]["content"]
            log.write(team.turn(name, record["agent"], record["seq"], said, record["text"]))


def test_case_30_an_agent_that_never_speaks_online_is_listed_and_left_alone(
    model_dir: Path, tiny: TinyModel, tmp_path: Path
) -> None:
    """Case 30: the planner is trained; the critic's files stay and are not swapped."""
    agents = json.loads((CASES / "30-config.json").read_text())["adapters"]
    registry = publish_untrained(tmp_path / "adapters", model_dir, tuple(agents))
    silent_logs(tiny, tmp_path / "logs", agents)
    before = snapshot(registry.root / "critic")
    swaps: list[Any] = []
    result, _ = online_run(
        Given(tmp_path / "logs"), registry, model_dir, lambda a, v: swaps.append((a, v))
    )
    assert [a.adapter for a in result.adapters] == ["planner"] and swaps == [("planner", 2)]
    assert [(u.name, u.why) for u in result.untouched] == [("critic", "0 samples")]
    assert snapshot(registry.root / "critic") == before


def test_case_30_who_spoke_only_online_is_not_listed_as_silent(
    model_dir: Path, tiny: TinyModel, tmp_path: Path
) -> None:
    """Case 30's logs, and then an app in which the critic speaks too."""
    agents = json.loads((CASES / "30-config.json").read_text())["adapters"]
    registry = publish_untrained(tmp_path / "adapters", model_dir, tuple(agents))
    silent_logs(tiny, tmp_path / "logs", agents)
    names: dict[str, str | None] = {agent: f"{agent}@v1" for agent in agents}
    Team(tiny, tmp_path / "app", adapters=names).write(6, agents=tuple(agents))
    result = finetune(
        [tmp_path / "logs"],
        model=str(model_dir),
        output=registry.root,
        config=MarftConfig(use_cpu=True, num_train_epochs=1, iterations=1, learning_rate=1e-6),
        online=Online(Given(tmp_path / "app"), lambda adapter, version: None),
        say=lambda line: None,
    )
    assert result is not None and [a.adapter for a in result.adapters] == ["critic", "planner"]
    assert result.untouched == []


# -- a sync that delivers no adapter --------------------------------------------------------------


def test_a_swap_after_which_the_adapter_is_not_listed_stops_the_run(
    model_dir: Path, tiny: TinyModel, tmp_path: Path
) -> None:
    """Weight sync that delivers no adapter: no iteration is recorded under the old weights."""
    registry = publish_untrained(tmp_path / "adapters", model_dir)
    Team(tiny, tmp_path / "logs").write(6)
    source = Given(tmp_path / "logs")

    def swap(adapter: str, version: int) -> None:
        raise SwapError(f"{adapter}: step load: the engine does not list {adapter}@v{version}")

    with pytest.raises(SwapError, match="does not list router@v2"):
        online_run(source, registry, model_dir, swap, iterations=5)
    assert source.collected == 1
    assert [registry.current(agent) for agent in ("router", "writer")] == [1, 1]


# -- log-probabilities that are none --------------------------------------------------------------


def spoiled_logs(tiny: TinyModel, logs: Path, agent: str, logprob: float) -> None:
    """Eight episodes; the agent's first turn has one log-probability that no policy gives."""
    Team(tiny, logs).write(8, seed=2)
    path = next(logs.glob("*.jsonl"))
    events = [json.loads(line) for line in path.read_text().splitlines()]
    first = next(event for event in events if event.get("agent") == agent)
    first["logprobs"][0] = logprob
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask", "none"])
def test_a_placeholder_log_probability_costs_its_turn_and_no_other(
    mode: str, model_dir: Path, tiny: TinyModel, tmp_path: Path
) -> None:
    """-inf and -9999: every ratio stays finite, and the row is flagged."""
    spoiled_logs(tiny, tmp_path / "logs", "router", -9999.0)
    registry, said = publish_untrained(tmp_path / "adapters", model_dir), list[str]()
    result = finetune(
        [tmp_path / "logs"],
        model=str(model_dir),
        output=registry.root,
        config=MarftConfig(
            use_cpu=True,
            offline="ppo",
            num_train_epochs=1,
            per_device_train_batch_size=99,
            importance_sampling_mode=mode,
        ),
        say=said.append,
    )
    assert result is not None
    assert {a.adapter: a.used for a in result.adapters} == {"router": 7, "writer": 8}
    flagged = "1 of router: a log-probability is not finite, positive or a placeholder"
    assert any(flagged in line for line in said)
    assert "episodes: 8 of 8 usable" in said, "the episode's reward still counts"
    for agent in ("router", "writer"):
        metrics = registry.manifest(agent, 2).training["metrics"]
        assert all(map(math.isfinite, metrics.values()))
        assert metrics["ratio"] == pytest.approx(1, abs=1e-3)


# -- more than one end token ----------------------------------------------------------------------


def test_a_reply_that_ends_on_the_second_end_token_is_whole() -> None:
    """Both end tokens end a reply; nothing is added to it, and nothing is taken away."""
    first, second = turn(0, token_ids=[5, 2]), turn(1, token_ids=[5, 0], prompt_token_ids=[1, 9])
    cut = turn(2, token_ids=[5, 6], finish_reason="length", prompt_token_ids=[1, 8])
    data = read_training_set([episode(first, second, cut)])
    assert not data.left_out_turns and not data.episodes[0].truncated
    trained = [reply for pack in pack_turns(data.rows, 1000) for reply in pack.targets]
    assert sorted(map(list, trained)) == [[5, 0], [5, 2], [5, 6]]


# -- adapter on the output head -------------------------------------------------------------------


def test_an_adapter_on_the_output_head_is_refused_before_training(
    model_dir: Path, tmp_path: Path
) -> None:
    """The engine's prompt log-probabilities ignore such a layer, so nothing could be checked."""
    wide = NewAdapter(4, 8, ["q_proj", "lm_head"])
    with pytest.raises(ConfigError, match="lm_head"):
        plan(MIXED, model_dir, tmp_path / "new", new=wide)
    published_with(tmp_path / "old", model_dir, {"target_modules": ["q_proj", "lm_head"]})
    with pytest.raises(AdapterError, match=r"planner@v1.*lm_head"):
        plan(MIXED, model_dir, tmp_path / "old", limits=ServerLimits(16))


# -- 29: nested chats -----------------------------------------------------------------------------


def nested_set(logs: Path, *, apart: bool) -> TrainingSet:
    """Case 29 with the inner chat in its parent's episode, or in an episode of its own."""
    with LogWriter(logs) as log:
        log.write(EpisodeStarted(episode_id="e29", time=at(0)))
        if apart:
            inner = EpisodeStarted(episode_id="e29/n1", parent_id="e29", time=at(1))
            log.write(inner)
        made = records("29-nested.jsonl")
        for number, record in enumerate(made):
            event = case_event(record, number)
            log.write(event if apart else event.model_copy(update={"episode_id": "e29"}))
        for name in ("e29/n1", "e29")[not apart :]:
            log.write(EpisodeEnded(episode_id=name, time=at(len(made))))
    return read_training_set(LogReader(logs).episodes())


def test_case_29_an_inner_chat_is_part_of_its_parents_episode(tmp_path: Path) -> None:
    """Case 29: five samples share one reward; the summary in the outer chat is none."""
    data = nested_set(tmp_path, apart=False)
    assert [row.agent for row in data.rows] == ["planner", "writer", "critic", "writer", "planner"]
    calls = [r for r in records("29-nested.jsonl") if r["kind"] == "call"]
    assert [list(row.token_ids) for row in data.rows] == [call["token_ids"] for call in calls]
    (view,) = data.episodes
    assert view.reward_K == [0, 0, 0, 0, 1]


def test_case_29_an_inner_episode_of_its_own_is_not_paid_with_its_parents_reward(
    tmp_path: Path,
) -> None:
    data = nested_set(tmp_path, apart=True)
    assert [(view.episode_id, view.total_reward) for view in data.episodes] == [("e29", 1.0)]
    assert [row.agent for row in data.rows] == ["planner", "planner"]
    assert data.left_out_episodes == {"no reward": 1}
