"""The benchmark of reading a log: the log is what it says it is, and a reading is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.recorder.log import KEY, main, schedule, summary
from benchmarks.recorder.log_made import AGENTS, LAYOUTS, PROMPT, REPLY, TURNS, write_log
from benchmarks.recorder.log_report import reading
from benchmarks.records import Results
from marft_agents.log import LogReader
from marft_agents.log.checking import check


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_log_is_whole_and_trainable(layout: str, tmp_path: Path) -> None:
    write_log(tmp_path / "a.jsonl", 1000, layout)
    told: list[str] = []
    check(tmp_path, tell=lambda finding: told.append(str(finding)))
    assert told == []
    episodes = list(LogReader(tmp_path).episodes())
    assert [len(e.turns) for e in episodes] == [TURNS] * 100
    turns = [turn for episode in episodes for turn in episode.turns]
    assert all(turn.trainable for turn in turns)
    assert {turn.agent for turn in turns} == set(AGENTS)
    assert {len(t.prompt_token_ids or ()) + len(t.token_ids or ()) for t in turns} == {
        PROMPT + REPLY
    }


def test_both_layouts_hold_the_same_episodes(tmp_path: Path) -> None:
    for layout in LAYOUTS:
        (tmp_path / layout).mkdir()
        write_log(tmp_path / layout / "a.jsonl", 1000, layout)
    apart, mixed = (LogReader(tmp_path / layout).episodes() for layout in LAYOUTS)
    for one, other in zip(apart, mixed, strict=True):
        assert one.model_copy(update={"sources": []}) == other.model_copy(update={"sources": []})


def test_every_job_is_measured_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "log.jsonl"
    main(["--quick", "--out", str(out), "--scratch", str(tmp_path)])
    records = Results(out, KEY).read()
    assert len(records) == len(schedule(1)) == 6
    assert all(r["turns"] == 2000 and 10 < r["libraries_mib"] < 120 for r in records)
    assert summary(records)[0] in capsys.readouterr().out
    rows = [line for line in reading(records) if line.startswith("| 2,000 |")]
    assert len(rows) == 6 and "64 episodes at a time | rows for training" in rows[3]
    size = out.stat().st_size
    main(["--quick", "--out", str(out)])
    assert out.stat().st_size == size
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]
    assert json.loads(out.read_text().splitlines()[0])["turn_tokens"] == PROMPT + REPLY
