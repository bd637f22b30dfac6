"""Records on disk: what they derive, refuse and keep."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from marft_agents.errors import ConfigError
from marft_agents.schema import (
    EVENT,
    RESERVED_NAMES,
    AdapterManifest,
    BaseModelInfo,
    Episode,
    EpisodeEnded,
    EpisodeStarted,
    RewardEvent,
    Sampling,
    ToolEvent,
    adapter_slug,
    adapter_slugs,
    parse_served_name,
    served_name,
)
from tests.log.events import at, turn


class Scalar:
    """A scalar of an array library, or an array of one."""

    def __init__(self, value: object, ndim: int = 0) -> None:
        self.value, self.ndim = value, ndim

    def item(self) -> object:
        return self.value

    def __repr__(self) -> str:
        return f"Scalar({self.value})"


def reward(value: Any = 1.0, **fields: Any) -> RewardEvent:
    values: dict[str, Any] = {"episode_id": "e", "value": value}
    return RewardEvent(**(values | fields))


def episode(*rewards: RewardEvent, **fields: Any) -> Episode:
    values: dict[str, Any] = {
        "episode_id": "e",
        "turns": [turn(0)],
        "rewards": list(rewards),
        "ended": EpisodeEnded(episode_id="e"),
    }
    return Episode(**(values | fields))


# --- turns ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"logprobs": [0.0, -9998.0]}, None),
        ({"sampling": Sampling(top_p=0.9)}, None),
        ({"adapter_start": None, "adapter_end": None}, None),
        ({"error": "timeout"}, "the call failed"),
        ({"kind": "reflect"}, None),
        ({"kind": "select"}, "not an action of the agent (kind select)"),
        ({"cached": True}, "answered from a cache"),
        ({"complete": False}, "not all of its tokens arrived"),
        ({"edited_text": "better"}, "edited by a human"),
        ({"edited_text": ""}, "edited by a human"),
        ({"prompt_token_ids": None}, "no prompt token ids"),
        ({"prompt_token_ids": []}, "no prompt token ids"),
        ({"token_ids": None}, "no sampled token ids"),
        ({"token_ids": [-1, 5]}, "a token id is out of any vocabulary"),
        ({"prompt_token_ids": [10**30]}, "a token id is out of any vocabulary"),
        ({"logprobs": None}, "no log-probabilities"),
        ({"logprobs": [-0.5]}, "differ in length"),
        ({"logprobs": [-0.5, float("nan")]}, "not finite, positive or a placeholder"),
        ({"logprobs": [-0.5, float("-inf")]}, "not finite, positive or a placeholder"),
        ({"logprobs": [-0.5, -9999.0]}, "not finite, positive or a placeholder"),
        ({"logprobs": [-0.5, 0.1]}, "not finite, positive or a placeholder"),
        ({"adapter_end": "planner@v2"}, "adapter version changed during the call"),
        ({"sampling": Sampling(grammar=True)}, "sampled under a grammar"),
    ],
)
def test_why_a_turn_cannot_be_trained_on(fields: dict[str, Any], reason: str | None) -> None:
    seen = turn(0, **fields)
    assert seen.trainable is (reason is None)
    assert (seen.untrainable_reason or "").endswith(reason or "")


@pytest.mark.parametrize(
    ("fields", "truncates"),
    [
        ({}, False),
        ({"temperature": 0.5, "max_tokens": 9, "stop": ["\n"]}, False),
        ({"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}, False),
        ({"top_k": 0, "presence_penalty": 0.0}, False),
        ({"top_p": 0.99}, True),
        ({"top_k": 50}, True),
        ({"min_p": 0.05}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"grammar": True}, True),
    ],
)
def test_sampling_that_leaves_out_tokens(fields: dict[str, Any], truncates: bool) -> None:
    assert Sampling(**fields).truncates_support is truncates


def test_records_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        turn(0).text = "other"  # pyright: ignore[reportAttributeAccessIssue] the point of the test


@given(st.dictionaries(st.text(min_size=1), st.integers() | st.text(), max_size=4))
def test_unknown_fields_survive(extra: dict[str, Any]) -> None:
    fields = {f"x_{name}": value for name, value in extra.items()}
    event = EVENT.validate_python(
        {"type": "turn", "episode_id": "e", "turn_id": "t", "agent": "a"} | fields
    )
    back = EVENT.validate_json(EVENT.dump_json(event))
    assert back == event
    assert back.model_extra == fields


def test_events_are_told_apart_by_type() -> None:
    events = [
        EpisodeStarted(episode_id="e", task={"q": 1}, parent_id="outer"),
        turn(0, sampling=Sampling(temperature=0.7, stop=["x"]), tool_calls=[{"id": "1"}]),
        ToolEvent(episode_id="e", name="run", arguments={"a": None}, ok=False),
        reward(0.5, agent="a"),
        EpisodeEnded(episode_id="e", reason="truncated", detail="max rounds"),
    ]
    for event in events:
        back = EVENT.validate_json(event.model_dump_json())
        assert (type(back), back) == (type(event), event)


def test_a_naive_time_is_read_as_utc() -> None:
    naive = EVENT.validate_json('{"type":"reward","episode_id":"e","time":"2026-01-01T00:00:00"}')
    assert naive.time == datetime(2026, 1, 1, tzinfo=UTC)
    assert reward(1.0, time=datetime(2026, 1, 1)).time == naive.time


# --- rewards --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (1, 1.0),
        (-0.5, -0.5),
        (True, 1.0),
        (False, 0.0),
        (None, None),
        (Scalar(0.25), 0.25),
        (Scalar(True), 1.0),
    ],
)
def test_a_reward_is_a_number_or_a_truth_value(value: Any, read: float | None) -> None:
    event = reward(value)
    assert (event.value, event.refused) == (read, None)
    assert event.value is None or type(event.value) is float


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("0.5", "not a number: '0.5'"),
        ("", "not a number: ''"),
        ([1.0], "not a number: [1.0]"),
        ({"score": 1}, "not a number: {'score': 1}"),
        (float("nan"), "not finite: nan"),
        (float("inf"), "not finite: inf"),
        (10**400, "too large"),
        (-1e308, "larger than 1e+15: -1e+308"),  # two of them have no sum
        (Scalar(float("-inf")), "not finite: -inf"),
        (Scalar("0.5"), "not a number: '0.5'"),
        (Scalar(0.5, ndim=1), "not a number: Scalar(0.5)"),
        ("x" * 500, "not a number: 'xxx"),
    ],
)
def test_anything_else_is_refused_and_said(value: Any, why: str) -> None:
    event = reward(value)
    assert event.value is None
    assert why in (event.refused or "")
    assert len(event.refused or "") <= 120
    assert RewardEvent.model_validate_json(event.model_dump_json()) == event


def test_the_latest_reward_of_a_source_wins_and_sources_add_up() -> None:
    seen = episode(
        reward(0.9, time=at(5)),
        reward(0.1, time=at(1)),
        reward(0.25, time=at(2), source="judge"),
    )
    assert seen.team_reward == pytest.approx(1.15)


def test_taking_a_reward_back() -> None:
    assert episode(reward(0.9, time=at(1)), reward(None, time=at(2))).team_reward is None
    assert episode(reward(None, time=at(1)), reward(0.9, time=at(2))).team_reward == 0.9


def test_rewards_of_the_team_an_agent_and_a_turn_are_kept_apart() -> None:
    seen = episode(
        reward(1.0),
        reward(0.5, agent="planner"),
        reward(0.25, agent="planner", source="judge"),
        reward(0.125, turn_id="t0"),
        reward(0.0625, turn_id="t0", agent="planner"),
    )
    assert seen.team_reward == 1.0
    assert seen.agent_rewards == {"planner": 0.75}
    assert seen.turn_rewards == {"t0": 0.1875}


def test_a_missing_reward_is_not_zero() -> None:
    assert episode().team_reward is None
    assert not episode().scored
    assert not episode(reward(None)).scored
    assert episode(reward(0.0)).scored
    assert episode(reward(0.0, agent="planner")).team_reward is None


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (episode(reward()), None),
        (episode(reward(0.0, turn_id="t0")), None),
        (episode(reward(), turns=[]), "no model call"),
        (episode(reward("0.5")), "refused reward (not a number: '0.5')"),
        (episode(reward(), reward(float("nan"), source="judge")), "reward (not finite: nan)"),
        (episode(), "no reward"),
        (episode(reward(), ended=None), "never ended"),
        (
            episode(ended=EpisodeEnded(episode_id="e", reason="failed", detail="boom")),
            "no reward, the episode failed (boom)",
        ),
        (episode(reward(), ended=EpisodeEnded(episode_id="e", reason="failed")), None),
        (episode(reward(), ended=EpisodeEnded(episode_id="e", reason="truncated")), None),
    ],
)  # fmt: skip
def test_why_an_episode_is_left_out(seen: Episode, reason: str | None) -> None:
    if reason is None:
        assert seen.untrainable_reason is None
    else:
        assert reason in (seen.untrainable_reason or "")


# --- adapter names --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agent", "slug"),
    [
        ("planner", "planner"),
        ("critic", "critic"),
        ("Code_Writer", "code_writer"),
        ("gpt-4.1 mini", "gpt-4-1-mini"),
        ("a.b.c", "a-b-c"),
        ("  Äpfel & Birnen! ", "pfel-birnen"),
        ("agent-2", "agent-2"),
        ("v3", "v3"),
        ("x" * 64, "x" * 64),
    ],
)
def test_the_adapter_name_of_an_agent(agent: str, slug: str) -> None:
    assert adapter_slug(agent) == slug


@pytest.mark.parametrize("agent", ["", "  ", "...", "评论家", "42", "4.", "x" * 65])
def test_names_that_leave_nothing_usable(agent: str) -> None:
    with pytest.raises(ConfigError, match="no usable adapter name"):
        adapter_slug(agent)


@pytest.mark.parametrize(
    "agent", [*RESERVED_NAMES, "Base", "Default!", "q_proj", "Layers", "lora_A"]
)
def test_reserved_names_and_module_names(agent: str) -> None:
    with pytest.raises(ConfigError, match=r"reserved adapter name.*under `agents:`"):
        adapter_slug(agent)


@given(st.text())
def test_a_slug_is_stable_and_safe(agent: str) -> None:
    try:
        slug = adapter_slug(agent)
    except ConfigError:
        return
    assert adapter_slug(slug) == slug
    assert set(slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-")
    assert not slug.startswith("-")
    assert parse_served_name(served_name(slug, 1)) == (slug, 1)


def test_two_agents_never_share_an_adapter_by_accident() -> None:
    assert adapter_slugs(["A", "b", "A"]) == {"A": "a", "b": "b"}
    with pytest.raises(ConfigError, match="'Writer' and 'writer' both give"):
        adapter_slugs(["Writer", "writer"])


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("planner@v7", ("planner", 7)),
        ("a-b_c@v123", ("a-b_c", 123)),
        ("planner", None),
        ("planner@v0", None),
        ("planner@v07", None),
        ("planner@7", None),
        ("Planner@v7", None),
        ("@v7", None),
        ("planner@v7\n", None),
        ("a@v1@v2", None),
    ],
)
def test_served_names(name: str, parts: tuple[str, int] | None) -> None:
    assert parse_served_name(name) == parts
    if parts:
        assert served_name(*parts) == name


def test_a_manifest_round_trips_and_knows_its_served_name() -> None:
    base = BaseModelInfo(
        name="tiny", hidden_size=8, num_hidden_layers=2, vocab_size=32, model_type="llama",
        fingerprint="0" * 64,
    )  # fmt: skip
    manifest = AdapterManifest(
        agent="planner", version=7, base=base, rank=8, target_modules=["q_proj"], files={"a": "b"}
    )
    assert AdapterManifest.model_validate_json(manifest.model_dump_json()) == manifest
    assert manifest.served_name == "planner@v7"
    with pytest.raises(ValidationError, match="version"):
        AdapterManifest.model_validate(manifest.model_dump() | {"version": 0})
