"""Logs of text: ids by the chat template, for supervised training alone, and said aloud."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import ConfigError
from marft_agents.schema import Sampling, Turn
from marft_agents.training.dataset import TurnRow, read_training_set
from marft_agents.training.textlogs import (
    NO_OBJECT,
    NO_TOOLS,
    CannotRender,
    TextRenderer,
    renderer,
    text_lines,
)
from tests.tiny_model import CHAT_TEMPLATE
from tests.training.test_dataset import CASES, episode
from tests.training.test_dataset import turn as recorded

USER = [{"role": "user", "content": "ship on friday?"}]
OPEN = "<|im_start|>user\nship on friday?<|im_end|>\n<|im_start|>assistant\n"


class Kit:
    """The tiny tokenizer with a chat template."""

    def __init__(self, model_dir: Path, template: str | None = CHAT_TEMPLATE) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        self.tokenizer.chat_template = template
        self.text = TextRenderer(self.tokenizer)

    def prompt(self, messages: Any, **fields: Any) -> str:
        return self.tokenizer.decode(
            self.text.render(spoken(messages=messages, **fields)).prompt_ids
        )

    def reply(self, **fields: Any) -> str:
        return self.tokenizer.decode(self.text.render(spoken(**fields)).token_ids)


def spoken(**fields: Any) -> Turn:
    """A turn of text."""
    standard: dict[str, Any] = {"messages": USER, "text": "two tests fail."}
    standard |= dict.fromkeys(("prompt_token_ids", "token_ids", "logprobs", "logprob_mode"))
    return recorded(**(standard | fields))


def case(name: str) -> Any:
    return json.loads((CASES / name).read_text(encoding="utf-8"))


@pytest.fixture
def kit(model_dir: Path) -> Kit:
    return Kit(model_dir)


def rows(kit: Kit, *turns: Turn) -> Sequence[TurnRow]:
    return read_training_set([episode(*turns)], text=kit.text).rows


def test_a_turn_of_text_becomes_a_row_that_says_so(kit: Kit) -> None:
    (row,) = rows(kit, spoken(sampling=Sampling(temperature=0.7)))
    assert kit.tokenizer.decode(list(row.prompt_ids)) == OPEN
    assert kit.tokenizer.decode(list(row.token_ids)) == "two tests fail.<|im_end|>"
    assert row.from_text and list(row.logprobs) == [] and row.words == 3
    assert row.incomparable == row.off_policy == "its token ids were made from text"


def test_without_a_renderer_turns_of_text_are_left_out_as_ever() -> None:
    data = read_training_set([episode(spoken(), recorded(1))])
    assert [row.from_text for row in data.rows] == [False]
    assert data.left_out_turns == {("writer", "no prompt token ids"): 1}


def test_recorded_ids_are_never_made_again(kit: Kit) -> None:
    sampled = recorded(messages=USER, text="something else", token_ids=[9, 2])
    assert rows(kit, sampled) == read_training_set([episode(sampled)]).rows
    (reply,) = rows(kit, spoken(prompt_token_ids=[1, 7, 2, 1]))
    assert list(reply.prompt_ids) == [1, 7, 2, 1] and reply.from_text
    (prompt,) = rows(kit, spoken(token_ids=[9, 2], text=None))
    assert list(prompt.token_ids) == [9, 2] and prompt.from_text


def test_ids_without_log_probabilities_are_enough_to_imitate(kit: Kit) -> None:
    (row,) = rows(kit, recorded(logprobs=None, messages=[], text=None))
    assert list(row.token_ids) == [5, 2] and not row.from_text
    assert row.off_policy == "no log-probabilities were recorded"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"cached": True}, "answered from a cache"),
        ({"edited_text": "better"}, "edited by a human"),
        ({"complete": False}, "not all of its tokens arrived"),
        ({"redacted": True}, "redacted: its token ids spelled out what was removed"),
        ({"sampling": Sampling(grammar=True)}, "sampled under a grammar"),
        ({"kind": "select"}, "not an action of the agent (kind select)"),
        ({"error": "400"}, "the call failed"),
        ({"text": None}, "no token ids and no text"),
        ({"text": ""}, "no token ids and no text"),
        ({"messages": []}, "no token ids and no messages"),
    ],
)
def test_whatever_else_speaks_against_a_turn_still_does(
    fields: dict[str, Any], reason: str, kit: Kit
) -> None:
    data = read_training_set([episode(spoken(**fields), recorded(1))], text=kit.text)
    assert [row.turn_id for row in data.rows] == ["t1"]
    assert data.left_out_turns == {("writer", reason): 1}


def test_a_reply_cut_by_the_length_limit_gets_no_end_token(kit: Kit) -> None:
    assert kit.reply(finish_reason="length") == "two tests fail."
    assert kit.reply(finish_reason="stop") == "two tests fail.<|im_end|>"


def test_the_end_token_is_the_one_that_the_template_puts_after_a_reply(model_dir: Path) -> None:
    """Base tokenizers end texts with one token and turns with another."""
    kit = Kit(model_dir)
    kit.tokenizer.eos_token = "<|endoftext|>"
    assert kit.reply() == "two tests fail.<|im_end|>"
    plain = Kit(model_dir, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    plain.tokenizer.eos_token = "<|endoftext|>"
    assert plain.reply() == "two tests fail.<|endoftext|>"
    strict = Kit(model_dir, "{% if messages|length > 1 %}{{ raise_exception('one') }}{% endif %}x")
    assert strict.reply() == "two tests fail.<|im_end|>"


def test_a_reply_whose_first_token_would_merge_with_the_prompt_is_encoded_alone(
    model_dir: Path,
) -> None:
    kit = Kit(model_dir, "the quick bro")
    (row,) = rows(kit, spoken(text="wn fox"))
    said = kit.tokenizer.encode("wn fox", add_special_tokens=False)
    assert list(row.token_ids) == [*said, 2]
    assert list(row.prompt_ids) == kit.tokenizer.encode("the quick bro", add_special_tokens=False)


class Prefixing:
    """A tokenizer of characters that puts a blank before every text, as older ones do."""

    eos_token_id = 0
    all_special_ids = (0,)

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> str:
        return ">"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in f" {text}"]

    def decode(self, token_ids: Any) -> str:
        return "".join(map(chr, token_ids))


def test_a_reply_is_encoded_as_it_follows_its_prompt() -> None:
    rendered = TextRenderer(Prefixing()).render(spoken(text="no"))
    assert rendered.token_ids == [ord("n"), ord("o"), 0]


# -- real failures -------------------------------------------------------------------------------


def test_case_01_arguments_are_decoded_exactly_once(model_dir: Path) -> None:
    """Case 01: one call in seven shapes, and a template that wants an object."""
    data = case("01-tool-args.json")
    strict = Kit(model_dir, data["strict_template"])
    assert strict.prompt(data["messages"]) == data["want_render"]
    shown = Kit(model_dir, "{{ messages[0].tool_calls[0].function.arguments|tojson }}")
    for variant in data["variants"]:
        call = {"id": "c1", "type": "function", "function": {"name": "add"}}
        call["function"] |= {"arguments": variant["arguments"]}  # pyright: ignore[reportOperatorIssue] a mapping
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        turn = spoken(messages=[message])
        kept = isinstance(variant["want"], str)
        want = variant["arguments"] if kept else variant["want"]
        rendered = shown.text.render(turn)
        assert json.loads(shown.tokenizer.decode(rendered.prompt_ids)) == want
        assert (NO_OBJECT in rendered.odd) == kept
        assert turn.messages == [message], "the log keeps the wire form"


def test_case_01_arguments_that_are_no_object_are_flagged_and_do_not_crash(model_dir: Path) -> None:
    data = case("01-tool-args.json")
    for arguments in ("[2, 3]", "{broken", 7):
        messages = json.loads(json.dumps(data["messages"]))
        messages[1]["tool_calls"][0]["function"]["arguments"] = arguments
        turn = spoken(messages=messages)
        lenient = read_training_set([episode(turn)], text=Kit(model_dir).text)
        assert lenient.notes == {NO_OBJECT: 1, NO_TOOLS: 1} and len(lenient.rows) == 1
        strict = Kit(model_dir, data["strict_template"])
        left = read_training_set([episode(turn)], text=strict.text).left_out_turns
        ((_, reason),) = left
        assert reason.startswith("the chat template refuses its messages: Can only get item pairs")


def test_case_02_speaker_names_are_not_added(kit: Kit) -> None:
    messages = case("02-speaker-name.json")["messages"]
    nameless = [{k: v for k, v in m.items() if k != "name"} for m in messages]
    assert kit.prompt(messages) == kit.prompt(nameless)


def test_case_03_null_content_is_empty_text_and_never_the_word_none(model_dir: Path) -> None:
    data = case("03-none-content.json")
    careless = Kit(
        model_dir,
        "{% for m in messages %}{{ m.role + '=' + m.content + ';' }}{% endfor %}",
    )
    assert careless.prompt([*data["messages"], *data["also"]]) == (
        "user=hi;assistant=;tool=42;assistant=;assistant=;user=;"
    )


def test_case_08_a_template_that_refuses_leaves_its_turn_out_with_the_reason(
    model_dir: Path,
) -> None:
    data = case("08-role-order.json")
    kit = Kit(model_dir, data["strict_template"])
    lists = ("late_system", "two_system", "same_role", "assistant_first")
    turns = [spoken(index=n, messages=data[name]) for n, name in enumerate(lists)]
    left = read_training_set([episode(*turns, spoken(index=9))], text=kit.text)
    assert left.left_out_turns == {
        ("writer", f"the chat template refuses its messages: {why}"): 2
        for why in ("system must come first, once", "roles must alternate")
    }
    assert [kit.tokenizer.decode(list(r.prompt_ids)) for r in left.rows] == [
        "[user]ship on friday?"
    ]


def test_case_09_thinking_leaves_the_history_and_stays_in_the_reply(model_dir: Path) -> None:
    """Case 09: the template shows thinking in the newest turn only."""
    kit = Kit(
        model_dir,
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    said = "<think>two fail</think>no"
    history = [*USER, {"role": "assistant", "content": said}, {"role": "user", "content": "why"}]
    first, second = rows(
        kit, spoken(text=said), spoken(index=1, messages=history, text="<think>x</think>tests")
    )
    decode = kit.tokenizer.decode
    assert decode(list(first.token_ids)) == f"{said}<|im_end|>"
    assert decode(list(second.prompt_ids)) == OPEN + (
        "no<|im_end|>\n<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n"
    )
    assert decode(list(second.token_ids)) == "<think>x</think>tests<|im_end|>"


def test_case_33_emoji_go_to_ids_and_back(kit: Kit) -> None:
    for text in (case("33-emoji.json")["text"], *case("33-emoji.json")["more"]):
        assert kit.reply(text=text) == f"{text}<|im_end|>"


def test_case_40_text_parts_are_joined_and_other_parts_leave_the_turn_out(kit: Kit) -> None:
    data = case("40-images.json")
    assert kit.prompt(data["text_parts"]) == (
        "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    )
    for name, kind in (("image", "image_url"), ("unknown_part", "document")):
        with pytest.raises(CannotRender, match=f"a part of type '{kind}', which is no text"):
            kit.text.render(spoken(messages=data[name]))
    odd = [{"role": "user", "content": ["a", {"type": "refusal", "refusal": "b"}, 7]}]
    with pytest.raises(CannotRender, match="a part of type 'int'"):
        kit.text.render(spoken(messages=odd))
    assert "a\nb<|im_end|>" in kit.prompt([{"role": "user", "content": odd[0]["content"][:2]}])


# -- replies with tool calls ---------------------------------------------------------------------

TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.a }}]"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}


def test_a_reply_with_tool_calls_is_what_the_template_writes(model_dir: Path) -> None:
    kit = Kit(model_dir, TOOLS)
    assert kit.reply(text=None, tool_calls=[CALL]) == "[add 2]<|im_end|>"
    assert kit.reply(text="sum: ", tool_calls=[CALL, CALL]) == "sum: [add 2][add 2]<|im_end|>"
    assert kit.text.render(spoken(text=None, tool_calls=[CALL])).odd == [NO_TOOLS]


@pytest.mark.parametrize(
    ("template", "call", "reason"),
    [
        (CHAT_TEMPLATE, CALL, "tool calls that the chat template leaves out"),
        ("{{ messages|length }}" + TOOLS, CALL, "writes before the reply's place"),
        (TOOLS, {"id": "c1"}, "a tool call without a function"),
    ],
)
def test_tool_calls_that_the_template_cannot_write_leave_the_turn_out(
    template: str, call: dict[str, Any], reason: str, model_dir: Path
) -> None:
    kit = Kit(model_dir, template)
    with pytest.raises(CannotRender, match=reason):
        kit.text.render(spoken(text=None, tool_calls=[call]))


# -- what is said --------------------------------------------------------------------------------


def test_ids_made_from_text_are_said_aloud(kit: Kit) -> None:
    made = rows(kit, spoken(), spoken(index=1, agent="judge"), recorded(2))
    (line,) = text_lines(made)
    assert line.startswith(
        "WARNING: 2 turns have no recorded ids (judge, writer); their text is encoded again for sft"
    )
    assert text_lines(rows(kit, recorded())) == []


def test_a_renderer_comes_from_the_models_folder(model_dir: Path, tmp_path: Path) -> None:
    assert rows_of(renderer(model_dir))[0].from_text
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        renderer(tmp_path)


def rows_of(text: TextRenderer) -> Sequence[TurnRow]:
    return read_training_set([episode(spoken())], text=text).rows


def test_a_model_without_a_template_leaves_turns_out(model_dir: Path) -> None:
    kit = Kit(model_dir, None)
    left = read_training_set([episode(spoken())], text=kit.text).left_out_turns
    ((_, reason),) = left
    assert reason.startswith("the chat template refuses its messages: Cannot use chat template")
