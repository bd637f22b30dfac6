"""``marft-agents logs``: counts, findings and exit codes, and what goes in and out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from marft_agents import cli
from marft_agents.cli.logs import SUBCOMMANDS, command
from marft_agents.log import LogReader, LogWriter
from marft_agents.schema import EpisodeEnded, EpisodeStarted, RewardEvent
from tests.log.events import at, turn

if TYPE_CHECKING:
    from tests.cli.shop import Shop


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    with LogWriter(tmp_path / "logs") as writer:
        writer.write(EpisodeStarted(episode_id="a", time=at(0), task="1", runtime="app 1"))
        writer.write(turn(0, episode="a", finish_reason="stop", latency_s=0.5))
        writer.write(turn(1, episode="a", agent="coder", kind="summary", latency_s=1.5))
        writer.write(turn(1, episode="a", agent="coder", kind="summary", latency_s=1.5))
        writer.write(RewardEvent(episode_id="a", time=at(2), value=1.0))
        writer.write(EpisodeEnded(episode_id="a", time=at(60)))
        writer.write(turn(0, episode="b", error="500", cached=True))
    return tmp_path / "logs"


def run(*arguments: object, code: int = 0) -> str:
    """What is printed, by the group run as the program runs it."""
    result = CliRunner().invoke(command, [str(a) for a in arguments], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    assert (result.return_value or 0) == code, result.output
    return result.output


def refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object
) -> str:
    """The one line on stderr of a mistake."""
    monkeypatch.setattr(sys, "argv", ["marft-agents", "logs", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


# --- stats ----------------------------------------------------------------------------------------


def test_stats_as_json(logs: Path) -> None:
    seen: dict[str, Any] = json.loads(run("stats", logs, "--json"))
    size = sum(path.stat().st_size for path in logs.iterdir())
    assert (seen["files"], seen["bytes"]) == (1, size)
    assert seen["events"] == {"turn": 4, "episode_started": 1, "reward": 1, "episode_ended": 1}
    assert seen["time"] == {"first": at(0).isoformat(), "last": at(60).isoformat()}
    assert seen["episodes"]["turns"] == {"mean": 1.5, "min": 1, "max": 2}
    assert seen["episodes"]["ended"] == {"terminated": 1, "not ended": 1}
    turns = seen["turns"]
    counted = {
        by: {name: counts["turns"] for name, counts in turns[f"by_{by}"].items()}
        for by in ("agent", "kind", "adapter", "runtime")
    }
    assert counted == {
        "agent": {"planner": 2, "coder": 1},
        "kind": {"act": 2, "summary": 1},
        "adapter": {"planner@v1": 2, "coder@v1": 1},
        "runtime": {"app 1": 2, "not recorded": 1},
    }
    assert turns["by_kind"]["act"]["trainable"] == 1
    assert turns["by_kind"]["act"]["sampled_tokens"] == 4
    assert turns["left_out"] == {
        "not an action of the agent (kind summary)": 1,
        "the call failed": 1,
    }
    assert (turns["failed"], turns["cached"]) == (1, 1)
    assert turns["finish_reasons"] == {"not recorded": 2, "stop": 1}
    assert turns["latency_s"] == {"mean": 1.0, "min": 0.5, "max": 1.5}
    assert seen["rewards"]["team"]["mean"] == 1.0
    assert (seen["duplicates"], seen["skipped"]["count"]) == (1, 0)


def test_stats_for_people_say_the_same(logs: Path) -> None:
    text = run("stats", logs)
    assert "events    7: 4 turn, 1 episode_started" in text
    assert "episodes  2, 1 scored, 1 trainable; 1.5 (1 to 2) turns each" in text
    assert [line.split() for line in text.splitlines() if line.startswith("summary")] == [
        ["summary", "1", "0", "3", "2", "0"]
    ]
    assert "calls     1 failed, 1 cached" in text
    assert "turns left out: 1  the call failed" in text


def test_stats_of_damaged_logs_go_on(logs: Path) -> None:
    (logs / "b.jsonl").write_bytes(b"torn\n")
    assert "skipped lines  1" in run("stats", logs)


# --- validate -------------------------------------------------------------------------------------


def test_validate_names_every_line_and_says_so_by_its_exit_code(logs: Path) -> None:
    (segment,) = logs.iterdir()
    text = run("validate", logs, code=1)
    assert f"{segment}:4: episode a: duplicate: choice 0 of response r-a-1" in text
    assert f"{segment}:7: episode b: no start was recorded" in text
    assert "3 findings in 7 events of 2 episodes" in text
    lines = [json.loads(line) for line in run("validate", logs, "--json", code=1).splitlines()]
    assert lines[-1] == {"summary": {"episodes": 2, "events": 7, "findings": 3}}
    assert lines[0]["line"] == 4 and lines[0]["episode_id"] == "a"


def test_a_clean_log_is_exit_code_0(tmp_path: Path) -> None:
    with LogWriter(tmp_path / "logs") as writer:
        writer.write(EpisodeStarted(episode_id="a", time=at(0)))
        writer.write(EpisodeEnded(episode_id="a", time=at(1)))
    assert run("validate", tmp_path / "logs") == "no findings in 2 events of 1 episodes\n"
    assert "oversized" in run("validate", tmp_path / "logs", "--largest-line", "0.0001", code=1)


def test_exit_codes_reach_the_shell(
    logs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["marft-agents", "logs", "validate", str(logs)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 1
    capsys.readouterr()
    assert "does not exist" in refused(capsys, monkeypatch, "validate", logs / "none")


# --- compact, export, import ----------------------------------------------------------------------


def test_compact_says_what_it_did(logs: Path, tmp_path: Path) -> None:
    text = run("compact", logs, tmp_path / "out", "--delete", "b")
    assert "1 episodes, 5 events" in text
    assert "left out: 1 events that are there twice or superseded" in text
    assert "deleted: b; SOURCE still has them" in text
    assert [e.episode_id for e in LogReader(tmp_path / "out").episodes()] == ["a"]
    text = run("compact", logs, tmp_path / "old", "--before", "2026-01-01T00:00:30")
    assert "left out: 1 episodes that have an event since that date" in text


def test_a_running_app_is_named_and_left_alone(logs: Path, tmp_path: Path) -> None:
    with LogWriter(logs) as writer:
        writer.write(turn(0, episode="live"))
        text = run("compact", logs, tmp_path / "out")
        assert f"left alone: {writer.path} is still written by process" in text


def test_export_says_what_is_lost(logs: Path, tmp_path: Path) -> None:
    text = run("export", logs, logs, tmp_path / "out.jsonl", "--to", "sharegpt")
    assert "out.jsonl: 2 chats of 2 episodes" in text
    assert "not in sharegpt: token ids and log-probabilities" in text


def test_import_names_bad_lines(tmp_path: Path) -> None:
    good = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    source = tmp_path / "x.jsonl"
    source.write_text("\n".join([json.dumps(good), *["torn"] * 12]))
    text = run("import", source, "--output", tmp_path / "logs")
    assert f"left out: {source}:2: torn or not JSON" in text
    assert "left out: 2 more" in text
    assert "1 episodes; turns: assistant 1" in text and "no rewards:" in text


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("stats", "none"), "marft-agents: none does not exist"),
        (("compact", "logs", "logs"), "logs exists; name another place, or remove it first"),
        (("compact", "logs", "out", "--before", "soon"), "'soon' is no date"),
        (("compact", "logs", "out", "--delete", "x"), "no episode 'x' to delete"),
        (("export", "logs", "logs", "--to", "hf"), "logs holds the log itself"),
        (("export", "logs", "out", "--to", "csv"), "'csv' is not one of"),
        (("import", "none"), "none does not exist"),
        (("import", "logs"), "logs is a folder; name one file"),
        (("import", "x", "--reward", "nan"), "must be a finite number"),
        (("merge",), "No such command 'merge'"),
    ],
)
def test_a_mistake_is_one_line(
    logs: Path,
    arguments: tuple[str, ...],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(logs.parent)
    assert line in refused(capsys, monkeypatch, *arguments)
    assert sorted(path.name for path in logs.parent.iterdir()) == ["logs"]


def test_every_subcommand_has_its_own_help() -> None:
    listed = CliRunner().invoke(command, ["--help"]).output
    for name in SUBCOMMANDS:
        assert name in listed
        assert "Usage: logs" in CliRunner().invoke(command, [name, "--help"]).output


# --- training -------------------------------------------------------------------------------------


def chats(path: Path) -> Path:
    rows = [
        {
            "messages": [
                {"role": "system", "content": "you answer the customer in one short line"},
                {"role": "user", "content": f"ship on friday? {n}"},
                {"role": "assistant", "content": "two tests fail.", "name": "writer"},
            ]
        }
        for n in range(6)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_an_imported_log_trains_with_sft_and_with_nothing_else(shop: Shop) -> None:
    source = chats(shop.root / "chats.jsonl")
    run("import", source, "--output", shop.root / "logs", "--reward", "1")
    settings = ("--set", "sft_threshold=1", "--set", "num_train_epochs=1")
    code, told = shop.run("--offline", "sft", "--output", "adapters", *settings)
    assert code == 0, shop.error
    assert "6 turns have no recorded ids (writer)" in told
    assert (shop.root / "adapters" / "writer" / "v0002").is_dir()
    code, _ = shop.run("--offline", "ppo", "--output", "adapters")
    assert code == 2
    assert "no trainable turn (6 of writer: no prompt token ids); nothing was changed" in shop.error
    assert "--offline sft" in shop.error
