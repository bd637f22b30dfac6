"""Which sampling settings count as in effect."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marft_agents.recording.sampling import (
    announced_defaults,
    announced_logits,
    announced_mode,
    constrained,
    sampling_in_effect,
    sampling_of,
)
from marft_agents.schema import Turn


def test_the_request_wins_over_the_servers_defaults() -> None:
    out = sampling_of({"temperature": 0.5, "top_p": None}, {"temperature": 1.0, "top_p": 0.9})
    assert (out.temperature, out.top_p, out.min_p) == (0.5, 0.9, None)


def test_odd_values_are_unknown_and_not_guessed() -> None:
    odd = {"temperature": "hot", "top_k": float("nan"), "seed": True, "stop": 7}
    out = sampling_of(odd, {})
    assert (out.temperature, out.top_k, out.seed, out.stop) == (None, None, None, None)


@pytest.mark.parametrize(
    ("stop", "want"), [("a", ["a"]), (["a", 1, "b"], ["a", "b"]), ([], None), (None, None)]
)
def test_stop_is_a_list(stop: Any, want: Any) -> None:
    assert sampling_of({"stop": stop}, {}).stop == want


@pytest.mark.parametrize(
    "request_",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        {"guided_regex": "a+"},
        {"structured_outputs": {"choice": ["a"]}},
        {"response_format": {"type": "structural_tag", "format": {}}},
        {"function_call": {"name": "f"}},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required"}}},
        {"ebnf": "root ::= 'a'"},
    ],
)
def test_forced_output_is_a_grammar(request_: dict[str, Any]) -> None:
    assert constrained(request_)


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"tool_choice": "auto"},
        {"function_call": "auto"},
        {"response_format": {"type": "text"}},
        {"guided_json": None},
    ],
)
def test_free_output_is_none(request_: dict[str, Any]) -> None:
    assert not constrained(request_)


def test_headers_that_cannot_be_read_say_nothing() -> None:
    assert announced_defaults(None) == announced_defaults("{") == announced_defaults("[1]") == {}
    assert announced_defaults("[" * 100_000) == {}
    assert announced_mode("raw_logprobs") == "raw"
    assert announced_mode(None) is None and announced_mode("odd") is None
    assert announced_mode("raw_logits") is None and announced_mode("processed_logits") is None
    assert announced_logits("raw_logits") and not announced_logits("raw_logprobs")


SHAPING: list[dict[str, Any]] = [
    {"logit_bias": {"50256": -100}},
    {"bad_words": ["TERMINATE"]},
    {"allowed_token_ids": [1, 2]},
    {"min_tokens": 5},
    {"thinking_token_budget": 0},
    {"vllm_xargs": {"no_repeat": 3}},
    {"custom_logit_processor": "..."},
    {"watermarking": True},
    {"typical_p": 0.9},
]


@pytest.mark.parametrize("request_", SHAPING)
def test_what_moves_single_tokens_is_named(request_: dict[str, Any]) -> None:
    sampling = sampling_of(request_, {})
    assert sampling.shaped_by == list(request_) and sampling.truncates_support
    assert sampling_of({}, request_).shaped_by == list(request_), "a server's default counts, too"


def test_settings_without_effect_are_not_named() -> None:
    idle = {"logit_bias": {}, "bad_words": [], "min_tokens": 0, "thinking_token_budget": -1}
    idle |= {"typical_p": 1.0, "watermarking": False, "allowed_token_ids": None, "vllm_xargs": {}}
    sampling = sampling_of(idle, {})
    assert sampling.shaped_by == [] and not sampling.truncates_support


@pytest.mark.parametrize(
    ("request_", "searched"),
    [
        ({"use_beam_search": True, "n": 4}, True),
        ({"best_of": 3}, True),
        ({"best_of": 3, "n": 3}, False),
        ({"best_of": 1}, False),
        ({"n": 8}, False),
    ],
)
def test_a_reply_chosen_among_several_is_no_sample(
    request_: dict[str, Any], searched: bool
) -> None:
    sampling = sampling_of(request_, {})
    assert sampling.searched == searched == sampling.truncates_support
    turn = Turn(episode_id="e", turn_id="t", agent="a", sampling=sampling, prompt_token_ids=[1])
    turn = turn.model_copy(update={"token_ids": [2], "logprobs": [-1.0]})
    assert turn.trainable != searched


def test_what_ends_a_reply_is_kept_and_moves_nothing() -> None:
    request = {"stop_token_ids": [7, 8], "ignore_eos": True, "stop": "END", "top_logprobs": 5}
    sampling = sampling_of(request | {"logprobs": True}, {})
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.stop) == ([7, 8], True, ["END"])
    assert not sampling.truncates_support


def test_the_newer_name_of_the_limit_wins() -> None:
    assert sampling_of({"max_tokens": 5, "max_completion_tokens": 7}, {}).max_tokens == 7
    assert sampling_of({"max_tokens": 5}, {"max_tokens": 9}).max_tokens == 5
    assert sampling_of({}, {"max_tokens": 9}).max_tokens == 9


TOOL = {"type": "function", "function": {"name": "f"}}
STRICT = {"type": "function", "function": {"name": "f", "strict": True}}


@pytest.mark.parametrize(
    ("request_", "defaults", "held"),
    [
        ({"tools": [TOOL]}, {}, False),
        ({"tools": [TOOL, STRICT]}, {}, True),
        ({"tools": [STRICT], "tool_choice": "auto"}, {}, True),
        ({"tools": [STRICT], "tool_choice": "none"}, {}, False),
        ({"tools": [TOOL], "parallel_tool_calls": False}, {}, True),
        ({"parallel_tool_calls": False}, {}, False),
        ({"tools": [TOOL]}, {"tool_strict_level": "function"}, True),
        ({"tools": [TOOL]}, {"tool_strict_level": "auto"}, False),
    ],
)
def test_free_tool_calls_are_held_to_a_form_where_vllm_does_so(
    request_: dict[str, Any], defaults: dict[str, Any], held: bool
) -> None:
    """vLLM 0.32 constrains calls under "auto" for strict tools and single calls; text is free."""
    assert constrained(request_, defaults) == held
    assert not constrained(request_, defaults, plain_answer=True)


_SETTINGS = [
    "temperature", "top_k", "seed", "max_tokens", "max_completion_tokens", "stop", "ignore_eos",
    "stop_token_ids", "tool_choice", "parallel_tool_calls", "function_call", "response_format",
    "tools", "guided_json", "logit_bias", "min_tokens", "typical_p", "best_of", "n",
    "use_beam_search", "user", "messages",
]  # fmt: skip
_VALUES: list[Any] = [
    0, 1, 1.0, 0.0, True, False, None, 2, "x", "required", "none", [], ["x"], [1], {},
    {"type": "json_schema"}, {"name": "f"}, [{"type": "function", "function": {"strict": True}}],
]  # fmt: skip
_ANNOUNCED = [None, "{", '{"temperature": 0.7}', '{"tool_strict_level": "function"}']


@given(
    request=st.dictionaries(st.sampled_from(_SETTINGS), st.sampled_from(_VALUES), max_size=5),
    announced=st.sampled_from(_ANNOUNCED),
    plain=st.booleans(),
)
def test_settings_that_were_worked_out_before_are_those_of_this_request(
    request: dict[str, Any], announced: str | None, plain: bool
) -> None:
    want = sampling_of(request, announced_defaults(announced), plain_answer=plain)
    for _ in range(2):
        assert sampling_in_effect(request, announced, plain_answer=plain) == want


@pytest.mark.parametrize("name", _SETTINGS)
def test_every_setting_counts_and_so_does_the_type_of_its_value(name: str) -> None:
    for value in _VALUES:
        assert sampling_in_effect({name: value}, None) == sampling_of({name: value}, {})
