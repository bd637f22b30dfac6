"""The replay check: are the recorded log-probabilities this model's?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import AdapterError, ReplayError
from marft_agents.log import LogReader
from marft_agents.registry import Registry, describe_base
from marft_agents.schema import Sampling
from marft_agents.training._quiet import quiet
from marft_agents.training.adapters import start_folder
from marft_agents.training.config import MarftConfig
from marft_agents.training.dataset import LIMITED, read_training_set
from marft_agents.training.plan import NewAdapter
from marft_agents.training.replay import Replay, Replayer, replay_lines
from marft_agents.training.session import Session
from tests.tiny_model import make_tiny_model
from tests.training.synthetic import (
    Team,
    TinyModel,
    publish_trained,
    publish_untrained,
    snapshot,
)


def replay(logs: Path, registry: Registry, model_dir: Path, scratch: Path) -> Replay:
    """What a run does before it trains, from the versions in use."""
    data, base = read_training_set(LogReader(logs).episodes()), describe_base(model_dir)
    current = {agent: registry.current(agent) for agent in ("router", "writer")}
    new = NewAdapter(4, 8, ["q_proj"])
    folders = {
        agent: start_folder(agent, version, registry, model_dir, new, seed=0, scratch=scratch)
        for agent, version in current.items()
    }
    before = snapshot(registry.root)
    with quiet():
        session = Session(model_dir, folders, MarftConfig(use_cpu=True), lambda line: None)
        session.try_sharing(data.rows)
        replayer = Replayer(
            session.model,
            base,
            registry,
            {(agent, version): agent for agent, version in current.items()},
            pack_tokens=512,
            share=session.share,
        )
        try:
            return replayer.check(data.rows, turns=4, tolerance=0.05, seed=0)
        finally:
            assert set(session.model.peft_config) == set(folders)
            assert session.model.active_adapters == ["router"]
            assert snapshot(registry.root) == before


@pytest.fixture
def registry(tmp_path: Path, model_dir: Path) -> Registry:
    return publish_untrained(tmp_path / "adapters", model_dir)


def test_the_models_own_logs_pass(
    tiny: TinyModel, registry: Registry, model_dir: Path, tmp_path: Path
) -> None:
    Team(tiny, tmp_path / "logs").write(6)
    found = replay(tmp_path / "logs", registry, model_dir, tmp_path)
    assert [(r.agent, r.version, r.turns) for r in found.checked] == [
        ("router", "router@v1", 4),
        ("writer", "writer@v1", 4),
    ]
    assert all(r.worst_difference < 1e-3 for r in found.checked)
    assert not found.unchecked


@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_logs_at_another_temperature_pass_when_it_was_recorded(
    temperature: float, tiny: TinyModel, registry: Registry, model_dir: Path, tmp_path: Path
) -> None:
    Team(tiny, tmp_path / "logs", temperature=temperature).write(6)
    found = replay(tmp_path / "logs", registry, model_dir, tmp_path)
    assert all(r.worst_difference < 1e-3 for r in found.checked)


def test_logprobs_before_temperature_pass_only_when_marked_raw(
    tiny: TinyModel, registry: Registry, model_dir: Path, tmp_path: Path
) -> None:
    """Case 17: the server reports log-probabilities before temperature."""
    cold: dict[str, Any] = {"sampling": Sampling(temperature=0.5)}
    Team(tiny, tmp_path / "raw").write(6, logprob_mode="raw", **cold)
    found = replay(tmp_path / "raw", registry, model_dir, tmp_path)
    assert all(r.worst_difference < 1e-3 for r in found.checked)
    Team(tiny, tmp_path / "wrong").write(6, **cold)
    with pytest.raises(ReplayError, match=r"match at temperature 1: .*processed_logprobs"):
        replay(tmp_path / "wrong", registry, model_dir, tmp_path / "x")


def test_a_log_of_another_model_is_refused_with_agent_version_and_numbers(
    tiny: TinyModel, registry: Registry, model_dir: Path, tmp_path: Path
) -> None:
    Team(tiny, tmp_path / "logs", shift=-0.4).write(6)
    with pytest.raises(ReplayError) as caught:
        replay(tmp_path / "logs", registry, model_dir, tmp_path)
    message = str(caught.value)
    assert "agent 'router', recorded under router@v1" in message
    assert "by 0.400 on average (limit 0.05; 4 turns, " in message
    assert "Likely causes" in message and "Nothing was changed" in message


def test_calls_that_never_reached_the_adapter_are_recognised(
    tiny: TinyModel, registry: Registry, model_dir: Path, tmp_path: Path
) -> None:
    version = publish_trained(registry, model_dir, "router")
    team = Team(tiny, tmp_path / "logs")
    team.adapters["router"] = f"router@v{version}"
    team.write(6)
    with pytest.raises(ReplayError, match=r"router@v2.*match the base model without an adapter"):
        replay(tmp_path / "logs", registry, model_dir, tmp_path)


def test_an_older_version_is_replayed_under_itself(
    tiny: TinyModel, registry: Registry, model_dir: Path, tmp_path: Path
) -> None:
    Team(tiny, tmp_path / "logs").write(6)
    version = publish_trained(registry, model_dir, "router")
    registry.promote("router", version, by="test", evidence={})
    found = replay(tmp_path / "logs", registry, model_dir, tmp_path)
    assert [r.version for r in found.checked] == ["router@v1", "writer@v1"]
    assert all(r.worst_difference < 1e-3 for r in found.checked)


def test_calls_without_an_adapter_are_the_base_models(
    tiny: TinyModel, registry: Registry, model_dir: Path, tmp_path: Path
) -> None:
    version = publish_trained(registry, model_dir, "router")
    registry.promote("router", version, by="test", evidence={})
    Team(tiny, tmp_path / "logs", adapters={"router": None, "writer": None}).write(6)
    found = replay(tmp_path / "logs", registry, model_dir, tmp_path)
    assert {r.version for r in found.checked} == {"the base model"}


UNKNOWN: dict[str, str | None] = {"router": "router@v9", "writer": "lora-7b"}


def test_versions_nobody_has_must_answer_as_the_base_does(
    tiny: TinyModel, registry: Registry, model_dir: Path, tmp_path: Path
) -> None:
    Team(tiny, tmp_path / "logs", adapters=UNKNOWN).write(6)
    found = replay(tmp_path / "logs", registry, model_dir, tmp_path)
    assert [r.version for r in found.checked] == [
        "router@v9 (not in the registry: the base)",
        "lora-7b (not in the registry: the base)",
    ]
    Team(tiny, tmp_path / "other", adapters=UNKNOWN, shift=-0.4).write(6)
    with pytest.raises(ReplayError, match=r"under router@v9, which .* does not have.*by 0\.400"):
        replay(tmp_path / "other", registry, model_dir, tmp_path / "x")


def test_truncated_sampling_is_counted_not_checked(
    tiny: TinyModel, registry: Registry, model_dir: Path, tmp_path: Path
) -> None:
    Team(tiny, tmp_path / "logs").write(6, sampling=Sampling(top_p=0.9))
    found = replay(tmp_path / "logs", registry, model_dir, tmp_path)
    assert found.checked == []
    assert found.unchecked == {LIMITED: 12}
    said: list[str] = []
    replay_lines(found, said.append)
    assert "WARNING: no turn could be replayed" in said[-1]


def test_turns_recorded_under_an_adapter_of_another_base_are_refused(
    tiny: TinyModel, registry: Registry, model_dir: Path, tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path / "other", seed=3)
    publish_untrained(registry.root, other, ("poet",))
    Team(tiny, tmp_path / "logs", adapters={"router": "poet@v1", "writer": "writer@v1"}).write(6)
    with pytest.raises(AdapterError, match="under poet@v1, an adapter of the base other"):
        replay(tmp_path / "logs", registry, model_dir, tmp_path)
