"""The guide for any client, run as its reader would run it: Python, curl, JavaScript."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtimes.guide import ADDRESS, PROJECT, ROOT, program
from tests.serving.recording_kit import RecordingStage, recording_stage
from tests.serving.stage import make_house

GUIDE = (ROOT / "docs" / "runtimes" / "any-client.md").read_text(encoding="utf-8")


def block(tag: str) -> str:
    found = re.search(rf"<!-- run: {tag} -->\n```\w+\n(.*?)```", GUIDE, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[RecordingStage]:
    house = make_house(tmp_path)
    for agent in ("planner", "coder"):
        house.publish(agent, untrained=True)
    with recording_stage(house) as desk:
        yield desk


def run(desk: RecordingStage, text: str, file: str, command: list[str], folder: Path) -> str:
    assert ADDRESS in text
    (folder / file).write_text(text.replace(ADDRESS, desk.stage.url))
    done = subprocess.run([*command, file], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_python(desk: RecordingStage, tmp_path: Path) -> None:
    (tmp_path / "my_project.py").write_text(PROJECT)
    run(desk, program("any-client"), "app.py", [sys.executable], tmp_path)
    assert len(desk.of("episode_started")) == 3
    assert [t.agent for t in desk.turns] == ["planner", "coder"] * 3
    assert all(t.trainable for t in desk.turns)
    assert [t.depends_on for t in desk.turns[1::2]] == [[t.turn_id] for t in desk.turns[::2]]
    assert [r.value for r in desk.of("reward")] == [0.5] * 3
    assert len(desk.of("episode_ended")) == 3


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(desk: RecordingStage, tmp_path: Path) -> None:
    said = run(desk, block("curl"), "app.sh", ["sh", "-eu"], tmp_path)
    kinds = ["episode_started", "turn", "reward", "episode_ended"]
    assert [event.type for event in desk.events] == kinds, said
    assert desk.events[0].metadata == {"split": "train"}
    assert desk.turns[0].trainable


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_javascript(desk: RecordingStage, tmp_path: Path) -> None:
    run(desk, block("javascript"), "app.mjs", ["node"], tmp_path)
    planner, coder = desk.turns
    assert coder.depends_on == [planner.turn_id]
    rewards = [(r.value, r.turn_id, r.source) for r in desk.of("reward")]
    assert rewards == [(1.0, None, "app"), (-0.1, coder.turn_id, "lint")]
    assert [e.reason for e in desk.of("episode_ended")] == ["terminated"]
