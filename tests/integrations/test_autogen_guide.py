"""The guide's program runs as it is printed."""

from __future__ import annotations

from pathlib import Path

from tests.runtimes.guide import run_guide


def test_the_guide(tmp_path: Path) -> None:
    episodes = run_guide("autogen-agentchat", tmp_path)
    assert len(episodes) == 3
    for episode in episodes:
        assert [t.kind for t in episode.turns] == ["select", "act"] * 4
        acts = [t for t in episode.turns if t.kind == "act"]
        assert [t.adapter_start for t in acts] == [t.agent for t in acts]
        assert all(t.selected_by and t.trainable for t in acts)
        choices = {t.adapter_start for t in episode.turns if t.kind == "select"}
        assert choices == {"selectorgroupchatmanager"}
        assert episode.team_reward == 0.5
        assert episode.ended is not None and episode.ended.reason == "terminated"
