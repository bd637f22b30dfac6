"""The guide's program runs as it is printed."""

from __future__ import annotations

from pathlib import Path

from tests.runtimes.guide import run_guide
from tests.runtimes.kit import calls_once


def test_the_guide(tmp_path: Path) -> None:
    script = calls_once({"planner": ("transfer_to_coder", {})})
    episodes = run_guide("openai-agents", tmp_path, script=script)
    assert len(episodes) == 3
    for episode in episodes:
        assert [t.agent for t in episode.turns] == ["planner", "coder"]
        assert [t.adapter_start for t in episode.turns] == ["planner", "coder"]
        assert all(t.trainable for t in episode.turns) and episode.team_reward == 0.5
        assert episode.ended is not None and episode.ended.reason == "terminated"
