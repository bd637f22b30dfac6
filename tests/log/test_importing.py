"""What other programs recorded, as episodes: who said what after being sent which messages."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import ConfigError, LogError
from marft_agents.log import LogReader
from marft_agents.log.checking import check
from marft_agents.log.importing import FORMATS, Imported, import_log
from marft_agents.log.importing.detect import detect
from marft_agents.schema import Episode

FOREIGN = Path(__file__).parent / "foreign"
"""Written by AgentChat 0.7.5: a round of a planner and a coder with one tool."""
SYSTEM = {"role": "system", "content": "You answer."}


def chat(*contents: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]


def save(path: Path, *values: Any) -> Path:
    lines = [v if isinstance(v, str) else json.dumps(v) for v in values]
    path.write_text("\n".join(lines) + "\n")
    return path


def made(source: Path, **options: Any) -> tuple[Imported, list[Episode]]:
    done = import_log(source, source.parent / "logs", **options)
    told: list[str] = []
    check(done.path, tell=lambda finding: told.append(str(finding)))
    assert told == []
    return done, list(LogReader(done.path).episodes())


def said(episode: Episode) -> list[tuple[str, str | None, list[str]]]:
    """Agent, text, and what its messages said, with the role's first letter."""
    return [
        (t.agent, t.text, [f"{m['role'][0]}:{m['content']}" for m in t.messages])
        for t in episode.turns
    ]


# --- chats ----------------------------------------------------------------------------------------


def test_openai_chats_give_a_turn_for_every_reply(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    source = save(
        tmp_path / "chats.jsonl",
        {"messages": [SYSTEM, *chat("1+1?", "2", "and 2+2?", "4")], "tools": tools},
        {"messages": chat("hi", "hello")},
    )
    done, (first, second) = made(source)
    assert (done.format, done.episodes, done.agents) == ("openai", 2, {"assistant": 3})
    assert said(first) == [
        ("assistant", "2", ["s:You answer.", "u:1+1?"]),
        ("assistant", "4", ["s:You answer.", "u:1+1?", "a:2", "u:and 2+2?"]),
    ]
    assert first.turns[1].depends_on == [first.turns[0].turn_id]
    assert (first.task, first.metadata) == ("1+1?", {"tools": tools})
    assert [h.text for h in first.humans] == ["and 2+2?"]
    assert first.started is not None and first.started.runtime == "import openai"
    assert first.turns[0].untrainable_reason == "no prompt token ids"
    assert first.turns[0].time < first.humans[0].time < first.turns[1].time
    assert second.task == "hi"
    assert not first.scored and first.untrainable_reason == "no reward"


def test_replies_that_are_not_to_be_learnt_are_messages_only(tmp_path: Path) -> None:
    messages = chat("a", "no", "b", "yes")
    messages[1]["weight"] = 0
    messages[3] |= {"weight": 1, "name": "planner"}
    _, (episode,) = made(save(tmp_path / "x.jsonl", {"messages": messages}), reward=0.5)
    assert said(episode) == [("planner", "yes", ["u:a", "a:no", "u:b"])]
    assert "weight" not in episode.turns[0].messages[1]
    assert episode.team_reward == 0.5


def test_tool_calls_of_both_ages(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "assistant", "function_call": {"name": "sub", "arguments": "{}"}},
        {"role": "function", "name": "sub", "content": "1"},
        {"role": "assistant", "content": "done"},
    ]
    _, (episode,) = made(save(tmp_path / "x.jsonl", {"messages": messages}))
    assert [t.tool_calls and t.tool_calls[0]["function"]["name"] for t in episode.turns] == [
        "add", "sub", None,
    ]  # fmt: skip
    assert [(t.name, t.result) for t in episode.tools] == [("add", "3"), ("sub", "1")]
    assert episode.turns[1].depends_on == [episode.turns[0].turn_id]


def test_sharegpt_as_lines_and_as_one_list(tmp_path: Path) -> None:
    row = {
        "id": "x1",
        "system": "You answer.",
        "conversations": [
            {"from": "human", "value": "add"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": "it is 3"},
        ],
        "agent": "coder",
    }
    lines = save(tmp_path / "lines.jsonl", row, row)
    whole = save(tmp_path / "whole.json", json.dumps([row, row], indent=1))
    for source in (lines, whole):
        done, (episode, _) = made(source)
        assert (done.format, done.agents) == ("sharegpt", {"coder": 4})
        assert [m["role"] for m in episode.turns[1].messages] == [
            "system", "user", "assistant", "tool",
        ]  # fmt: skip
        assert episode.turns[0].tool_calls is not None
        assert episode.turns[0].tool_calls[0]["function"] == {
            "name": "add", "arguments": '{"a": 1}',
        }  # fmt: skip
        assert episode.metadata == {"id": "x1", "system": "You answer."}


def test_bad_records_are_named_and_the_rest_is_imported(tmp_path: Path) -> None:
    source = save(
        tmp_path / "chats.jsonl",
        "{torn",
        {"messages": chat("a", "b")},
        "",
        "[1]",
        {"messages": "none"},
        {"messages": [{"role": "alien", "content": "x"}]},
        {"messages": chat("only a question")},
        {"input": {}, "preferred_output": []},
        {"messages": ["text"]},
    )
    done, episodes = made(source)
    assert len(episodes) == 1
    places = [(int(bad.split(":")[1]), bad.split(": ", 1)[1]) for bad in done.bad]
    assert [line for line, _ in places] == [1, 4, 5, 6, 7, 8, 9]
    for (_, told), why in zip(
        places,
        ["torn or not JSON", "JSON list", "no list 'messages'", "unknown role 'alien'",
         "no reply", "pair of preferences", "no message"],
        strict=True,
    ):  # fmt: skip
        assert why in told


def test_nothing_is_written_when_nothing_can_be_read(tmp_path: Path) -> None:
    source = save(tmp_path / "chats.jsonl", {"messages": chat("q")}, "torn")
    with pytest.raises(
        LogError, match=r"no episode in .* as openai; first: .*chats\.jsonl:1: no reply"
    ):
        import_log(source, tmp_path / "logs")
    assert list((tmp_path / "logs").iterdir()) == []


def test_a_disk_that_refuses_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        import_log(save(tmp_path / "x.jsonl", {"messages": chat("a", "b")}), tmp_path / "logs")
    assert list((tmp_path / "logs").iterdir()) == []


def test_a_file_is_imported_once(tmp_path: Path) -> None:
    source = save(tmp_path / "x.jsonl", {"messages": chat("a", "b")})
    done = import_log(source, tmp_path / "logs")
    with pytest.raises(LogError, match=f"was imported before: {done.path}"):
        import_log(source, tmp_path / "logs")


# --- AgentChat ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["result", "state"])
def test_a_round_of_a_team(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "x.json"
    source.write_bytes((FOREIGN / f"agentchat-{kind}.json").read_bytes())
    done, (episode,) = made(source)
    assert done.format == f"agentchat-{kind}"
    assert said(episode) == [
        ("planner", "plan: add", ["u:1+2?"]),
        ("coder", "thinking", ["u:1+2?", "u:plan: add"]),
        ("coder", "the sum is 3", ["u:1+2?", "u:plan: add", "a:thinking", "t:3"]),
        ("planner", "done then", ["u:1+2?", "a:plan: add", "u:the sum is 3"]),
    ]
    names = [t.turn_id for t in episode.turns]
    assert [[names.index(d) for d in t.depends_on] for t in episode.turns] == [
        [], [0], [0, 1], [0, 2],
    ]  # fmt: skip
    assert episode.turns[1].tool_calls == [
        {"id": "c1", "type": "function",
         "function": {"name": "add", "arguments": '{"a":1,"b":2}'}}
    ]  # fmt: skip
    assert [(t.agent, t.name, t.call_id, t.result) for t in episode.tools] == [
        ("coder", "add", "c1", "3")
    ]
    assert episode.task == "1+2?" and episode.humans == []
    assert episode.turns[0].time.year == 2026


def test_a_context_tells_more_than_the_thread(tmp_path: Path) -> None:
    """An agent that kept its last two messages only was sent those alone."""
    state = json.loads((FOREIGN / "agentchat-state.json").read_text())
    context = state["agent_states"]["planner"]["agent_state"]["llm_context"]
    context["messages"] = context["messages"][2:]
    _, (episode,) = made(save(tmp_path / "x.json", state))
    assert said(episode)[0] == ("planner", "plan: add", ["u:1+2?"])
    assert said(episode)[3] == ("planner", "done then", ["u:the sum is 3"])


def test_people_and_what_code_wrote_are_no_turns(tmp_path: Path) -> None:
    def message(source: str, text: str, kind: str = "TextMessage", by_model: bool = True) -> Any:
        usage = {"prompt_tokens": 1, "completion_tokens": 1} if by_model else None
        return {"source": source, "content": text, "type": kind, "models_usage": usage}

    messages = [
        message("user", "go", by_model=False),
        message("planner", "plan"),
        message("planner", "over to coder", "HandoffMessage", by_model=False),
        message("ann", "wait", by_model=False),
        message("coder", "code"),
    ]
    result = {"messages": messages, "stop_reason": "said stop"}
    source = save(tmp_path / "runs.jsonl", result, result)
    _, (episode, _) = made(source)
    assert said(episode) == [
        ("planner", "plan", ["u:go"]),
        ("coder", "code", ["u:go", "u:plan", "u:over to coder", "u:wait"]),
    ]
    assert [(h.name, h.text) for h in episode.humans] == [("ann", "wait")]
    assert episode.ended is not None and episode.ended.detail == "said stop"
    _, (listed,) = made(save(tmp_path / "list.json", json.dumps(messages)))
    assert said(listed) == said(episode)
    _, several = made(save(tmp_path / "several.json", json.dumps([result, result, result])))
    assert len(several) == 3


def test_the_state_of_one_agent(tmp_path: Path) -> None:
    state = json.loads((FOREIGN / "agentchat-state.json").read_text())
    alone = state["agent_states"]["coder"]["agent_state"]
    _, (episode,) = made(save(tmp_path / "x.json", alone))
    assert [t.agent for t in episode.turns] == ["coder", "coder"]
    assert episode.task == "1+2?"


# --- classic --------------------------------------------------------------------------------------

_TABLES = """
CREATE TABLE chat_completions(id INTEGER PRIMARY KEY, invocation_id TEXT, client_id INTEGER,
  wrapper_id INTEGER, session_id TEXT, source_name TEXT, request TEXT, response TEXT,
  is_cached INTEGER, cost REAL, start_time DATETIME, end_time DATETIME);
CREATE TABLE function_calls(source_id INTEGER, source_name TEXT, function_name TEXT, args TEXT,
  returns TEXT, timestamp DATETIME);
"""


def database(path: Path, calls: Sequence[Sequence[Any]], tools: Sequence[Sequence[Any]]) -> Path:
    """As ``autogen.runtime_logging`` leaves it: (session, agent, messages, answer, cached, s)."""
    with sqlite3.connect(path) as db:
        db.executescript(_TABLES)
        for session, agent, messages, answer, cached, second in calls:
            request = {"messages": messages, "model": "m", "temperature": 0.5, "seed": None}
            message = {"role": "assistant", "content": answer}
            response: Any = {
                "id": f"r{second}",
                "choices": [{"finish_reason": "stop", "message": message}],
            }
            db.execute(
                "INSERT INTO chat_completions (session_id, source_name, request, response,"
                " is_cached, start_time, end_time) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (session, agent,
                 json.dumps(request) if messages is not None else "null",
                 json.dumps(response if answer is not None else {"response": "boom"}), cached,
                 f"2024-05-01 10:00:{second:02}.000000",
                 f"2024-05-01 10:00:{second + 1:02}.500000"),
            )  # fmt: skip
        for agent, name, second in tools:
            db.execute(
                "INSERT INTO function_calls (source_name, function_name, args, returns, timestamp)"
                " VALUES (?, ?, ?, ?, ?)",
                (agent, name, '{"a": 1}', '"3"', f"2024-05-01 10:00:{second:02}.000000"),
            )
    db.close()
    return path


def test_runtime_logging_of_classic(tmp_path: Path) -> None:
    asked = [SYSTEM, {"role": "user", "content": "go"}]
    after = [*asked, {"role": "user", "name": "planner", "content": "plan"}]
    source = database(
        tmp_path / "logs.db",
        [
            ("one", "planner", asked, "plan", 0, 1),
            ("one", "speaker_selection_agent", after, "coder", 0, 3),
            ("two", "planner", asked, "again", 1, 20),
            ("one", "coder", after, "code", 0, 5),
            ("one", "coder", after, None, 0, 7),
            ("one", "coder", None, "x", 0, 9),
        ],
        [("coder", "add", 6), ("planner", "sub", 21)],
    )
    done, (one, two) = made(source)
    assert (done.format, done.bad) == (
        "autogen-sqlite", [f"{source}:6: the request has no messages"],
    )  # fmt: skip
    assert [(t.agent, t.kind, t.text, t.response_id) for t in one.turns] == [
        ("planner", "act", "plan", "r1"),
        ("speaker_selection_agent", "select", "coder", "r3"),
        ("coder", "act", "code", "r5"),
        ("coder", "act", None, None),
    ]
    turn = one.turns[2]
    assert turn.messages == after and turn.depends_on == [one.turns[0].turn_id]
    assert (turn.sampling.temperature, turn.model, turn.latency_s) == (0.5, "m", 1.5)
    assert one.turns[3].error == "no completion: boom"
    assert two.turns[0].cached and two.metadata == {"session_id": "two"}
    assert [(t.agent, t.name, t.arguments, t.result) for t in one.tools] == [
        ("coder", "add", {"a": 1}, "3")
    ]
    assert [t.name for t in two.tools] == ["sub"]
    assert (one.task, one.turns[0].time.isoformat()) == ("go", "2024-05-01T10:00:02.500000+00:00")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["logs", "logs.db"]


def test_a_database_of_something_else(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "x.db") as db:
        db.execute("CREATE TABLE other(x)")
    db.close()
    with pytest.raises(LogError, match="as a database of runtime logging: no such table"):
        import_log(tmp_path / "x.db", tmp_path / "logs")


# --- formats --------------------------------------------------------------------------------------


CHAT = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "é"}]}'


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-8"])
@pytest.mark.parametrize("text", [CHAT + "\n", f"[{CHAT}]"], ids=["lines", "list"])
def test_a_mark_at_the_begin_of_the_file_is_no_matter(
    text: str, encoding: str, tmp_path: Path
) -> None:
    (tmp_path / "chats.json").write_text(text, encoding=encoding)
    assert import_log(tmp_path / "chats.json", tmp_path / "out").episodes == 1


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
@pytest.mark.parametrize("format", [None, "openai"])
def test_another_encoding_is_named_with_the_cure(
    format: str | None, encoding: str, tmp_path: Path
) -> None:
    (tmp_path / "chats.json").write_text(CHAT, encoding=encoding)
    with pytest.raises(LogError, match="written in UTF-16 or UTF-32; save it as UTF-8"):
        import_log(tmp_path / "chats.json", tmp_path / "out", format=format)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("hello", "cannot tell the format"),
        ('{"a": 1}', "cannot tell the format"),
        ("", "cannot tell the format"),
        ('{"schema_version": 1, "episode_id": "e"}', "this is a log already"),
    ],
)
def test_a_format_that_cannot_be_told(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(LogError, match=why):
        import_log(tmp_path / "x", tmp_path / "logs")


def test_names_of_formats(tmp_path: Path) -> None:
    assert detect(FOREIGN / "agentchat-state.json") in FORMATS
    with pytest.raises(ConfigError, match="no format 'csv'; there are: autogen-sqlite"):
        import_log(tmp_path, tmp_path, format="csv")
    with pytest.raises(LogError, match="is a folder; name one file"):
        import_log(tmp_path, tmp_path)
    source = save(tmp_path / "x.jsonl", {"messages": chat("a", "b")})
    with pytest.raises(LogError, match=r"as sharegpt; first: .*no list 'conversations'"):
        import_log(source, tmp_path / "logs", format="sharegpt")
