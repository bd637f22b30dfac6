"""Before anything is written: what is masked, what a turn loses with it, and what users may add."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from marft_agents.cli.logs_import import command
from marft_agents.errors import ConfigError
from marft_agents.log import LogReader, Retention
from marft_agents.recording import MarftRecorder, redact
from marft_agents.recording.clean import Payload, jsonable
from marft_agents.recording.redact import Redact, Redaction, Redactor
from marft_agents.recording.safety import Safety
from marft_agents.recording.sink import Sink
from marft_agents.schema import (
    EpisodeEnded,
    EpisodeStarted,
    Event,
    HumanEvent,
    RewardEvent,
    ToolEvent,
    Turn,
)
from marft_agents.testing import InMemoryLog

_ANY: Any = 3
KEY = "sk-proj-aB3dE5gH7jK9mN1pQ2sT"
MASKED = "[redacted:openai-key]"


def turn(text: str | None = "hi", prompt: str = "hello", **fields: Any) -> Turn:
    values: dict[str, Any] = {
        "episode_id": "e",
        "turn_id": "t",
        "agent": "planner",
        "messages": [{"role": "user", "content": prompt}],
        "text": text,
        "prompt_token_ids": [1, 2],
        "token_ids": [3],
        "logprobs": [-0.5],
    }
    return Turn(**(values | fields))


def redacted(event: Event, how: Redact = "default") -> Any:
    return Redactor(how, Safety(False))(event)


def test_a_clean_event_passes_as_it_is() -> None:
    event = turn()
    assert redacted(event) is event


@pytest.mark.parametrize(
    ("fields", "prompt_ids", "reply_ids"),
    [
        ({"prompt": f"my key is {KEY}"}, None, [3]),
        ({"text": f"it is {KEY}"}, [1, 2], None),
        ({"text": KEY, "prompt": KEY}, None, None),
        ({"tool_calls": [{"function": {"arguments": f'{{"k": "{KEY}"}}'}}]}, [1, 2], None),
        ({"reasoning": f"so {KEY}"}, [1, 2], None),
        ({"messages": [{"role": "tool", "content": [{"type": "text", "text": KEY}]}]}, None, [3]),
    ],
    ids=["prompt", "reply", "both", "tool call", "reasoning", "content part"],
)
def test_a_turn_loses_the_ids_that_spell_a_secret(
    fields: dict[str, Any], prompt_ids: list[int] | None, reply_ids: list[int] | None
) -> None:
    out = redacted(turn(**fields))
    line = out.model_dump_json()
    assert KEY not in line and MASKED in line
    assert (out.prompt_token_ids, out.token_ids) == (prompt_ids, reply_ids)
    assert (out.logprobs is None) == (reply_ids is None)
    assert out.redacted is True and not out.trainable
    assert "redacted" in (out.untrainable_reason or "")


def test_an_error_with_a_key_costs_no_ids() -> None:
    out = redacted(turn(error=f"401: {KEY}"))
    assert out.error == f"401: {MASKED}" and out.token_ids == [3]
    assert not getattr(out, "redacted", False)


def test_the_loss_is_said_once_with_the_cure(caplog: pytest.LogCaptureFixture) -> None:
    redactor = Redactor(safety=Safety(False))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            redactor(turn(text=KEY))
    (record,) = caplog.records
    said = record.getMessage()
    assert "openai-key" in said and "'planner'" in said and "docs/privacy.md" in said
    assert KEY not in said


@dataclass
class Settings:
    api_key: str
    model: str = "planner"


@pytest.mark.parametrize(
    "event",
    [
        EpisodeStarted(episode_id="e", task=KEY),
        EpisodeStarted(episode_id="e", metadata={"deep": [{"x": KEY}], KEY: 1}),
        EpisodeStarted(episode_id="e", metadata={"object": jsonable(Settings(KEY))}),
        EpisodeEnded(episode_id="e", reason="failed", detail=f"ValueError: {KEY}"),
        ToolEvent(episode_id="e", name="run", arguments={"code": KEY}, result=KEY),
        HumanEvent(episode_id="e", text=KEY),
        RewardEvent(episode_id="e", value=1.0, source=KEY),
        turn(edited_text=KEY),
        turn(later_field={"of": [KEY]}),
    ],
)
def test_every_text_of_every_event_is_looked_at(event: Event) -> None:
    out = redacted(event)
    line = out.model_dump_json()
    assert KEY not in line and "[redacted:" in line
    assert out.episode_id == "e"


def test_values_under_telling_names_go_whatever_they_look_like() -> None:
    given: Any = {
        "api_key": "plain",
        "headers": {"Authorization": "anything"},
        "db_password": "correct horse",
        "passwords": ["one", 2],
        "password": 1234,
        "token": "cat",
        "session_token": "x",
        "eos_token": "</s>",
        "max_tokens": 5,
        "api_key_env": "OPENAI_API_KEY",
    }
    out = redacted(ToolEvent(episode_id="e", name="n", arguments=given)).arguments
    assert out == given | {
        "api_key": "[redacted:api-key]",
        "headers": {"Authorization": "[redacted:authorization]"},
        "db_password": "[redacted:password]",
        "passwords": ["[redacted:password]", "[redacted:password]"],
        "password": "[redacted:password]",
        "session_token": "[redacted:token]",
    }


def test_ids_and_names_that_join_events_are_never_changed() -> None:
    event = turn(episode_id=KEY, turn_id=KEY, agent=KEY, response_id=KEY, depends_on=[KEY])
    assert redacted(event) is event


def test_off_keeps_everything_but_hashes_data() -> None:
    raw = bytes(range(256)) * 4
    payload = Payload(base64.b64encode(raw).decode())
    event = turn(text=KEY, messages=[{"role": "user", "content": [{"data": payload}]}])
    out = redacted(event, "off")
    assert out.text == KEY and out.token_ids == [3] and out.prompt_token_ids == [1, 2]
    want = {"sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw)}
    assert out.messages[0]["content"] == [{"data": want}]


def test_hashing_data_is_no_redaction() -> None:
    event = turn(messages=[{"role": "user", "content": [{"data": Payload("QUJD" * 200)}]}])
    assert redacted(event).prompt_token_ids == [1, 2]


def test_own_patterns_are_masked_too() -> None:
    plan = Redaction(patterns=[r"EMP-\d{6}", re.compile(r"iban=(\w+)")])
    out = redacted(turn(text="EMP-123456 and iban=DE123, again EMP-000000"), plan)
    assert out.text == "[redacted:pattern] and iban=[redacted:pattern], again [redacted:pattern]"
    assert out.token_ids is None


def test_hashed_fields_stay_comparable_and_tell_nothing() -> None:
    def user(value: Any, salt: str | None, where: str = "metadata") -> Any:
        given: Any = {where: {"deep": [{"user_id": value, "other": 1}]}}
        plan = Redaction(hash_fields=["user_id"], salt=salt)
        return getattr(redacted(EpisodeStarted(episode_id="e", **given), plan), where)["deep"][0]

    first = user("ann", "salt")
    assert first["other"] == 1 and re.fullmatch(r"\[hash:[0-9a-f]{24}\]", first["user_id"])
    assert user("ann", "salt") == first == user("ann", "salt", "task")
    assert user("bob", "salt") != first != user("ann", "other salt")
    assert user("ann", None) != first
    assert user(None, "salt")["user_id"] is None
    assert user(7, "salt")["user_id"] == user(7, "salt")["user_id"] != user(8, "salt")["user_id"]


def test_keep_ids_keeps_them() -> None:
    out = redacted(turn(text=KEY), Redaction(keep_ids=True))
    assert out.text == MASKED and out.token_ids == [3] and out.trainable
    assert out.redacted, "who learns from text is told that it holds masks"
    without = redacted(turn(text=KEY, token_ids=None, logprobs=None))
    assert without.redacted, "also where there were no ids to lose"


def _shout(event: dict[str, Any]) -> dict[str, Any]:
    assert KEY not in str(event), "the user's function comes last"
    return event | {"text": event["text"].upper()}


def test_a_function_of_the_users_sees_the_event_as_it_would_be_written() -> None:
    out = redacted(turn(text=f"say {KEY}"), Redaction(function=_shout))
    assert out.text == "SAY [REDACTED:OPENAI-KEY]" and isinstance(out, Turn)


@pytest.mark.parametrize(
    ("change", "prompt_ids", "reply_ids"),
    [
        ({}, [1, 2], [3]),
        ({"text": "other"}, [1, 2], None),
        ({"messages": []}, None, [3]),
        ({"error": "mine"}, [1, 2], [3]),
    ],
    ids=["nothing", "reply", "prompt", "something else"],
)
def test_what_the_function_changes_costs_the_ids_that_spell_it(
    change: dict[str, Any], prompt_ids: list[int] | None, reply_ids: list[int] | None
) -> None:
    def function(event: dict[str, Any]) -> dict[str, Any]:
        return event | change

    out = redacted(turn(), Redaction(function=function))
    assert (out.prompt_token_ids, out.token_ids) == (prompt_ids, reply_ids)


def _written(how: Redact, *events: Event) -> InMemoryLog:
    log, safety = InMemoryLog(), Safety(False)
    sink = Sink(log, safety, prepare=Redactor(how, safety))
    for event in events:
        sink.put(event)
    assert sink.close()
    return log


def _no_humans(event: dict[str, Any]) -> dict[str, Any] | None:
    return None if event["type"] == "human" else event


def _fails_on_turns(event: dict[str, Any]) -> dict[str, Any]:
    if event["type"] == "turn":
        raise ValueError(f"cannot handle {KEY}")
    return event


def _makes_nonsense_of_turns(event: dict[str, Any]) -> dict[str, Any]:
    return {"type": "turn"} if event["type"] == "turn" else event


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (_no_humans, "returned None"),
        (_fails_on_turns, "ValueError"),
        (_makes_nonsense_of_turns, "ValidationError"),
    ],
)
def test_an_event_that_is_dropped_or_cannot_be_redacted_is_not_written_and_counted(
    function: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        log = _written(
            Redaction(function=function),
            turn(text=f"secret {KEY}"),
            HumanEvent(episode_id="e", text="me"),
            turn(text="again", turn_id="t2"),
            EpisodeEnded(episode_id="e"),
        )
    lost = 1 if function is _no_humans else 2
    assert len(log.events) == 4 - lost
    assert log.of(EpisodeEnded)[0].dropped_events == lost
    (record,) = [r for r in caplog.records if "masked a secret" not in r.getMessage()]
    assert said in record.getMessage() and KEY not in caplog.text


def test_a_log_of_any_kind_gets_redacted_events_only() -> None:
    assert KEY not in str(_written("default", turn(text=KEY)).events)
    assert KEY in str(_written("off", turn(text=KEY)).events)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Redaction(patterns=["("]), "no regular expression"),
        (lambda: Redaction(patterns=["a*"]), "empty text"),
        (lambda: Redaction(patterns="abc"), "give a list"),
        (lambda: Redaction(hash_fields="user_id"), "give a list"),
        (lambda: Redaction(hash_fields=["x"], salt=""), "salt is empty"),
        (lambda: Redaction(function=_ANY), "cannot be called"),
        (lambda: Redactor(_ANY), "'default', 'off' or a Redaction"),
    ],
)
def test_mistakes_are_said_at_once(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_the_salt_is_not_shown() -> None:
    assert "pepper" not in repr(Redaction(hash_fields=["x"], salt="pepper"))


def test_a_repeated_history_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def remember(text: str) -> tuple[str, list[str]]:
        seen.append(text)
        return text, []

    monkeypatch.setattr(redact, "mask", remember)
    redactor = Redactor(safety=Safety(False))
    for number in range(3):
        redactor(turn(prompt="long history " * 50 + "x" * 300, text=f"a reply of its own {number}"))
    assert len([text for text in seen if text.startswith("long")]) == 1


def test_what_is_imported_is_masked_too(tmp_path: Path) -> None:
    chat = tmp_path / "chats.jsonl"
    said = [
        {"role": "user", "content": "my key?"},
        {"role": "assistant", "content": f"It is {KEY}"},
    ]
    chat.write_text(json.dumps({"messages": said}) + "\n", encoding="utf-8")
    logs = tmp_path / "logs"
    done = CliRunner().invoke(command, [str(chat), "--output", str(logs)])
    assert done.exit_code == 0, done.output
    (episode,) = LogReader(logs).episodes()
    assert episode.turns[0].text == f"It is {MASKED}" and episode.turns[0].redacted


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"redact": "on"}, "'default', 'off' or a Redaction"),
        ({"redact": _shout}, "'default', 'off' or a Redaction"),
        (
            {"log": InMemoryLog(), "retention": Retention(max_age_days=1)},
            "retention is for log_dir",
        ),
    ],
)
def test_a_recorder_says_what_it_cannot_do(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        MarftRecorder(**options)


OWN_KEY = "planner-4711-of-mine"
"""One that nobody could tell by its looks."""
_TEXTS = st.sampled_from(
    ["user", "hello there", KEY, "my house", OWN_KEY, f"{OWN_KEY} {KEY}", "", "x" * 40]
)
_NAMES = st.sampled_from(["role", "content", "api_key", "token", "a name of its own", OWN_KEY])
_VALUES = st.recursive(
    _TEXTS | st.integers(0, 3) | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3),
    max_leaves=6,
)
_MESSAGES = st.lists(st.dictionaries(_NAMES, _VALUES, max_size=3), max_size=3)
_SEEN = st.builds(
    turn,
    text=_TEXTS,
    messages=_MESSAGES,
    tool_calls=st.none() | _MESSAGES,
    api_key=_VALUES,
    sampling=st.fixed_dictionaries({"stop": st.lists(_TEXTS, max_size=2), "token": _VALUES}),
)
_HOWS = [
    "default", "off", Redaction(patterns=["house"]), Redaction(defaults=False, patterns=["u.e"])
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    events=st.lists(_SEEN | st.just("learns a key"), min_size=2, max_size=6),
    how=st.sampled_from(_HOWS),
)
def test_what_was_met_before_is_redacted_as_at_first_sight(
    events: list[Turn | str], how: Redact
) -> None:
    """A redactor remembers what was clean; names, new keys and patterns count all the same."""
    safety = Safety(False)
    remembering = Redactor(how, safety)
    for event in events:
        if isinstance(event, str):
            safety.hide(OWN_KEY)
        else:
            new = Redactor(how, safety)(event)
            assert remembering(event) == new
            assert remembering(event) == new


def test_a_key_that_becomes_known_is_masked_where_it_was_a_harmless_name() -> None:
    safety = Safety(False)
    redactor = Redactor("default", safety)
    event = turn(messages=[{"role": "user", "content": None, OWN_KEY: 1}])
    assert redactor(event) == event
    safety.hide(OWN_KEY)
    assert OWN_KEY not in repr(redactor(event))
