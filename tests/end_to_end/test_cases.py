"""Real failures of real users, from the wire through the log on disk to the rows that are trained.

Each test asserts the whole of what is right in one case; the rooms test their own part of it, too.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from click.testing import CliRunner

from marft_agents.cli.inspect import command
from marft_agents.errors import NothingToLearn
from marft_agents.log import LogReader
from marft_agents.recording import MarftRecorder
from marft_agents.schema import Episode
from marft_agents.testing import Reply, ScriptedServer
from marft_agents.training.dataset import TrainingSet, read_training_set
from marft_agents.training.packing import pack_turns
from marft_agents.training.signal import require_signal
from tests.recording.kit import ask, case, case_lines, sdk


@dataclass
class Journey:
    """What one episode became: requests at the server, the log, and the rows."""

    requests: list[dict[str, Any]]
    logs: Path
    episode: Episode
    data: TrainingSet

    @property
    def raw(self) -> str:
        """Every byte of the log."""
        return "".join(path.read_text(encoding="utf-8") for path in self.logs.glob("*.jsonl"))

    def inspected(self) -> str:
        """``marft-agents inspect`` of the episode."""
        arguments = [str(self.logs), "--episode", self.episode.episode_id]
        shown = CliRunner().invoke(command, arguments)
        assert shown.exit_code == 0, shown.output
        return shown.output


def journey(logs: Path, script: list[Reply | str], *requests: dict[str, Any]) -> Journey:
    """Record one scored episode of these requests and read it back for training."""
    with ScriptedServer(script) as server, MarftRecorder(logs) as recorder:
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode(task="t") as episode:
            for request in requests:
                reply = ask(client, **request)
                if request.get("stream"):
                    list(reply)
            episode.reward(1.0)
        seen = [request.body for request in server.requests]
    (read,) = LogReader(logs).episodes()
    return Journey(seen, logs, read, read_training_set([read]))


def test_case_02_speaker_names_are_logged_and_training_reads_the_servers_ids(
    tmp_path: Path,
) -> None:
    data = case("02-speaker-name.json")
    ids = data["prompt_token_ids_with_name"]
    done = journey(tmp_path, [Reply("Wait.", prompt_token_ids=ids)], {"messages": data["messages"]})
    assert done.requests[0]["messages"] == data["messages"], "nothing is put into the text"
    logged = done.episode.turns[0].messages
    assert logged == data["messages"]
    assert [m.get("name") for m in logged] == [None, "planner", "tester"]
    (row,) = done.data.rows
    assert list(row.prompt_ids) == ids == data["prompt_token_ids_without_name"]


def test_case_03_null_content_builds_and_is_never_the_word_none(tmp_path: Path) -> None:
    data = case("03-none-content.json")
    ids = data["server_prompt_token_ids"]
    odd = data["messages"] + data["also"]
    call = Reply(tool_calls=[("f", {"a": 1})], prompt_token_ids=ids)
    done = journey(
        tmp_path,
        [call, Reply("42", prompt_token_ids=ids)],
        {"messages": data["messages"]},
        {"messages": odd},
    )
    assert [request["messages"] for request in done.requests] == [data["messages"], odd]
    first, second = done.episode.turns
    assert first.text is None and first.tool_calls is not None
    assert second.messages == odd
    assert [list(row.prompt_ids) for row in done.data.rows] == [ids, ids]
    said = [line.text for line in done.data.episodes[0].lines]
    assert len(said) == 3 and '"name": "f"' in said[1]
    for text in (done.raw, done.inspected(), *said):
        assert "None" not in text


def _events(order: list[str], chunks: list[bytes]) -> Generator[bytes]:
    for number, chunk in enumerate(chunks):
        order.append(f"server sent {number}")
        yield chunk


def test_case_05_a_recorded_stream_is_not_delayed(tmp_path: Path) -> None:
    """Case 05: the app has each chunk before the server makes the next one."""
    chunks = case_lines("05-stream-chunks.jsonl")
    wire = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks]

    class Body(httpx.SyncByteStream):
        def __init__(self, order: list[str]) -> None:
            self.order = order

        def __iter__(self) -> Generator[bytes]:
            yield from _events(self.order, [*wire, b"data: [DONE]\n\n"])

    def run(recorded: bool) -> list[str]:
        order: list[str] = []

        def handle(request: httpx.Request) -> httpx.Response:
            if request.method == "GET":
                return httpx.Response(200, json={"data": [{"id": "b", "owned_by": "vllm"}]})
            head = {"content-type": "text/event-stream"}
            return httpx.Response(200, headers=head, stream=Body(order))

        http: Any = httpx.Client(transport=httpx.MockTransport(handle))
        client = openai.OpenAI(base_url="http://test/v1", api_key="sk-test", http_client=http)
        with MarftRecorder(tmp_path) as recorder, recorder.episode():
            if recorded:
                recorder.attach_client(client, "planner")
            for number, _ in enumerate(ask(client, stream=True)):
                order.append(f"app got {number}")
        return order

    plain = run(recorded=False)
    assert plain[:4] == ["server sent 0", "app got 0", "server sent 1", "app got 1"]
    assert run(recorded=True) == plain


def test_case_05_usage_and_rows_of_a_whole_and_of_a_cut_stream(tmp_path: Path) -> None:
    chunks, want = case_lines("05-stream-chunks.jsonl"), case("05-want.json")
    begun = [chunk | {"id": "chatcmpl-cut"} for chunk in chunks[:-2]]
    done = journey(tmp_path, [Reply(chunks=chunks), Reply(chunks=begun)], *[{"stream": True}] * 2)
    whole, cut = done.episode.turns
    assert len(whole.token_ids or ()) == want["completion_tokens"] == len(whole.logprobs or ())
    assert cut.token_ids == want["token_ids"][:3] and not cut.complete
    (row,) = done.data.rows
    assert list(row.token_ids) == want["token_ids"]
    assert list(row.logprobs) == want["logprobs"]
    assert done.data.left_out_turns == {("planner", "not all of its tokens arrived"): 1}


@pytest.mark.parametrize("engine_options", [True, False], ids=["with", "without"])
async def test_case_06_ids_come_whatever_the_client_config_says(
    engine_options: bool, tmp_path: Path
) -> None:
    """Case 06: whether AutoGen's config has engine-only options or not."""
    config = case("06-client-config.json")
    component = {"provider": config["provider"], "config": dict(config["config"])}
    if not engine_options:
        del component["config"]["extra_body"], component["config"]["logprobs"]
    with ScriptedServer(["ok"]) as server, MarftRecorder(tmp_path) as recorder:
        component["config"]["base_url"] = server.url
        client = OpenAIChatCompletionClient.load_component(component)
        agent = recorder.wrap(AssistantAgent("planner", client))
        async with recorder.episode() as episode:
            await agent.run(task="hello")
            episode.reward(1.0)
        assert server.requests[0].body["return_token_ids"] is True
        assert server.requests[0].body["logprobs"] is True
        await client.close()
    (row,) = read_training_set(LogReader(tmp_path).episodes()).rows
    assert row.token_ids and row.prompt_ids and len(row.logprobs) == len(row.token_ids)


@pytest.mark.parametrize(
    ("lost", "missing", "reason"),
    [
        ("ids", "token ids", "no prompt token ids"),
        ("logprobs", "log-probabilities", "no log-probabilities"),
    ],
)
def test_case_06_a_reply_without_ids_or_logprobs_is_said_at_once_and_never_trained(
    lost: str, missing: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = case("06-client-config.json")["response_without_ids"]
    if lost == "logprobs":
        body["prompt_token_ids"] = list(range(body["usage"]["prompt_tokens"]))
        body["choices"][0]["token_ids"] = list(range(body["usage"]["completion_tokens"]))
    with (
        ScriptedServer([Reply(body=body), Reply(body=body | {"id": "chatcmpl-07"})]) as server,
        MarftRecorder(tmp_path) as recorder,
        caplog.at_level(logging.WARNING),
    ):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode() as episode:
            ask(client)
            assert recorder.flush()
            assert [missing in record.getMessage() for record in caplog.records] == [True]
            ask(client)
            episode.reward(1.0)
    assert len(caplog.records) == 1
    data = read_training_set(LogReader(tmp_path).episodes())
    assert data.rows == []
    assert data.left_out_turns == {("planner", reason): 2}
    with pytest.raises(NothingToLearn, match=f"2 of planner: {reason}"):
        require_signal(data)


def test_case_10_masks_come_from_lengths_where_pad_is_the_end_token(tmp_path: Path) -> None:
    data = case("10-pad-is-eos.json")
    end, closers = data["eos_token_id"], [1, 9690, 2, 198, 1, 520]
    script: list[Reply | str] = [
        Reply(
            "x",
            token_ids=reply["ids"],
            logprobs=[-0.5] * len(reply["ids"]),
            finish_reason=reply["finish_reason"],
            prompt_token_ids=[*closers, n],
        )
        for n, reply in enumerate(data["completions"])
    ]
    done = journey(tmp_path, script, *[{}] * len(script))
    rows = done.data.rows
    assert [list(row.token_ids) for row in rows] == [r["ids"] for r in data["completions"]]
    assert [list(row.prompt_ids) for row in rows] == [[*closers, n] for n in range(4)]
    packs = pack_turns(rows, 1, share=False)
    trained = {pack.rows[0]: pack.targets[0] for pack in packs}
    masks = [[1] * len(trained[n]) + [0] * (4 - len(trained[n])) for n in range(len(rows))]
    assert masks == data["want_mask_padded_to_4"]
    flat = [token for targets in trained.values() for token in targets]
    assert len(flat) == data["want_trained_tokens"]
    assert flat.count(end) == data["want_end_tokens_trained"]
    assert trained[2][-1] != end, "a length-cut reply gets no end token"
    for pack in packs:
        row = rows[pack.rows[0]]
        assert pack.ids == [*row.prompt_ids, *row.token_ids[:-1]], "closers stay, nothing is padded"
    view = done.data.episodes[0]
    assert view.reward_K == [0, 0, 0, 1]
    assert rows[-1].k == 3 and trained[3][-1] == rows[-1].token_ids[-1] == end


def test_case_13_a_chat_that_outgrew_its_window_is_flagged_and_its_earlier_turns_are_used(
    tmp_path: Path,
) -> None:
    data = case("13-context.json")
    refused = Reply(status=400, error=f"maximum context length is {data['max_model_len']} tokens")
    with ScriptedServer(["fine", refused]) as server, MarftRecorder(tmp_path) as recorder:
        recorder.attach_client(client := sdk(server), "planner")
        with (
            pytest.raises(openai.BadRequestError, match="maximum context length is 512"),
            recorder.episode(task="t") as episode,
        ):
            ask(client)
            ask(client, messages=data["messages"])
        recorder.reward(episode.id, 0.0)
    (read,) = LogReader(tmp_path).episodes()
    assert read.ended is not None and read.ended.reason == "failed"
    assert "maximum context length" in (read.ended.detail or "")
    failed = read.turns[1]
    assert (failed.token_ids, failed.prompt_token_ids, failed.logprobs) == (None, None, None)
    built = read_training_set([read])
    assert [row.turn_id for row in built.rows] == [read.turns[0].turn_id]
    assert built.left_out_turns == {("planner", "the call failed"): 1}
    unscored = read_training_set([read.model_copy(update={"rewards": []})])
    assert unscored.left_out_episodes == {"no reward, the episode failed": 1}


def test_case_14_sampled_ids_are_trained_as_they_are(tmp_path: Path) -> None:
    data = case("14-drift.json")
    stop = data["stop_string"]
    drifted = [(data["text"], data["sampled_ids"], data["reencoded_ids"])]
    drifted += [(more["text"], more["sampled"], more["reencoded"]) for more in data["more"]]
    script: list[Reply | str] = [
        Reply(text, token_ids=ids, logprobs=[-0.7, -0.2]) for text, ids, _ in drifted
    ]
    logprobs = [-0.1] * len(stop["token_ids"])
    script.append(Reply(stop["content"], token_ids=stop["token_ids"], logprobs=logprobs))
    script.append(Reply("short", token_ids=[7, 8, 9], logprobs=[-0.1]))
    done = journey(tmp_path, script, *[{}] * len(drifted), stop["request"], {})
    *rows, longer = done.data.rows
    assert [list(row.token_ids) for row in rows] == [ids for _, ids, _ in drifted]
    assert all(list(row.token_ids) != ids for row, (_, _, ids) in zip(rows, drifted, strict=True))
    assert all(list(row.logprobs) == [-0.7, -0.2] for row in rows)
    assert list(longer.token_ids) == stop["token_ids"], "ids may say more than the text"
    unequal = ("planner", "token ids and log-probabilities differ in length")
    assert done.data.left_out_turns == {unequal: 1}


def test_case_20_a_full_disk_costs_events_and_says_so_and_the_app_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        ScriptedServer(["one", "two", "three"]) as server,
        MarftRecorder(tmp_path) as recorder,
        caplog.at_level(logging.WARNING),
    ):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode(task="t") as episode:
            answers = [ask(client)]
            assert recorder.flush()
            with monkeypatch.context() as patch:
                patch.setattr(os, "write", full)
                answers += [ask(client), ask(client)]
                assert recorder.flush()
            episode.reward(1.0)
        assert recorder.flush()
    assert [a.choices[0].message.content for a in answers] == ["one", "two", "three"]
    (warning,) = caplog.records
    assert "No space left on device" in warning.getMessage()
    reader = LogReader(tmp_path)
    (read,) = reader.episodes()
    assert [turn.text for turn in read.turns] == ["one"] and reader.skipped_count == 0
    assert read.ended is not None and read.ended.dropped_events == 2
    data = read_training_set([read])
    assert data.notes["episode with events that the recorder could not write"] == 1
