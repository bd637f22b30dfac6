"""The guide, run as its reader would run it."""

from __future__ import annotations

from pathlib import Path

from tests.runtimes.guide import run_guide


def test_the_guide_records_what_it_says(tmp_path: Path) -> None:
    episodes = run_guide("autogen-classic", tmp_path)
    assert len(episodes) == 3
    for episode in episodes:
        kinds = {t.kind for t in episode.turns}
        assert kinds == {"act", "select"} and episode.team_reward == 0.5
        assert all(t.trainable for t in episode.turns if t.kind == "act")
        assert {t.agent for t in episode.turns if t.kind == "act"} <= {"planner", "coder"}
        assert episode.ended is not None and episode.ended.reason == "terminated"
