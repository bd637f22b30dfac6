"""Loading a reward function by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from marft_agents.errors import ConfigError
from marft_agents.rewards import load_reward_function
from marft_agents.schema import Episode


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in [n for n in sys.modules if n.startswith("scoring_of_mine")]:
        del sys.modules[name]


def test_a_function_beside_the_user_is_found(workdir: Path) -> None:
    (workdir / "scoring_of_mine.py").write_text("def score(episode): return 0.25\n")
    function = load_reward_function("scoring_of_mine:score")
    assert function(Episode(episode_id="e")) == 0.25


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("scoring", "package.module:function"),
        (":score", "package.module:function"),
        ("scoring_of_mine_missing:score", "no module 'scoring_of_mine_missing'"),
        ("scoring_of_mine_2:scor", "did you mean 'score'"),
        ("scoring_of_mine_2:LIMIT", "LIMIT is a int, not a function"),
        ("scoring_of_mine_3:score", "importing scoring_of_mine_3 failed: SyntaxError"),
        ("scoring_of_mine_4:score", r"ended the program \(exit code 0\); put .*__main__"),
    ],
)
def test_what_is_wrong_with_a_name_is_said(workdir: Path, spec: str, message: str) -> None:
    (workdir / "scoring_of_mine_2.py").write_text("LIMIT = 3\ndef score(episode): return 1\n")
    (workdir / "scoring_of_mine_3.py").write_text("def score(:\n")
    (workdir / "scoring_of_mine_4.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match=message):
        load_reward_function(spec)
