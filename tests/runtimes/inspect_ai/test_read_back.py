"""Inspect AI reads what ``logs export --to inspect`` writes."""

from __future__ import annotations

from pathlib import Path

from inspect_ai.event import ModelEvent, ToolEvent
from inspect_ai.log import read_eval_log, read_eval_log_sample

from marft_agents.log import LogReader
from marft_agents.log.encode import encode_line
from marft_agents.log.exporting import export_log
from tests.log.test_exporting import EVENTS


def test_inspect_reads_samples_scores_calls_and_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"".join(map(encode_line, EVENTS)))
    export_log(LogReader(tmp_path / "a.jsonl"), "inspect", tmp_path / "eval.json")
    log = read_eval_log(str(tmp_path / "eval.json"))
    assert log.status == "success" and log.samples is not None
    first, second = log.samples
    assert (first.id, second.id) == ("e", "bare")
    assert first.scores is not None and first.scores["reward"].value == 1.0
    calls = [event for event in first.events if isinstance(event, ModelEvent)]
    assert [call.role for call in calls] == ["planner", "coder", "planner"]
    assert calls[0].output.choices[0].message.tool_calls is not None
    assert calls[0].output.choices[0].message.tool_calls[0].arguments == {"a": 1}
    logprobs = calls[1].output.choices[0].logprobs
    assert logprobs is not None
    assert [(p.token, p.logprob) for p in logprobs.content] == [("4", -0.5), ("5", -9999.0)]
    assert calls[1].metadata is not None
    assert calls[1].metadata["marft"]["prompt_token_ids"] == [1, 2, 3]
    assert [m.role for m in calls[1].input] == ["system", "user", "assistant", "tool"]
    assert calls[2].error == "server 500"
    (tool,) = [event for event in first.events if isinstance(event, ToolEvent)]
    assert (tool.function, tool.result) == ("add", "3")


def test_inspect_reads_the_header_and_one_sample(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"".join(map(encode_line, EVENTS)))
    export_log(LogReader(tmp_path / "a.jsonl"), "inspect", tmp_path / "eval.json")
    header = read_eval_log(str(tmp_path / "eval.json"), header_only=True)
    assert header.samples is None and header.eval.task == "marft_agents"
    sample = read_eval_log_sample(str(tmp_path / "eval.json"), id="bare", epoch=1)
    assert (sample.id, len(sample.events)) == ("bare", 3)
