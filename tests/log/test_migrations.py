"""Old records are brought up step by step; records from the future are refused."""

from __future__ import annotations

from typing import Any

import pytest

from marft_agents.log.encode import encode_line
from marft_agents.log.migrations import MIGRATIONS, migrate
from marft_agents.log.records import Refusal, parse
from marft_agents.schema import SCHEMA_VERSION, Turn
from tests.log.events import turn


def rename_agent(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "agent": record["agent"].upper()}


def split_text(record: dict[str, Any]) -> dict[str, Any]:
    record["text"] = record["text"] + " " + record["agent"]
    return record


FAKE = {1: rename_agent, 2: split_text}


def test_the_table_leads_from_the_first_version_to_this_one() -> None:
    assert sorted(MIGRATIONS) == list(range(1, SCHEMA_VERSION))


def test_a_record_of_this_version_is_left_alone() -> None:
    record = {"schema_version": SCHEMA_VERSION, "type": "turn"}
    assert migrate(record) is record
    assert migrate({"type": "turn"}) == {"type": "turn"}


def test_steps_run_in_order_and_leave_the_input_alone() -> None:
    record = {"schema_version": 1, "agent": "planner", "text": "hi"}
    up = migrate(record, version=3, migrations=FAKE)
    assert up == {"schema_version": 3, "agent": "PLANNER", "text": "hi PLANNER"}
    assert record == {"schema_version": 1, "agent": "planner", "text": "hi"}


def test_an_old_line_is_read_through_the_steps() -> None:
    event = parse(encode_line(turn(0)), version=3, migrations=FAKE)
    assert isinstance(event, Turn)
    assert (event.agent, event.text, event.schema_version) == ("PLANNER", "reply 0 PLANNER", 3)


@pytest.mark.parametrize(
    ("version", "message"),
    [(4, "written by a newer version"), (0, "not a number from 1"), ("2", "'2'"), (True, "True")],
)
def test_versions_that_cannot_be_read(version: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        migrate({"schema_version": version}, version=3, migrations=FAKE)


def test_a_missing_step_is_named() -> None:
    with pytest.raises(ValueError, match="no migration from schema_version 2 to 3"):
        migrate({"schema_version": 1, "agent": "a"}, version=3, migrations={1: rename_agent})


def test_a_newer_line_says_what_to_do() -> None:
    line = encode_line(turn(0)).replace(b'"schema_version":1', b'"schema_version":9')
    refusal = parse(line)
    assert isinstance(refusal, Refusal)
    assert "upgrade marft-agents" in refusal.reason
    assert not refusal.torn
