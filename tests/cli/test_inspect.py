"""``marft-agents inspect``: every count, one episode with its credit, and a user's mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from marft_agents import cli
from marft_agents.cli.inspect import command
from marft_agents.log import LogWriter
from marft_agents.schema import (
    AnyEvent,
    EpisodeEnded,
    EpisodeStarted,
    HumanEvent,
    RewardEvent,
    ToolEvent,
)
from tests.log.events import at, case_bytes, turn


def ended(episode: str, **fields: Any) -> EpisodeEnded:
    values: dict[str, Any] = {"episode_id": episode, "time": at(99)}
    return EpisodeEnded(**(values | fields))


def reward(episode: str, value: Any, **fields: Any) -> RewardEvent:
    values: dict[str, Any] = {"episode_id": episode, "value": value, "time": at(98)}
    return RewardEvent(**(values | fields))


GOOD: list[AnyEvent] = [
    EpisodeStarted(episode_id="good", time=at(0), task="2+2", metadata={"split": "train"}),
    turn(0, episode="good", time=at(1), text="ask the coder"),
    ToolEvent(episode_id="good", time=at(2), name="python", arguments={"x": 1}, result="4\n"),
    turn(
        1,
        episode="good",
        agent="coder",
        time=at(3),
        depends_on=["t0", "gone"],
        text="it is \x1b[31m4\x1b[0m\nreally 🙂",
        token_ids=[7, 8, 9],
        logprobs=[-1.0, -0.5, -0.25],
    ),
    HumanEvent(episode_id="good", time=at(4), name="Ann", text="thanks"),
    turn(2, episode="good", agent="coder", time=at(5), kind="summary"),
    reward("good", 1.0),
    reward("good", 0.25, agent="coder"),
    reward("good", 0.5, turn_id="t1"),
    ended("good", reason="truncated", detail="max rounds", dropped_events=2),
]
OTHERS: list[AnyEvent] = [
    turn(0, episode="unscored"),
    turn(1, episode="unscored", agent="critic"),
    reward("unscored", None),
    ended("unscored"),
    turn(0, episode="failed-1"),
    ended("failed-1", reason="failed", detail="boom 1"),
    turn(0, episode="failed-2", adapter_end="planner@v2"),
    reward("failed-2", 0.5),
    ended("failed-2", reason="failed", detail="boom 2"),
    turn(0, episode="refused"),
    turn(0, episode="refused"),
    reward("refused", "0.5"),
]


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    with LogWriter(tmp_path / "logs") as writer:
        for event in GOOD + OTHERS:
            writer.write(event)
        assert writer.path is not None
        with writer.path.open("ab") as file:
            file.write(b'{"type":"turn","episode_id":"go')
    return tmp_path / "logs"


@pytest.fixture
def credit(tmp_path: Path) -> Path:
    path = tmp_path / "credit.jsonl"
    lines = [
        {"episode_id": "good", "turn_id": "t0", "value": 9.0, "advantage": 9.0, "delta": 9.0},
        {"episode_id": "good", "turn_id": "t0", "value": 0.5, "advantage": -0.125, "delta": 0.25},
        {"episode_id": "good", "turn_id": "t1", "value": float("nan"), "advantage": None},
        {"episode_id": "refused", "turn_id": "t2", "value": 1.0, "advantage": 1.0},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n[]\ntorn {")
    return path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(command, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def document(*arguments: object) -> dict[str, Any]:
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(run(*arguments, "--json"), parse_constant=no_constant)


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_the_summary_as_json(logs: Path) -> None:
    seen = document(logs)
    assert seen["episodes"] == {
        "total": 5,
        "scored": 2,
        "trainable": 1,
        "left_out": {
            "no reward, the episode failed": 1,
            "no reward": 1,
            "refused reward": 1,
            "none of its turns can be trained on": 1,
        },
        "ended": {"failed": 2, "truncated": 1, "terminated": 1, "not ended": 1},
        "incomplete": 1,
        "unknown": [],
    }
    assert seen["agents"]["coder"] == {
        "turns": 2,
        "trainable": 1,
        "left_out": {"not an action of the agent (kind summary)": 1},
        "prompt_tokens": 6,
        "sampled_tokens": 5,
        "trainable_tokens": 3,
    }
    assert seen["agents"]["planner"]["left_out"] == {
        "its episode is left out: no reward": 1,
        "its episode is left out: no reward, the episode failed": 1,
        "adapter version changed during the call": 1,
        "its episode is left out: refused reward": 1,
    }
    for agent in seen["agents"].values():
        assert agent["turns"] == agent["trainable"] + sum(agent["left_out"].values())
    assert seen["rewards"] == {
        "records": {"numbers": 4, "empty": 1, "refused": 1},
        "team": {"scored": 2, "mean": 0.75, "min": 0.5, "max": 1.0},
        "by_team": [
            {"agents": ["coder", "planner"], "scored": 1, "mean": 1.0, "min": 1.0, "max": 1.0},
            {"agents": ["critic", "planner"], "scored": 0, "mean": None, "min": None, "max": None},
            {"agents": ["planner"], "scored": 1, "mean": 0.5, "min": 0.5, "max": 0.5},
        ],
        "by_agent": {"coder": {"scored": 1, "mean": 0.25, "min": 0.25, "max": 0.25}},
    }
    assert seen["adapters"] == {
        "planner@v1": 4, "coder@v1": 2, "critic@v1": 1, "planner@v1 to planner@v2": 1,
    }  # fmt: skip
    assert seen["duplicates"] == 1
    assert seen["skipped"]["count"] == 1
    assert seen["skipped"]["first"][0]["line"] == len(GOOD + OTHERS) + 1
    assert seen["files"] == 1


def test_the_summary_for_people(logs: Path) -> None:
    text = run(logs)
    lines = rows(text)
    assert ["episodes", "5"] in lines
    assert "  left out: 1  no reward, the episode failed\n" in text
    assert ["coder", "2", "1", "6", "5", "3"] in lines
    assert "  coder, left out: 1  not an action of the agent (kind summary)\n" in text
    assert "agents with no trainable turn: critic\n" in text
    assert ["team", "reward,", "all", "episodes", "2", "0.75", "0.5", "1"] in lines
    assert ["of", "critic,", "planner", "0", "-", "-", "-"] in lines
    assert ["reward", "of", "coder", "1", "0.25", "0.25", "0.25"] in lines
    assert "reward records: 4 numbers, 1 empty, 1 refused\n" in text
    assert "  planner@v1 to planner@v2  1 turn\n" in text
    assert f":{len(GOOD + OTHERS) + 1} (byte " in text
    assert "duplicate turns dropped  1\n" in text
    assert "  incomplete: 1 " in text


def test_the_list_finds_the_episode_to_look_at(logs: Path) -> None:
    lines = run(logs, "--episodes").splitlines()
    assert lines[0].split() == ["episode", "reward", "turns", "ended", "task"]
    assert lines[1].split() == ["good", "1", "3", "truncated", "2+2"]
    assert "failed-1 is left out: no reward, the episode failed (boom 1)" in lines
    listed = document(logs, "--episodes")["episodes"]
    ids = [e["episode_id"] for e in listed]
    assert ids == ["good", "unscored", "failed-1", "failed-2", "refused"]
    assert listed[0]["agent_rewards"] == {"coder": 0.25} and listed[0]["left_out"] is None


def test_columns_are_aligned(logs: Path) -> None:
    lines = run(logs).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("agent "))
    assert len({len(line) for line in lines[start : start + 4]}) == 1


def test_many_teams_and_skipped_lines_are_cut_short(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as writer:
        for number in range(15):
            writer.write(turn(0, episode=f"e{number}", agent=f"agent{number}"))
    (tmp_path / "z.jsonl").write_text("torn\n" * 12)
    text = run(tmp_path)
    assert "and 5 more teams; --json has all" in text
    assert "  and 2 more\n" in text
    assert len(document(tmp_path)["rewards"]["by_team"]) == 15


def test_case_23_is_summed_up(tmp_path: Path) -> None:
    """Case 23: B and C are trained on, A and D are counted with their reason."""
    path = tmp_path / "23.jsonl"
    path.write_bytes(case_bytes("23-retries.jsonl") + ended("e23").model_dump_json().encode())
    seen = document(path)
    assert seen["agents"]["planner"]["trainable"] == 2
    assert seen["agents"]["planner"]["left_out"] == {"the call failed": 1}
    assert seen["agents"]["critic"]["left_out"] == {"the call failed": 1}
    assert seen["duplicates"] == 1


def test_a_log_of_rewards_only(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as writer:
        writer.write(reward("e", 1.0))
    assert "no model call was recorded" in run(tmp_path)
    assert "unknown: 1  named by rewards or edits alone: 'e'" in run(tmp_path)
    assert document(tmp_path)["episodes"]["unknown"] == ["e"]
    assert document(tmp_path)["episodes"]["left_out"] == {"no model call was recorded": 1}
    assert "trainable  no: no model call was recorded" in run(tmp_path, "--episode", "e")


def test_one_episode_for_people(logs: Path) -> None:
    text = run(logs, "--episode", "good")
    lines = rows(text)
    assert "task       2+2\n" in text
    assert 'metadata   {"split": "train"}\n' in text
    assert "ended      truncated (max rounds); incomplete: 2 events could not be recorded" in text
    assert "reward     team 1, coder 0.25\n" in text
    assert "value, advantage: not known; " in text
    assert "--credit" in text
    assert ["0", "planner", "act", "0", "-", "3", "2", "-0.75", "-", "-", "-", "yes"] in lines
    assert "0,unknown turn gone" in text
    order = ["#0 planner", "tool python", "#1 coder", "human Ann", "#2 coder"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert "token ids" not in text


def test_recorded_text_cannot_drive_the_terminal(logs: Path) -> None:
    text = run(logs, "--episode", "good")
    assert "\x1b" not in text
    assert "    it is \\x1b[31m4\\x1b[0m\n    really 🙂\n" in text


def test_one_episode_with_credit_and_tokens(logs: Path, credit: Path) -> None:
    for path in (credit, credit.parent):
        text = run(logs, "--episode", "good", "--credit", path, "--tokens")
        cells = rows(text)
        assert [
            "0",
            "planner",
            "act",
            "0",
            "-",
            "3",
            "2",
            "-0.75",
            "-",
            "0.5",
            "-0.125",
            "yes",
        ] in cells
        assert f"value, advantage: from {credit} (1 unreadable lines skipped)" in text
        assert "    token ids: [7, 8, 9]\n" in text
        assert "    log-probs: [-1.0, -0.5, -0.25] (processed)\n" in text
    assert "has no line about this episode" in run(
        logs, "--episode", "unscored", "--credit", credit
    )


def test_one_episode_as_json(logs: Path, credit: Path) -> None:
    seen = document(logs, "--episode", "good", "--credit", credit)
    assert [t["turn_id"] for t in seen["turns"]] == ["t0", "t1", "t2"]
    first, second, third = seen["turns"]
    assert (first["value"], first["advantage"], first["delta"]) == (0.5, -0.125, 0.25)
    assert (second["value"], second["advantage"], second["delta"]) == (None, None, None)
    assert (second["tokens"], second["token_ids"], second["logprob_sum"]) == (3, [7, 8, 9], -1.75)
    assert (second["reward"], second["depends_on"]) == (0.5, ["t0", "gone"])
    assert third["untrainable_reason"] == "not an action of the agent (kind summary)"
    assert seen["rewards"]["team"] == 1.0
    assert seen["tools"][0]["name"] == "python"
    assert seen["ended"]["dropped_events"] == 2


def test_json_stays_json_with_odd_numbers_and_broken_text(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as writer:
        writer.write(turn(0, text="\ud83d", logprobs=[float("nan"), -1.0]))
    (seen,) = document(tmp_path, "--episode", "e")["turns"]
    assert (seen["text"], seen["logprobs"], seen["logprob_sum"]) == ("\ud83d", [None, -1.0], None)
    assert "    \\ud83d\n" in run(tmp_path, "--episode", "e")


# --- a user's mistakes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["LOGS", "--episode", "goood"], "did you mean 'good'"),
        (["LOGS/nowhere"], "nowhere does not exist"),
        (["EMPTY"], "no *.jsonl file in"),
        (["LOGS", "--episode", "good", "--credit", "LOGS/none"], "cannot read the credit file"),
        (["LOGS", "--tokens"], "need --episode ID"),
        ([], "Missing argument"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    logs: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (logs.parent / "empty").mkdir()
    paths = {"LOGS": str(logs), "EMPTY": str(logs.parent / "empty")}
    real = [a.replace("LOGS", paths["LOGS"]).replace("EMPTY", paths["EMPTY"]) for a in arguments]
    monkeypatch.setattr(sys, "argv", ["marft-agents", "inspect", *real])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert out == ""
    assert message in err.strip().splitlines()[-1]
    assert "Traceback" not in err


def test_a_real_pipe_with_an_ascii_locale_and_without_torch(logs: Path) -> None:
    program = (
        "import sys; from marft_agents.cli import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'transformers', 'autogen_agentchat'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "inspect", str(logs), "--episode", "good"],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PATH": ""},
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"really \\U0001f642" in done.stdout
