"""Each thing that is wrong with a log is named at its line, and a clean log is clean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import LogError
from marft_agents.log.checking import Checked, check
from marft_agents.log.encode import encode_line
from marft_agents.schema import (
    AnyEvent,
    EditEvent,
    EpisodeEnded,
    EpisodeStarted,
    RewardEvent,
    ToolEvent,
)
from tests.log.events import at, turn


def start(episode: str = "e") -> EpisodeStarted:
    return EpisodeStarted(episode_id=episode, time=at(0))


def end(episode: str = "e", **fields: Any) -> EpisodeEnded:
    return EpisodeEnded(episode_id=episode, time=at(99), **fields)


def found(path: Path, *lines: AnyEvent | bytes, **options: Any) -> list[tuple[int, str]]:
    data = [line if isinstance(line, bytes) else encode_line(line) for line in lines]
    path.write_bytes(b"".join(data))
    told: list[tuple[int, str]] = []
    seen = check(path, tell=lambda f: told.append((f.line, f.what)), **options)
    assert seen.findings == len(told)
    return told


def test_an_unharmed_log_has_no_finding(tmp_path: Path) -> None:
    lines = [
        start(),
        turn(0),
        ToolEvent(episode_id="e", name="run"),
        turn(1, agent="coder", depends_on=["t0"], selected_by="t0", parent_turn="t0"),
        turn(2, response_id="r-e-0", cached=True),
        EditEvent(episode_id="e", turn_id="t1", text="other"),
        RewardEvent(episode_id="e", value=None),
        RewardEvent(episode_id="e", value=1.0, agent="coder", turn_id="t1"),
        end(),
    ]
    assert found(tmp_path / "a.jsonl", *lines) == []
    assert check(tmp_path, tell=lambda _: None) == Checked(1, 9, 0)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b'{"type":"turn","episode_id":"e"\n', "torn or not JSON"),
        (b'{"schema_version":1,"time":"2026-01-01T00:00:00Z","episode_id":"e","x\n', "torn"),
        (b"\0\0\n", "2 zero bytes"),
        (b'{"type":"credit","episode_id":"e"}\n', "unknown event type 'credit'"),
        (b'{"type":"turn","schema_version":9,"episode_id":"e"}\n', "written by a newer version"),
        (turn(1, logprobs=[-1.0]), "2 token ids but 1 log-probabilities"),
        (turn(1, token_ids=None), "2 log-probabilities without token ids"),
        (turn(1, logprobs=[-1.0, 0.5]), "a log-probability is not finite, positive"),
        (turn(1, logprobs=[-1.0, float("nan")]), "a log-probability is not finite, positive"),
        (turn(1, prompt_token_ids=[-1]), "a token id is out of any vocabulary"),
        (turn(1, response_id="r-e-0"), "duplicate: choice 0 of response r-e-0"),
        (turn(1, turn_id="t0"), "turn id 't0' is that of another turn"),
        (turn(0, turn_id="t1", response_id="x"), "index 0 after index 0: not in order"),
        (turn(1, depends_on=["gone"]), "depends on the unknown turn 'gone'"),
        (turn(1, depends_on=["t1"]), "depends on the turn 't1', which was not over before it"),
        (turn(1, selected_by="gone"), "selected_by names the unknown turn 'gone'"),
        (turn(1, parent_turn="gone"), "parent_turn names the unknown turn 'gone'"),
        (RewardEvent(episode_id="e", value=1.0, turn_id="gone"), "reward for the unknown turn"),
        (RewardEvent(episode_id="e", value=1.0, agent="x"), "'x', which made no call"),
        (RewardEvent(episode_id="e", value=float("inf")), "reward refused: not finite: inf"),
        (EditEvent(episode_id="e", turn_id="gone", text=""), "edit of the unknown turn 'gone'"),
        (start(), "started a second time"),
        (end(), "ended a second time"),
    ],
)
def test_one_wrong_line_is_one_finding_at_that_line(
    tmp_path: Path, line: AnyEvent | bytes, what: str
) -> None:
    lines = [start(), turn(0), line, end()]
    told = found(tmp_path / "a.jsonl", *lines)
    place = 4 if "ended" in what else 3
    assert [number for number, _ in told] == [place]
    assert what in told[0][1]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([turn(0), end()], [(1, "no start was recorded")]),
        ([start(), turn(0)], [(2, "no end: still running, or the app was killed")]),
        ([start(), end(dropped_events=3)], [(2, "3 events could not be written")]),
        (
            [RewardEvent(episode_id="e", value=1.0)],
            [(1, "unknown episode: only rewards or edits name it, nothing was recorded")],
        ),
    ],
)
def test_borders(tmp_path: Path, lines: list[AnyEvent], told: list[tuple[int, str]]) -> None:
    assert found(tmp_path / "a.jsonl", *lines) == told


def test_a_later_turn_in_another_file_is_found_by_its_index(tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "a.jsonl").write_bytes(encode_line(start()) + encode_line(turn(5)))
    (tmp_path / "b.jsonl").write_bytes(encode_line(turn(1, depends_on=["t5"])) + encode_line(end()))
    check(tmp_path, tell=lambda finding: told.append(str(finding)))
    what = "depends on the turn 't5', which was not over before it"
    assert told == [f"{tmp_path / 'b.jsonl'}:1: episode e: {what}"]


def test_an_oversized_line(tmp_path: Path) -> None:
    lines = [start(), turn(0, text="x" * 2**20), end()]
    told = found(tmp_path / "a.jsonl", *lines, largest_line=2**20)
    assert told == [(2, "oversized: the line has 1.0 MiB; cut what the app sends or returns")]


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="does not exist"):
        check(tmp_path / "none", tell=lambda _: None)
    with pytest.raises(LogError, match="no event in"):
        found(tmp_path / "a.jsonl", b"torn\n")
