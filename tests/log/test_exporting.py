"""What other tools read of a log is what is in it; the output appears whole or not at all."""

from __future__ import annotations

import importlib
import json
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from marft_agents.errors import ConfigError, LogError, MissingExtraError
from marft_agents.log import LogReader
from marft_agents.log.encode import encode_line
from marft_agents.log.exporting import FORMATS, Format, export_log
from marft_agents.log.exporting.rows import COLUMNS, turn_rows
from marft_agents.schema import (
    AnyEvent,
    EpisodeEnded,
    EpisodeStarted,
    RewardEvent,
    Sampling,
    ToolEvent,
)
from tests.log.events import at, turn

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
MESSAGES = [
    {"role": "system", "content": "You plan."},
    {"role": "user", "content": [{"type": "text", "text": "1+2?"}], "name": "ann"},
]
EVENTS: list[AnyEvent] = [
    EpisodeStarted(episode_id="e", time=at(0), task={"q": "1+2"}, metadata={"split": "train"}),
    turn(0, messages=MESSAGES, text=None, tool_calls=[CALL], finish_reason="tool_calls"),
    ToolEvent(
        episode_id="e", time=at(0.5), agent="planner", name="add", call_id="c1", arguments={"a": 1},
        result="3",
    ),
    turn(
        1, agent="coder", model="coder", depends_on=["t0"], finish_reason="length", latency_s=0.25,
        sampling=Sampling(temperature=0.5, top_k=3, stop=["\n"]), logprobs=[-0.5, float("-inf")],
        messages=[*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                  {"role": "tool", "tool_call_id": "c1", "content": "3"}],
        reasoning="add them",
    ),
    turn(2, error="server 500", text=None, token_ids=None, logprobs=None, parent_turn="t1"),
    RewardEvent(episode_id="e", time=at(5), value=1.0, source="judge"),
    RewardEvent(episode_id="e", time=at(5), value=0.25, agent="coder"),
    RewardEvent(episode_id="e", time=at(5), value=0.5, turn_id="t0"),
    EpisodeEnded(episode_id="e", time=at(9), reason="truncated"),
    turn(0, episode="bare"),
]  # fmt: skip


@pytest.fixture
def reader(tmp_path: Path) -> LogReader:
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b"".join(map(encode_line, EVENTS)) + b"torn\n")
    return LogReader(folder)


def test_rows_hold_every_column_and_what_came_of_each_turn(reader: LogReader) -> None:
    rows = list(turn_rows(reader.episodes()))
    assert all(list(row) == list(COLUMNS) for row in rows)
    assert [row["return"] for row in rows] == [1.5, 1.25, 1.0, None]
    assert [row["team_reward"] for row in rows] == [1.0, 1.0, 1.0, None]
    assert [row["agent_reward"] for row in rows] == [None, 0.25, None, None]
    assert [row["turn_reward"] for row in rows] == [0.5, None, None, None]
    assert [row["left_out"] for row in rows[:1]] == [None] and rows[0]["trainable"]
    assert rows[2]["left_out"] == "the call failed"
    assert rows[3]["left_out"] == "no reward"
    assert rows[0]["task"] == '{"q": "1+2"}'
    assert json.loads(rows[0]["messages"][1]["content"]) == MESSAGES[1]["content"]
    assert json.loads(rows[1]["messages"][2]["tool_calls"]) == [CALL]


def test_parquet_and_hf_read_back_as_the_rows(reader: LogReader, tmp_path: Path) -> None:
    import datasets
    import pyarrow.parquet

    rows = list(turn_rows(reader.episodes()))
    done = export_log(reader, "parquet", tmp_path / "turns.parquet")
    assert (done.count, done.episodes, done.what, done.skipped) == (4, 2, "turns", 1)
    assert pyarrow.parquet.read_table(tmp_path / "turns.parquet").to_pylist() == rows
    assert export_log(reader, "hf", tmp_path / "hf").count == 4
    loaded = datasets.load_from_disk(str(tmp_path / "hf"))
    assert list(loaded) == rows
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "logs", "turns.parquet"]


def test_tool_arguments_get_no_keys_of_other_calls(tmp_path: Path) -> None:
    """Columns of nested fields would give every call the keys of all, as null."""
    import datasets

    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate([("add", {"a": 1}), ("find", {"text": "x"})])
    ]
    said = [{"role": "assistant", "content": None, "tool_calls": [call]} for call in calls]
    folder = tmp_path / "logs"
    folder.mkdir()
    events = [turn(n, messages=said, tool_calls=[call]) for n, call in enumerate(calls)]
    (folder / "a.jsonl").write_bytes(b"".join(map(encode_line, events)))
    export_log(LogReader(folder), "hf", tmp_path / "hf")
    rows: list[Any] = list(datasets.load_from_disk(str(tmp_path / "hf")))
    assert [json.loads(row["tool_calls"]) for row in rows] == [[call] for call in calls]
    for row in rows:
        assert [json.loads(m["tool_calls"]) for m in row["messages"]] == [[call] for call in calls]


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    def plain(value: dict[str, Any]) -> Any:
        ((kind, held),) = value.items()
        if kind == "arrayValue":
            return [plain(item) for item in held["values"]]
        return int(held) if kind == "intValue" else held

    return {item["key"]: plain(item["value"]) for item in span["attributes"]}


def test_spans_hold_the_calls_their_tokens_and_links(reader: LogReader, tmp_path: Path) -> None:
    done = export_log(reader, "otel", tmp_path / "spans.jsonl")
    lines = (tmp_path / "spans.jsonl").read_text().splitlines()
    assert (len(lines), done.count) == (2, 7)
    (scope,) = json.loads(lines[0])["resourceSpans"][0]["scopeSpans"]
    flow, first, second, failed, tool = scope["spans"]
    assert [s["name"] for s in scope["spans"]] == [
        "invoke_workflow", "chat", "chat coder", "chat", "execute_tool add",
    ]  # fmt: skip
    assert {s["traceId"] for s in scope["spans"]} == {flow["traceId"]}
    assert first["parentSpanId"] == flow["spanId"] == tool["parentSpanId"]
    assert failed["parentSpanId"] == second["spanId"]
    assert second["links"] == [{"traceId": flow["traceId"], "spanId": first["spanId"]}]
    assert int(second["endTimeUnixNano"]) - int(second["startTimeUnixNano"]) == 250_000_000
    seen = attributes(second)
    assert (seen["prompt_token_ids"], seen["response_token_ids"]) == ([1, 2, 3], [4, 5])
    assert seen["marft.logprobs"] == [-0.5, "-Infinity"]
    assert seen["gen_ai.conversation.id"] == "e" and seen["gen_ai.agent.name"] == "coder"
    assert seen["gen_ai.usage.input_tokens"] == 3
    assert seen["gen_ai.request.top_k"] == 3.0 and seen["gen_ai.request.stop_sequences"] == ["\n"]
    sent = json.loads(seen["gen_ai.input.messages"])
    assert [m["parts"][0]["type"] for m in sent] == [
        "text", "text", "tool_call", "tool_call_response",
    ]  # fmt: skip
    (said,) = json.loads(seen["gen_ai.output.messages"])
    assert [p["type"] for p in said["parts"]] == ["reasoning", "text"]
    assert said["finish_reason"] == "length"
    assert failed["status"] == {"code": 2, "message": "server 500"}
    assert attributes(tool)["gen_ai.tool.call.arguments"] == '{"a": 1}'
    scores = [attributes(event) for event in flow["events"]]
    assert [s["gen_ai.evaluation.score.value"] for s in scores] == [1.0, 0.25, 0.5]
    assert scores[0]["gen_ai.evaluation.name"] == "judge"
    assert [attributes(event)["marft.turn.id"] for event in first["events"]] == ["t0"]


def test_spans_are_what_the_protocol_takes(reader: LogReader, tmp_path: Path) -> None:
    name = "opentelemetry.proto.collector.trace.v1.trace_service_pb2"
    # vLLM brings it; where every change is tested it must be there.
    trace: Any = (
        importlib.import_module(name) if os.environ.get("CI") else pytest.importorskip(name)
    )
    from google.protobuf import json_format  # pyright: ignore[reportMissingModuleSource]

    export_log(reader, "otel", tmp_path / "spans.jsonl")
    for line in (tmp_path / "spans.jsonl").read_text().splitlines():
        request = json_format.Parse(line, trace.ExportTraceServiceRequest())
        assert request.resource_spans[0].scope_spans[0].spans[0].kind == 1


def test_sharegpt_is_the_chat_that_each_call_ends(reader: LogReader, tmp_path: Path) -> None:
    done = export_log(reader, "sharegpt", tmp_path / "chats.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    assert done.count == len(rows) == 3
    assert [p["from"] for p in rows[1]["conversations"]] == [
        "system", "human", "function_call", "observation", "gpt",
    ]  # fmt: skip
    assert rows[0]["conversations"][-1] == {
        "from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}',
    }  # fmt: skip
    assert (rows[1]["agent"], rows[1]["reward"]) == ("coder", 1.25)
    assert rows[1]["conversations"][-1]["value"] == "reply 1"


def test_the_document_for_inspect(reader: LogReader, tmp_path: Path) -> None:
    """That Inspect AI reads it is tested where that is installed."""
    export_log(reader, "inspect", tmp_path / "eval.json")
    document = json.loads((tmp_path / "eval.json").read_text(), parse_constant=pytest.fail)
    first, second = document["samples"]
    assert (first["id"], first["scores"]["reward"]) == ("e", {"value": 1.0})
    assert [e["event"] for e in first["events"]] == [
        "span_begin", "model", "span_end", "tool", "span_begin", "model", "span_end",
        "span_begin", "model", "span_end",
    ]  # fmt: skip
    model = first["events"][5]
    assert (model["role"], model["metadata"]["marft"]["depends_on"]) == ("coder", ["t0"])
    assert model["metadata"]["marft"]["token_ids"] == [4, 5]
    choice = model["output"]["choices"][0]
    assert choice["stop_reason"] == "max_tokens"
    assert choice["logprobs"]["content"][1] == {"token": "5", "logprob": -9999.0}
    assert second["scores"] == {}


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_nothing_is_replaced_unless_asked_to(
    reader: LogReader, tmp_path: Path, format: str
) -> None:
    output = tmp_path / "out"
    if FORMATS[format].folder:
        output.mkdir()
        (output / "old.arrow").write_text("old")
    else:
        output.write_text("old")
    with pytest.raises(LogError, match=r"out exists; .* --force"):
        export_log(reader, format, output)
    assert (output / "old.arrow" if output.is_dir() else output).read_text() == "old"
    export_log(reader, format, output, force=True)
    assert not (output / "old.arrow").exists()
    with pytest.raises(LogError, match="holds the log itself"):
        export_log(reader, format, tmp_path / "logs", force=True)


@pytest.mark.parametrize("format", sorted(FORMATS))
@pytest.mark.parametrize("inside", ["thesis.txt", "photos/1.json"])
def test_a_folder_that_is_no_export_is_never_replaced(
    reader: LogReader, tmp_path: Path, format: str, inside: str
) -> None:
    precious = tmp_path / "home" / inside
    precious.parent.mkdir(parents=True)
    precious.write_text("mine")
    with pytest.raises(LogError, match=r"home (is a folder|holds other things)"):
        export_log(reader, format, tmp_path / "home", force=True)
    assert precious.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "logs"]


@pytest.mark.parametrize("folder", [True, False])
def test_a_failure_leaves_what_was_there(
    reader: LogReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: bool
) -> None:
    def broken(episodes: Iterator[Any], target: Path | BinaryIO) -> int:
        next(iter(episodes))
        if isinstance(target, Path):
            (target / "half").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(FORMATS, "broken", Format(broken, "", "", folder=folder))  # pyright: ignore[reportArgumentType]
    output = tmp_path / "out"
    output.mkdir() if folder else output.write_text("old")
    with pytest.raises(OSError, match="No space"):
        export_log(reader, "broken", output, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "out"]
    assert folder or output.read_text() == "old"


def test_a_full_disk_is_named_by_the_disk(
    reader: LogReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(episodes: Any) -> Iterator[Any]:
        raise OSError(28, "No space left on device")
        yield

    monkeypatch.setattr("marft_agents.log.exporting.tables.turn_rows", full)
    for format in ("hf", "parquet"):
        with pytest.raises(OSError, match="No space left") as caught:
            export_log(reader, format, tmp_path / "out")
        assert type(caught.value) is OSError
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_mistakes(reader: LogReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no format 'csv'; there are: hf, parquet"):
        export_log(reader, "csv", tmp_path / "x")
    for format, package in (("hf", "datasets"), ("parquet", "pyarrow.parquet")):
        monkeypatch.setitem(__import__("sys").modules, package, None)
        with pytest.raises(MissingExtraError, match=r"pip install 'marft-agents\[train\]'"):
            export_log(reader, format, tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


@pytest.mark.parametrize("format", ["otel", "inspect", "sharegpt"])
def test_memory_does_not_grow_with_the_log(tmp_path: Path, format: str) -> None:
    with (tmp_path / "a.jsonl").open("wb") as file:
        for number in range(1500):
            file.write(encode_line(turn(0, episode=f"e{number}", text="x" * 4000)))
    tracemalloc.start()
    try:
        export_log(LogReader(tmp_path / "a.jsonl"), format, tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "out").stat().st_size > 6_000_000
    assert peak < 5 * 2**20
