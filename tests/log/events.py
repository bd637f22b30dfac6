"""Events for tests, and the neutral records of ``tests/cases`` in terms of the schema."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from marft_agents.log.encode import encode_line
from marft_agents.schema import (
    AnyEvent,
    EditEvent,
    EpisodeEnded,
    EpisodeStarted,
    HumanEvent,
    RewardEvent,
    ToolEvent,
    Turn,
)

CASES = Path(__file__).parent.parent / "cases"
START = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def turn(number: int = 0, *, episode: str = "e", agent: str = "planner", **fields: Any) -> Turn:
    """A trainable turn; ``fields`` replace what it holds."""
    values: dict[str, Any] = {
        "episode_id": episode,
        "turn_id": f"t{number}",
        "agent": agent,
        "index": number,
        "time": at(number),
        "text": f"reply {number}",
        "prompt_token_ids": [1, 2, 3],
        "token_ids": [4, 5],
        "logprobs": [-0.5, -0.25],
        "logprob_mode": "processed",
        "adapter_start": f"{agent}@v1",
        "adapter_end": f"{agent}@v1",
        "response_id": f"r-{episode}-{number}",
    }
    return Turn(**(values | fields))


def case_event(record: dict[str, Any], number: int) -> AnyEvent:
    """One neutral record of a case as an event."""
    if record["kind"] == "reward":
        fields = {"value": record["value"]} if "value" in record else {}
        return RewardEvent(episode_id=record["episode"], time=at(number), **fields)
    if record["kind"] == "message":
        return HumanEvent(
            episode_id=record["episode"],
            time=at(number),
            name=record["agent"],
            text=record["text"],
            index=record["seq"],
        )
    version = f"{record['agent']}@v"
    standard = record["adapter_version"]
    return Turn(
        episode_id=record["episode"],
        time=at(number),
        turn_id=f"t{number}",
        agent=record["agent"],
        index=record["seq"],
        messages=record["messages"],
        text=record["text"],
        prompt_token_ids=record["prompt_token_ids"],
        token_ids=record["token_ids"],
        logprobs=record["logprobs"],
        finish_reason=record["finish_reason"],
        response_id=record["response_id"],
        adapter_start=f"{version}{record.get('version_at_start', standard)}",
        adapter_end=f"{version}{record.get('version_at_end', standard)}",
        model=record["model"],
        cached=record.get("cached", False),
        edited_text=record.get("edited_text"),
        error=record.get("error"),
    )


def case_bytes(name: str) -> bytes:
    """A case file in the schema, with every damaged byte where it was."""
    out: list[bytes] = []
    for number, line in enumerate((CASES / name).read_bytes().split(b"\n")):
        try:
            out.append(encode_line(case_event(json.loads(line), number)).rstrip(b"\n"))
        except ValueError:
            out.append(line)
    return b"\n".join(out)


def some_line(draw: random.Random, episode: str) -> bytes:
    """Any event of an episode, that may repeat or contradict others of it; sometimes damaged."""
    number, time = draw.randrange(8), at(draw.randrange(20))
    named = draw.choice([None, "planner", "coder"])
    turn_id = f"t{draw.randrange(8)}"
    made: list[AnyEvent] = [
        turn(
            number,
            episode=episode,
            time=time,
            turn_id=f"t{draw.randrange(30)}",
            depends_on=[turn_id],
            selected_by=draw.choice([None, turn_id]),
            cached=draw.random() < 0.1,
        ),
        RewardEvent(
            episode_id=episode,
            time=time,
            value=draw.choice([None, 1.0, draw.random(), float("nan")]),
            agent=named,
            turn_id=draw.choice([None, turn_id]),
            source=draw.choice("ab"),
        ),
        ToolEvent(episode_id=episode, time=time, name="x", result={"episode_id": "z"}),
        HumanEvent(episode_id=episode, time=time, text="go on"),
        EpisodeStarted(episode_id=episode, time=time, task=number),
        EpisodeEnded(episode_id=episode, time=time, detail=str(number)),
        EditEvent(episode_id=episode, time=time, turn_id=turn_id, text=f"edit {number}"),
    ]
    data = encode_line(draw.choice([*made[:2], *made]))
    return draw.choice([data] * 12 + [data[: draw.randrange(len(data))], b"\0" * 5 + data])
