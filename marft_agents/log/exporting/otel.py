"""OpenTelemetry spans by the GenAI conventions, as OTLP/JSON: one line an episode.

An episode is a trace: the workflow, in it a span for every model call and every tool. What a prompt
held of earlier turns are span links. The conventions have no name for token ids; they are
``prompt_token_ids`` and ``response_token_ids``, as trainers that read spans expect, and what else
is ours begins with ``marft.``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, BinaryIO

from marft_agents.log.exporting.rows import as_text
from marft_agents.schema import Episode, Event, JsonDict, RewardEvent, ToolEvent, Turn

_SCHEMA = "https://opentelemetry.io/schemas/1.41.0"
_INTERNAL, _CLIENT = 1, 3
_OK, _ERROR = 1, 2


def write_otel(episodes: Iterable[Episode], file: BinaryIO) -> int:
    """One line an episode; returns the number of spans."""
    count = 0
    for episode in episodes:
        spans = _spans(episode)
        document = {
            "resourceSpans": [
                {
                    "resource": {"attributes": _attributes({"service.name": "marft-agents"})},
                    "scopeSpans": [
                        {"scope": {"name": "marft_agents"}, "spans": spans, "schemaUrl": _SCHEMA}
                    ],
                    "schemaUrl": _SCHEMA,
                }
            ]
        }
        file.write(json.dumps(document, separators=(",", ":"), allow_nan=False).encode() + b"\n")
        count += len(spans)
    return count


def _spans(episode: Episode) -> list[JsonDict]:
    turns = [_turn(episode, turn) for turn in episode.turns]
    tools = [_tool(episode, number, tool) for number, tool in enumerate(episode.tools)]
    return [_workflow(episode), *turns, *tools]


def _workflow(episode: Episode) -> JsonDict:
    events: list[Event] = [e for e in (episode.started, episode.ended) if e is not None]
    events += [*episode.turns, *episode.tools, *episode.humans]
    times = [event.time for event in events] or [r.time for r in episode.rewards]
    begin = min([*times, *(_begin(turn) for turn in episode.turns)])
    failed = episode.ended is not None and episode.ended.reason == "failed"
    return _span(
        episode,
        "workflow",
        "invoke_workflow",
        _INTERNAL,
        (begin, max(times)),
        {
            "gen_ai.operation.name": "invoke_workflow",
            "marft.task": as_text(episode.task),
            "marft.metadata": as_text(episode.metadata),
            "marft.runtime": episode.started.runtime if episode.started else None,
            "marft.end.reason": episode.ended.reason if episode.ended else None,
            "error.type": "failed" if failed else None,
        },
        error=(episode.ended.detail or "failed") if failed and episode.ended else None,
        events=[_evaluation(reward) for reward in episode.rewards if reward.value is not None],
    )


def _turn(episode: Episode, turn: Turn) -> JsonDict:
    rewards = [r for r in episode.rewards if r.turn_id == turn.turn_id and r.value is not None]
    return _span(
        episode,
        turn.turn_id,
        f"chat {turn.model}" if turn.model else "chat",
        _CLIENT,
        (_begin(turn), turn.time),
        _turn_attributes(turn),
        parent=turn.parent_turn or "workflow",
        error=turn.error,
        links=[{"traceId": _trace(episode), "spanId": _id(episode, d)} for d in turn.depends_on],
        events=[_evaluation(reward) for reward in rewards],
    )


def _turn_attributes(turn: Turn) -> JsonDict:
    s = turn.sampling
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",  # the wire format that was spoken
        "gen_ai.agent.name": turn.agent,
        "gen_ai.request.model": turn.model,
        "gen_ai.response.model": turn.adapter_end or turn.model,
        "gen_ai.response.id": turn.response_id,
        "gen_ai.response.finish_reasons": [turn.finish_reason] if turn.finish_reason else None,
        "gen_ai.request.temperature": s.temperature,
        "gen_ai.request.top_p": s.top_p,
        "gen_ai.request.top_k": None if s.top_k is None else float(s.top_k),
        "gen_ai.request.max_tokens": s.max_tokens,
        "gen_ai.request.seed": s.seed,
        "gen_ai.request.presence_penalty": s.presence_penalty,
        "gen_ai.request.frequency_penalty": s.frequency_penalty,
        "gen_ai.request.stop_sequences": s.stop,
        "gen_ai.usage.input_tokens": _length(turn.prompt_token_ids),
        "gen_ai.usage.output_tokens": _length(turn.token_ids),
        "gen_ai.input.messages": json.dumps(
            [_message(m) for m in turn.messages], ensure_ascii=False, default=str
        ),
        "gen_ai.output.messages": _output(turn),
        "error.type": "failed" if turn.error is not None else None,
        "prompt_token_ids": turn.prompt_token_ids,
        "response_token_ids": turn.token_ids,
        "marft.logprobs": turn.logprobs,
        "marft.logprob_mode": turn.logprob_mode,
        "marft.turn.id": turn.turn_id,
        "marft.turn.kind": turn.kind,
        "marft.turn.index": turn.index,
        "marft.turn.step": turn.step,
        "marft.turn.left_out": turn.untrainable_reason,
        "marft.choice_index": turn.choice_index,
        "marft.cached": turn.cached,
        "marft.selected_by": turn.selected_by,
        "marft.edited_text": turn.edited_text,
        "marft.adapter.start": turn.adapter_start,
    }


def _tool(episode: Episode, number: int, tool: ToolEvent) -> JsonDict:
    return _span(
        episode,
        f"tool {number}",
        f"execute_tool {tool.name}",
        _INTERNAL,
        (tool.time, tool.time),
        {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.agent.name": tool.agent,
            "gen_ai.tool.name": tool.name,
            "gen_ai.tool.type": "function",
            "gen_ai.tool.call.id": tool.call_id,
            "gen_ai.tool.call.arguments": as_text(tool.arguments),
            "gen_ai.tool.call.result": as_text(tool.result),
            "error.type": None if tool.ok else "failed",
        },
        parent="workflow",
        error=None if tool.ok else "failed",
    )


def _span(
    episode: Episode,
    name: str,
    title: str,
    kind: int,
    times: tuple[datetime, datetime],
    attributes: Mapping[str, Any],
    *,
    parent: str | None = None,
    error: str | None = None,
    links: list[JsonDict] | None = None,
    events: list[JsonDict] | None = None,
) -> JsonDict:
    return {
        "traceId": _trace(episode),
        "spanId": _id(episode, name),
        "parentSpanId": _id(episode, parent) if parent else "",
        "name": title,
        "kind": kind,
        "startTimeUnixNano": _nanos(times[0]),
        "endTimeUnixNano": _nanos(times[1]),
        "attributes": _attributes({"gen_ai.conversation.id": episode.episode_id, **attributes}),
        "links": links or [],
        "events": events or [],
        "status": {"code": _ERROR, "message": error} if error is not None else {"code": _OK},
    }


def _evaluation(reward: RewardEvent) -> JsonDict:
    return {
        "name": "gen_ai.evaluation.result",
        "timeUnixNano": _nanos(reward.time),
        "attributes": _attributes(
            {
                "gen_ai.evaluation.name": reward.source,
                "gen_ai.evaluation.score.value": reward.value,
                "gen_ai.agent.name": reward.agent,
                "marft.turn.id": reward.turn_id,
            }
        ),
    }


def _message(message: Mapping[str, Any]) -> JsonDict:
    """A wire message in parts."""
    parts: list[JsonDict] = []
    role, content = str(message.get("role")), message.get("content")
    if role == "tool":
        parts.append(
            {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}
        )
    elif content is not None:
        parts.append({"type": "text", "content": as_text(content)})
    parts += _calls(message.get("tool_calls"))
    name = {"name": message["name"]} if message.get("name") else {}
    return {"role": role, "parts": parts, **name}


def _output(turn: Turn) -> str | None:
    if turn.error is not None and turn.text is None:
        return None
    parts: list[JsonDict] = []
    if turn.reasoning:
        parts.append({"type": "reasoning", "content": turn.reasoning})
    if turn.text is not None:
        parts.append({"type": "text", "content": turn.text})
    parts += _calls(turn.tool_calls)
    message = {"role": "assistant", "parts": parts, "finish_reason": turn.finish_reason or "stop"}
    return json.dumps([message], ensure_ascii=False, default=str)


def _calls(calls: Any) -> list[JsonDict]:
    out: list[JsonDict] = []
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            out.append(
                {
                    "type": "tool_call",
                    "id": call.get("id"),
                    "name": function.get("name"),
                    "arguments": function.get("arguments"),
                }
            )
    return out


def _begin(turn: Turn) -> datetime:
    return turn.time - timedelta(seconds=max(0.0, turn.latency_s or 0.0))


def _length(ids: list[int] | None) -> int | None:
    return None if ids is None else len(ids)


def _trace(episode: Episode) -> str:
    return hashlib.sha256(episode.episode_id.encode()).hexdigest()[:32]


def _id(episode: Episode, name: str) -> str:
    return hashlib.sha256(f"{episode.episode_id}\0{name}".encode()).hexdigest()[:16]


def _nanos(time: datetime) -> str:
    seconds = int(time.timestamp())
    return str(seconds * 10**9 + time.microsecond * 1000)


def _attributes(values: Mapping[str, Any]) -> list[JsonDict]:
    return [
        {"key": key, "value": _value(value)} for key, value in values.items() if value is not None
    ]


def _value(value: Any) -> JsonDict:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value if math.isfinite(value) else _NOT_FINITE[str(value)]}
    if isinstance(value, list | tuple):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"stringValue": str(value)}


_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
