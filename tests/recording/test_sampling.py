"""Which sampling settings count as in effect."""

from __future__ import annotations

from typing import Any

import pytest

from marft_agents.recording.sampling import (
    announced_defaults,
    announced_mode,
    constrained,
    sampling_of,
)


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
    ],
)
def test_forced_output_is_a_grammar(request_: dict[str, Any]) -> None:
    assert constrained(request_)


@pytest.mark.parametrize(
    "request_",
    [{}, {"tool_choice": "auto"}, {"response_format": {"type": "text"}}, {"guided_json": None}],
)
def test_free_output_is_none(request_: dict[str, Any]) -> None:
    assert not constrained(request_)


def test_headers_that_cannot_be_read_say_nothing() -> None:
    assert announced_defaults(None) == announced_defaults("{") == announced_defaults("[1]") == {}
    assert announced_defaults("[" * 100_000) == {}
    assert announced_mode("raw_logprobs") == "raw"
    assert announced_mode(None) is None and announced_mode("odd") is None
