"""What is said before training: of reading, of methods, and of settings that do not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import ConfigError
from marft_agents.log import LogReader
from marft_agents.rewards import ScoreTally, score_episodes
from marft_agents.training.config import MarftConfig
from marft_agents.training.naming import estimator_name, method_lines, method_name
from marft_agents.training.preflight import reading_lines, require_sense, table
from tests.training.synthetic import Team, TinyModel


def settings(**values: Any) -> MarftConfig:
    return MarftConfig(use_cpu=True, **values)


def test_what_could_not_be_read_and_who_was_scored_is_counted(
    tiny: TinyModel, tmp_path: Path
) -> None:
    Team(tiny, tmp_path).write(3, reward=lambda router, writer: None)
    (file,) = tmp_path.glob("*.jsonl")
    with file.open("a", encoding="utf-8") as log:
        log.write("not json\n")
    reader, tally = LogReader(tmp_path), ScoreTally()

    def judge(episode: Any) -> float | None:
        return None if episode.episode_id == "e0" else 1.0

    assert len(list(score_episodes(judge, reader.episodes(), tally))) == 3
    skipped, scored = reading_lines(reader, tally)
    assert skipped.startswith("skipped 1 unreadable lines; first: ") and file.name in skipped
    assert "2 episodes scored, 0 had a reward, 1 not scored, 0 failed" in scored
    assert list(reading_lines(LogReader(tmp_path), None)) == []


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({}, "MARFT-A (action level)"),
        ({"level": "token"}, "MARFT-T (token level)"),
        ({"estimator": "ippo", "level": "token"}, "IPPO (every agent alone), token level"),
        ({"estimator": "group"}, "group-relative advantages, action level"),
        ({"estimator": "single"}, "one policy for all agents, action level"),
    ],
)
def test_estimators_have_names(values: dict[str, Any], name: str) -> None:
    assert estimator_name(settings(**values)) == name
    assert method_name(settings(**values), "dpo") == f"{name}, DPO"


@pytest.mark.parametrize(
    ("values", "stages", "lines"),
    [
        ({}, (True, False), ["method: MARFT-A (action level); advantage-weighted regression on"
                             " the logs"]),
        (
            {"critic_folds": 3, "estimator": "group", "offline": "ppo", "gamma_w": 0.9},
            (True, False),
            ["method: group", "updates: one", "note: critic_folds, gamma_w have no effect"],
        ),
        ({"beta": 0.1}, (True, False), ["method: MARFT-A", "note: beta has no effect in this run"]),
        ({"iterations": 3}, (True, True),
         ["method: MARFT-A (action level); advantage-weighted regression on the logs, then 3"
          " iterations online of 64 episodes by clipped policy gradient (PPO)",
          "updates: one agent after another (those first whom others read), compounded by 0.5 to"]),
        ({"order": "random", "compound_clip": 4}, (False, True),
         ["method: MARFT-A (action level); 10 iterations online",
          "updates: one agent after another (in a random order), compounded by 0.25 to 4"]),
        ({"offline": "ppo", "schedule": "simultaneous"}, (True, False),
         ["method: MARFT-A (action level); clipped policy gradient (PPO) on the logs",
          "updates: all agents at once, not compounded"]),
        ({"schedule": "alternate"}, (False, True), ["method: ", "updates: one agent an iteration"]),
        ({"estimator": "ippo"}, (False, True),
         ["method: ", "updates: all agents at once, not compounded"]),
    ],
)  # fmt: skip
def test_what_is_about_to_be_done_is_said(
    values: dict[str, Any], stages: tuple[bool, bool], lines: list[str]
) -> None:
    said = list(method_lines(settings(**values), logs=stages[0], online=stages[1]))
    assert len(said) == len(lines)
    for line, start in zip(said, lines, strict=True):
        assert line.startswith(start), line


def test_settings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="offline: none leaves nothing to do"):
        require_sense(settings(offline="none"), online=False)
    with pytest.raises(ConfigError, match="would train one agent only"):
        require_sense(settings(offline="ppo", schedule="alternate"), online=False)
    require_sense(settings(offline="none"), online=True)
    require_sense(settings(schedule="alternate"), online=False)


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert table([("a", "b"), ("long", "x")]) == ["a     b", "long  x"]
