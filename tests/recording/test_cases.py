"""Real failures of real users, replayed against the recorder."""

from __future__ import annotations

import base64
import copy
import json
import logging
from pathlib import Path
from typing import Any

import openai
import pytest

from marft_agents.log import LogReader
from marft_agents.recording import MarftRecorder
from marft_agents.recording.outgoing import TOKEN_FIELDS
from marft_agents.testing import Reply, ScriptedServer, completion_body
from tests.recording.kit import TRANSPORT_ERRORS, ask, case, case_lines, recording, sdk


def _answered(text: str, ids: list[int], **fields: Any) -> Reply:
    """A reply of exactly these ids."""
    return Reply(text, token_ids=ids, logprobs=[-0.5] * len(ids), **fields)


def test_case_02_speaker_names_stay_in_the_messages() -> None:
    data = case("02-speaker-name.json")
    prompt = data["prompt_token_ids_with_name"]
    with recording([Reply("Wait.", prompt_token_ids=prompt)]) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "critic")
        with recorder.episode():
            ask(client, messages=data["messages"])
    assert server.requests[0].body["messages"] == data["messages"]
    assert log.turns[0].messages == data["messages"]
    assert [m.get("name") for m in log.turns[0].messages] == [None, "planner", "tester"]
    assert log.turns[0].prompt_token_ids == data["prompt_token_ids_without_name"]


def test_case_03_null_content_is_logged_as_sent() -> None:
    data = case("03-none-content.json")
    messages = data["messages"] + data["also"]
    with recording(["ok"]) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode():
            ask(client, messages=messages)
    assert log.turns[0].messages == messages
    assert log.turns[0].messages[1]["content"] is None
    assert "content" not in log.turns[0].messages[4]


def _unasked(chunk: dict[str, Any]) -> dict[str, Any]:
    """A chunk as vLLM sends it to an app that asked for no token fields."""
    hidden = ("token_ids", "logprobs", "prompt_token_ids")
    choices = [{k: None if k in hidden else v for k, v in c.items()} for c in chunk["choices"]]
    prompt = {"prompt_token_ids": None} if "prompt_token_ids" in chunk else {}
    return chunk | {"choices": choices} | prompt


def test_case_05_a_stream_gives_all_ids_and_the_app_its_chunks() -> None:
    chunks, want = case_lines("05-stream-chunks.jsonl"), case("05-want.json")
    with recording([Reply(chunks=chunks)]) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode():
            seen = [c.model_dump(exclude_unset=True) for c in ask(client, stream=True)]
    assert seen == [_unasked(chunk) for chunk in chunks]
    turn = log.turns[0]
    assert (turn.text, turn.token_ids, turn.logprobs, turn.finish_reason) == (
        want["text"],
        want["token_ids"],
        want["logprobs"],
        want["finish_reason"],
    )
    assert turn.prompt_token_ids == chunks[0]["prompt_token_ids"]
    assert turn.complete and turn.trainable


@pytest.mark.parametrize("ending", ["chunks left out", "connection broken"])
def test_case_05_a_cut_stream_keeps_its_ids_and_invents_no_end(ending: str) -> None:
    chunks = case_lines("05-stream-chunks.jsonl")
    reply = Reply(chunks=chunks[:-2]) if "left out" in ending else Reply(chunks=chunks, cut_after=4)
    with recording([reply]) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode():
            try:
                for _ in ask(client, stream=True):
                    pass
            except (openai.APIConnectionError, *TRANSPORT_ERRORS):
                assert ending == "connection broken"
    turn = log.turns[0]
    assert (turn.text, turn.token_ids) == ("Hello there!", [19556, 665, 17])
    assert turn.finish_reason is None
    assert not turn.complete and not turn.trainable
    assert (turn.error is not None) == (ending == "connection broken")


@pytest.mark.parametrize("stream", [True, False])
def test_a_reply_whose_ids_do_not_add_up_cannot_be_trained_on(stream: bool) -> None:
    if stream:
        reply = Reply(chunks=case_lines("05-stream-chunks.jsonl"))
        usage = reply.chunks[-1]["usage"] if reply.chunks else {}
    else:
        reply = Reply(body=completion_body(Reply("ok"), TOKEN_FIELDS, 1))
        usage = reply.body["usage"] if reply.body else {}
    usage["completion_tokens"] += 1
    with recording([reply]) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode():
            answer = ask(client, stream=stream)
            if stream:
                list(answer)
    assert log.turns[0].untrainable_reason == ("not all of its tokens arrived")


def test_case_06_ids_come_without_any_engine_option_in_the_app() -> None:
    with recording(["ok"]) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode():
            ask(client)
    assert server.requests[0].body | {"return_token_ids": True, "logprobs": True} == (
        server.requests[0].body
    )
    assert log.turns[0].trainable


def test_case_06_a_reply_without_ids_is_said_once_and_is_untrainable(
    caplog: pytest.LogCaptureFixture,
) -> None:
    body = case("06-client-config.json")["response_without_ids"]
    script = [Reply(body=body), Reply(body=body | {"id": "chatcmpl-another"})]
    with recording(script) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode(), caplog.at_level(logging.WARNING):
            ask(client)
            ask(client)
    (record,) = caplog.records
    for word in ("'planner'", server.url, "token ids", "marft-agents serve"):
        assert word in record.getMessage()
    assert [t.untrainable_reason for t in log.turns] == ["no prompt token ids"] * 2


def test_case_08_recording_makes_no_refusal_and_hides_none() -> None:
    """Case 08: odd role orders go out as they are, and a real 400 reaches the app."""
    data = case("08-role-order.json")
    orders = [data[k] for k in ("late_system", "two_system", "same_role", "assistant_first")]
    refusal = Reply(status=400, error="roles must alternate")
    with recording([answer for _ in orders for answer in ("fine", refusal)]) as parts:
        server, recorder, log = parts
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode():
            for messages in orders:
                assert ask(client, messages=messages).choices[0].message.content == "fine"
                with pytest.raises(openai.BadRequestError, match="roles must alternate"):
                    ask(client, messages=messages)
    twice = [messages for messages in orders for _ in range(2)]
    assert [request.body["messages"] for request in server.requests] == twice
    assert [turn.messages for turn in log.turns] == twice
    wanted = [None, "HTTP 400: roles must alternate"] * len(orders)
    assert [turn.error for turn in log.turns] == wanted


def test_case_01_the_log_keeps_arguments_as_they_were_on_the_wire() -> None:
    data = case("01-tool-args.json")
    variants = [variant["arguments"] for variant in data["variants"]]
    with recording(["ok"] * len(variants)) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode():
            for arguments in variants:
                messages = copy.deepcopy(data["messages"])
                messages[1]["tool_calls"][0]["function"]["arguments"] = arguments
                ask(client, messages=messages)
    logged = [turn.messages[1]["tool_calls"][0]["function"]["arguments"] for turn in log.turns]
    assert logged == variants
    assert all(turn.trainable for turn in log.turns)


def test_case_13_a_refused_prompt_is_a_failed_turn_and_the_apps_own_error() -> None:
    data = case("13-context.json")
    too_long = Reply(status=400, error="maximum context length is 512 tokens")
    with recording(["fine", too_long]) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode() as episode:
            ask(client)
            with pytest.raises(openai.BadRequestError, match="maximum context length"):
                ask(client, messages=data["messages"])
            episode.reward(0.0)
    good, bad = log.turns
    assert good.trainable
    assert bad.token_ids is None and bad.error == "HTTP 400: maximum context length is 512 tokens"
    assert bad.messages == data["messages"]


def test_case_14_sampled_ids_are_kept_where_the_text_says_otherwise() -> None:
    data = case("14-drift.json")
    stopped = data["stop_string"]
    drifted = [(data["text"], data["sampled_ids"])]
    drifted += [(more["text"], more["sampled"]) for more in data["more"]]
    script = [_answered(text, ids, finish_reason="stop") for text, ids in drifted]
    script.append(_answered(stopped["content"], stopped["token_ids"], finish_reason="stop"))
    with recording(script) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode():
            for _ in drifted:
                ask(client)
            ask(client, **stopped["request"])
    *turns, last = log.turns
    assert [(t.text, t.token_ids) for t in turns] == drifted
    assert (last.text, last.token_ids) == (stopped["content"], stopped["token_ids"])
    assert last.sampling.stop == stopped["request"]["stop"]
    assert all(t.trainable for t in log.turns)


def test_case_14_ids_and_logprobs_of_different_length_stay_visible() -> None:
    with recording([Reply("ab", token_ids=[1, 2, 3], logprobs=[-0.1])]) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode():
            ask(client)
    assert (log.turns[0].token_ids, log.turns[0].logprobs) == ([1, 2, 3], [-0.1])
    assert log.turns[0].untrainable_reason == "token ids and log-probabilities differ in length"


def test_case_33_emoji_and_cut_characters_survive_the_log(tmp_path: Path) -> None:
    data = case("33-emoji.json")
    cut = data["cut_after_first"]
    script = [
        _answered(data["text"], data["token_ids"], finish_reason="stop"),
        _answered(cut["content"], cut["token_ids"], finish_reason="length"),
        *[_answered(text, ids, finish_reason="stop") for text, ids in data["more"].items()],
    ]
    with ScriptedServer(script) as server, MarftRecorder(tmp_path) as recorder:
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode():
            for _ in script:
                ask(client)
    (episode,) = LogReader(tmp_path).episodes()
    assert [(t.text, t.token_ids) for t in episode.turns] == [
        (reply.text, reply.token_ids) for reply in script
    ]


def test_case_40_images_are_stored_as_hash_and_size() -> None:
    data = case("40-images.json")
    refused = Reply(status=data["image_status_on_text_model"], error="not a multimodal model")
    with recording([refused, "ab", "a document"]) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode():
            with pytest.raises(openai.BadRequestError):
                ask(client, messages=data["image"])
            ask(client, messages=data["text_parts"])
            ask(client, messages=data["unknown_part"])
    image, parts, unknown = log.turns
    assert server.requests[0].body["messages"] == data["image"]
    stored = image.messages[0]["content"][1]["image_url"]["url"]
    assert stored["bytes"] == len(base64.b64decode("iVBORw0KGgo="))
    assert "iVBORw0KGgo" not in json.dumps(image.messages)
    assert image.error is not None and not image.trainable
    assert parts.messages == data["text_parts"]
    assert unknown.messages == data["unknown_part"]
