"""What a reply and a prompt can be made of."""

from __future__ import annotations

import base64
import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from marft_agents.log import LogReader
from marft_agents.recording import MarftRecorder
from marft_agents.schema import Turn
from marft_agents.testing import InMemoryLog, Reply, stream_events
from tests.recording.kit import HELLO, ask
from tests.recording.wire_kit import Answer, Wire, body_of, stream, streamed, whole

CALLS = (("add", {"a": 1, "b": "é"}), ("noop", {}))
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def _turn(answer: Answer, act: Any, **options: Any) -> Turn:
    with Wire(answer).recorded(**options) as (client, log):
        act(client)
    (turn,) = log.turns
    return turn


def _helper(client: openai.OpenAI) -> Any:
    with client.chat.completions.stream(model="planner", messages=HELLO, tools=TOOLS) as events:
        for _ in events:
            pass
        return events.get_final_completion()


def _whole(client: openai.OpenAI) -> Any:
    return ask(client, tools=TOOLS)


def _stream(client: openai.OpenAI) -> Any:
    return list(ask(client, tools=TOOLS, stream=True))


STYLES: dict[str, Any] = {"whole": _whole, "stream": _stream, "helper": _helper}


@pytest.mark.parametrize("style", STYLES)
def test_tool_calls(style: str) -> None:
    reply = Reply(None, tool_calls=CALLS)
    turn = _turn(whole(reply) if style == "whole" else streamed(reply), STYLES[style])
    assert turn.tool_calls == body_of(reply)["choices"][0]["message"]["tool_calls"]
    assert (turn.text, turn.finish_reason) == (None, "tool_calls")
    assert turn.trainable and turn.token_ids == body_of(reply)["choices"][0]["token_ids"]


def test_answers_to_tool_calls_are_linked_by_id_in_any_order() -> None:
    reply = whole(Reply(None, tool_calls=CALLS))
    with Wire(reply, whole("done")).recorded() as (client, log):
        said = ask(client).choices[0].message
        results: Any = [
            {"role": "tool", "tool_call_id": call.id, "content": "3"}
            for call in reversed(said.tool_calls)
        ]
        ask(client, messages=[*HELLO, said, *results])
    first, second = log.turns
    assert second.depends_on == [first.turn_id]
    assert [m.get("tool_call_id") for m in second.messages[2:]] == ["call-1-1", "call-1-0"]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_in_one_piece(name: str) -> None:
    turn = _turn(whole("So: 3.", **{name: "1 + 2"}), ask)
    assert (turn.reasoning, turn.text, turn.trainable) == ("1 + 2", "So: 3.", True)


def test_reasoning_in_pieces() -> None:
    reply = Reply("So: 3.", reasoning="one and two")
    turn = _turn(streamed(reply), STYLES["stream"])
    assert (turn.reasoning, turn.text, turn.trainable) == ("one and two", "So: 3.", True)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": None, "refusal": "I can't."}, "I can't."),
        ({"content": "", "refusal": None}, ""),
        ({"content": None, "audio": {"id": "a", "data": "AAAA", "transcript": "Hi"}}, "Hi"),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
    ],
)
def test_words_that_are_no_plain_content(message: Any, text: str) -> None:
    def act(client: openai.OpenAI) -> Any:
        return client.chat.completions.with_raw_response.create(model="planner", messages=HELLO)

    assert _turn(whole("x", **message), act).text == text


def test_legacy_functions() -> None:
    function = {"name": "add", "arguments": "{}"}

    def act(client: openai.OpenAI) -> Any:
        return ask(client, functions=[{"name": "add"}], function_call={"name": "add"})

    turn = _turn(whole("x", content=None, function_call=function), act)
    assert turn.tool_calls == [{"id": "", "type": "function", "function": function}]
    assert turn.sampling.grammar


@pytest.mark.parametrize("streaming", [False, True])
def test_choices_are_told_apart(streaming: bool) -> None:
    body = body_of(Reply(texts=("first", "second words", "3")))
    body["choices"].reverse()
    answer = Answer((json.dumps(body).encode(),))
    if streaming:
        first, second, third = streamed_choices(("first", "second words", "3"))
        mixed = [event for trio in zip(first, second, third, strict=False) for event in trio]
        mixed += [*second[len(third) :]]
        answer = Answer((stream(mixed),), kind="text/event-stream")
    with Wire(answer).recorded() as (client, log):
        reply = ask(client, n=3, stream=streaming)
        assert list(reply) if streaming else reply
    turns = sorted(log.turns, key=lambda t: t.choice_index)
    assert [t.text for t in turns] == ["first", "second words", "3"]
    assert [t.choice_index for t in turns] == [0, 1, 2]
    assert len({t.response_id for t in turns}) == 1 and len({t.turn_id for t in turns}) == 3
    assert all(t.trainable for t in turns)


def streamed_choices(texts: tuple[str, ...]) -> list[list[Any]]:
    """The events of each choice; the first one's bring the prompt."""
    events = list(stream_events(body_of(Reply(texts=texts)), usage=False))
    return [[e for e in events if e["choices"][0]["index"] == i] for i in range(len(texts))]


def test_a_prompt_of_every_kind_of_part_is_kept_without_its_data() -> None:
    data = base64.b64encode(bytes(range(256)) * 8).decode()
    parts: Any = [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "image_url", "image_url": {"url": "https://x.test/a.png", "detail": "low"}},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{data}"}},
        {"type": "of the future", "deep": [{"deeper": data}]},
    ]
    messages: Any = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": parts},
    ]
    wire, log = Wire(whole("A cat.")), InMemoryLog()
    with MarftRecorder(log=log) as recorder:
        recorder.attach_client(client := wire.sdk(), "planner")
        with recorder.episode():
            ask(client, messages=messages)
    (turn,) = log.turns
    assert json.loads(wire.requests[0].content)["messages"] == messages
    text = turn.model_dump_json()
    assert data not in text and text.count('"bytes":2048') == 4
    stored = turn.messages[1]["content"]
    assert stored[0] == parts[0] and stored[2] == parts[2]
    assert turn.messages[0] == messages[0]
    assert turn.untrainable_reason == "its prompt holds an image, audio or a file"


class Plan(BaseModel):
    steps: list[str]


def test_structured_output_of_every_kind_is_marked() -> None:
    content = '{"steps": ["a"]}'
    asks: list[Any] = [
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"structured_outputs": {"json": {}}}},
        {"tools": TOOLS, "tool_choice": "required"},
    ]
    with Wire(*[whole(content)] * 4).recorded() as (client, log):
        parse = client.chat.completions.parse
        parse(model="planner", messages=HELLO, response_format=Plan)
        for options in asks:
            ask(client, **options)
    assert log.turns[0].untrainable_reason == "sampled under a grammar"
    assert all(t.sampling.grammar for t in log.turns)
    assert all(t.text == content and t.token_ids for t in log.turns)


def test_what_the_app_changes_after_the_call_is_not_what_was_sent() -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "before"}]}]
    with Wire(whole("a")).recorded() as (client, log):
        ask(client, messages=messages)
        messages[0]["content"][0]["text"] = "after"
        messages.append({"role": "assistant", "content": "a"})
    assert log.turns[0].messages == [
        {"role": "user", "content": [{"type": "text", "text": "before"}]}
    ]


def test_another_reply_under_the_same_id_is_kept_and_the_same_one_is_cached(tmp_path: Any) -> None:
    """A client that sends one X-Request-Id for all its calls; a proxy that caches."""
    wire = Wire(whole("one"), whole("two"), whole("one"))
    with MarftRecorder(tmp_path) as recorder:
        recorder.attach_client(client := wire.sdk(), "writer")
        with recorder.episode():
            for _ in range(3):
                ask(client)
    (folded,) = LogReader(tmp_path).episodes()
    assert [(t.text, t.untrainable_reason) for t in folded.turns] == [
        ("one", None),
        ("two", None),
        ("one", "answered from a cache"),
    ]


def test_a_human_edit_reaches_the_next_prompt_and_keeps_the_turn_out_of_training(
    tmp_path: Any,
) -> None:
    """Case 32."""
    wire = Wire(whole("The sky is green."), whole("Fine."), whole("again"))
    with MarftRecorder(tmp_path) as recorder:
        recorder.attach_client(client := wire.sdk(), "writer")
        with recorder.episode(id="e") as episode:
            ask(client)
            (turn_id,) = episode.turns("writer")
            episode.edit(turn_id, "The sky is grey.")
            episode.edit(turn_id, "The sky is blue today.", editor="Ada")
            said = {"role": "assistant", "content": "The sky is blue today."}
            ask(client, messages=[*HELLO, said, {"role": "user", "content": "And?"}])
            ask(
                client,
                messages=[{"role": "user", "content": "It said: The sky is blue today. OK?"}],
            )
    (folded,) = LogReader(tmp_path).episodes()
    first, second, third = folded.turns
    assert (first.text, first.edited_text) == ("The sky is green.", "The sky is blue today.")
    assert first.token_ids == [*b"The sky is green.", 256]
    assert first.untrainable_reason == "edited by a human"
    assert second.depends_on == third.depends_on == [turn_id]
    assert second.trainable and second.messages[1]["content"] == "The sky is blue today."


def test_an_edit_of_an_ended_episode_comes_through_the_recorder(tmp_path: Any) -> None:
    with MarftRecorder(tmp_path) as recorder:
        recorder.attach_client(client := Wire(whole("no")).sdk(), "writer")
        with recorder.episode(id="e") as episode:
            ask(client)
    with MarftRecorder(tmp_path) as later:
        later.edit("e", episode.turns()[0], "yes", editor="review")
    (folded,) = LogReader(tmp_path).episodes()
    assert folded.turns[0].edited_text == "yes" and not folded.turns[0].trainable
