"""The guide's program runs as it is printed."""

from __future__ import annotations

from pathlib import Path

from tests.runtimes.guide import run_guide


def test_the_guide(tmp_path: Path) -> None:
    episodes = run_guide("agent-framework", tmp_path)
    assert len(episodes) == 3
    for episode in episodes:
        assert [t.agent for t in episode.turns] == ["planner", "coder"] * 2
        assert [t.adapter_start for t in episode.turns] == ["planner", "coder"] * 2
        assert all(t.trainable for t in episode.turns) and episode.team_reward == 0.5
        assert episode.ended is not None and episode.ended.reason == "terminated"
