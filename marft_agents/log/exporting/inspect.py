"""An evaluation log of Inspect AI: one sample an episode, its model calls and tools as events.

Rewards are scores. Token ids are in the events' metadata, log-probabilities in the output, each
under the token's id as text. The document is written piece by piece.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, BinaryIO

from marft_agents.errors import LogError
from marft_agents.log.exporting.rows import as_text
from marft_agents.schema import Episode, JsonDict, ToolEvent, Turn

_STOPS = {"stop": "stop", "length": "max_tokens", "tool_calls": "tool_calls",
          "function_call": "tool_calls", "content_filter": "content_filter"}  # fmt: skip
_GENERATE = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty",
             "max_tokens", "seed")  # fmt: skip


def write_inspect(episodes: Iterable[Episode], file: BinaryIO) -> int:
    """The whole document; returns the number of samples."""
    count = 0
    for episode in episodes:
        head = _head(episode) if not count else b","
        file.write(head + _bytes(_sample(episode)))
        count += 1
    if not count:
        raise LogError("no episode to export")
    file.write(b"]}\n")
    return count


def _head(first: Episode) -> bytes:
    model = next((turn.model for turn in first.turns if turn.model), None) or "unknown"
    created = _time(first.started.time if first.started else _times(first)[0])
    spec = {
        "created": created,
        "task": "marft_agents",
        "dataset": {"name": "marft_agents"},
        "model": f"vllm/{model}",
        "config": {},
    }
    document = {
        "version": 2,
        "status": "success",
        "eval": spec,
        "plan": {"name": "recorded", "steps": []},
        "stats": {"started_at": created, "completed_at": created},
    }
    text = json.dumps(document)
    return text[:-1].encode() + b',"samples":['


def _sample(episode: Episode) -> JsonDict:
    times = _times(episode)
    turns = [turn for turn in episode.turns if turn.error is None]
    scores: JsonDict = {}
    if episode.team_reward is not None:
        scores["reward"] = {"value": episode.team_reward}
    for agent, value in episode.agent_rewards.items():
        scores[f"reward of {agent}"] = {"value": value}
    return {
        "id": episode.episode_id,
        "epoch": 1,
        "input": as_text(episode.task) or "",
        "target": "",
        "messages": [_message(m) for m in turns[-1].messages] if turns else [],
        "output": _output(turns[-1]) if turns else {"model": "", "choices": []},
        "scores": scores,
        "metadata": {
            **episode.metadata,
            "marft": {
                "runtime": episode.started.runtime if episode.started else None,
                "ended": episode.ended.reason if episode.ended else None,
                "turn_rewards": episode.turn_rewards,
            },
        },
        "started_at": _time(times[0]),
        "completed_at": _time(times[-1]),
        "events": _events(episode),
    }


def _events(episode: Episode) -> list[JsonDict]:
    made: list[tuple[datetime, list[JsonDict]]] = [(t.time, _turn(t)) for t in episode.turns]
    made += [(t.time, [_tool(n, t)]) for n, t in enumerate(episode.tools)]
    return [event for _, events in sorted(made, key=lambda pair: pair[0]) for event in events]


def _turn(turn: Turn) -> list[JsonDict]:
    """The agent's span with the call in it."""
    time, span = _time(turn.time), turn.turn_id
    sampling = {name: getattr(turn.sampling, name) for name in _GENERATE}
    call: JsonDict = {
        "event": "model",
        "span_id": span,
        "timestamp": time,
        "model": f"vllm/{turn.model or 'unknown'}",
        "role": turn.agent,
        "input": [_message(message) for message in turn.messages],
        "tools": [],
        "tool_choice": "auto",
        "config": {k: v for k, v in sampling.items() if v is not None},
        "output": _output(turn),
        "error": turn.error,
        "cache": "read" if turn.cached else None,
        "working_time": turn.latency_s,
        "metadata": {
            "marft": {
                "turn_id": turn.turn_id,
                "kind": turn.kind,
                "step": turn.step,
                "depends_on": turn.depends_on,
                "selected_by": turn.selected_by,
                "parent_turn": turn.parent_turn,
                "prompt_token_ids": turn.prompt_token_ids,
                "token_ids": turn.token_ids,
                "logprob_mode": turn.logprob_mode,
                "adapter_start": turn.adapter_start,
                "adapter_end": turn.adapter_end,
                "edited_text": turn.edited_text,
                "left_out": turn.untrainable_reason,
            }
        },
    }
    begin = {"event": "span_begin", "id": span, "name": turn.agent, "type": "agent"}
    end = {"event": "span_end", "id": span}
    stamp = {"span_id": span, "timestamp": time}
    parent = {"parent_id": turn.parent_turn}
    return [begin | stamp | parent, call, end | stamp]


def _output(turn: Turn) -> JsonDict:
    message: JsonDict = {"role": "assistant", "content": turn.text or "", "source": "generate"}
    if turn.tool_calls:
        message["tool_calls"] = [_call(call) for call in turn.tool_calls]
    choice: JsonDict = {
        "message": message,
        "stop_reason": _STOPS.get(turn.finish_reason or "", "unknown"),
    }
    if turn.token_ids and turn.logprobs and len(turn.token_ids) == len(turn.logprobs):
        pairs = zip(turn.token_ids, turn.logprobs, strict=True)
        choice["logprobs"] = {"content": [{"token": str(t), "logprob": p} for t, p in pairs]}
    inputs, outputs = len(turn.prompt_token_ids or ()), len(turn.token_ids or ())
    return {
        "model": turn.adapter_end or turn.model or "",
        "choices": [] if turn.error is not None else [choice],
        "usage": {
            "input_tokens": inputs,
            "output_tokens": outputs,
            "total_tokens": inputs + outputs,
        },
        "time": turn.latency_s,
        "error": turn.error,
    }


def _message(message: Mapping[str, Any]) -> JsonDict:
    role = str(message.get("role"))
    out: JsonDict = {"content": as_text(message.get("content")) or ""}
    match role:
        case "system" | "developer":
            out["role"] = "system"
        case "assistant":
            out["role"] = "assistant"
            calls = message.get("tool_calls")
            if isinstance(calls, list) and calls:
                out["tool_calls"] = [_call(call) for call in calls]
        case "tool" | "function":
            out["role"] = "tool"
            out["tool_call_id"] = as_text(message.get("tool_call_id"))
        case _:
            out["role"] = "user"
    if message.get("name"):
        out["metadata"] = {"name": message["name"]}
    return out


def _call(call: Any) -> JsonDict:
    fields: Any = call if isinstance(call, dict) else {}
    function: Any = fields.get("function") if isinstance(fields.get("function"), dict) else {}
    made: JsonDict = {
        "id": str(fields.get("id") or ""),
        "function": str(function.get("name") or ""),
        "type": "function",
    }
    return made | {"arguments": _object(function.get("arguments"))}


def _object(arguments: Any) -> JsonDict:
    """Arguments as an object; what is none goes under ``arguments``."""
    found = arguments
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments)
        except ValueError:
            found = None
    if isinstance(found, dict):
        return {str(key): value for key, value in found.items()}
    return {} if arguments in (None, "") else {"arguments": arguments}


def _tool(number: int, tool: ToolEvent) -> JsonDict:
    made: JsonDict = {
        "event": "tool",
        "timestamp": _time(tool.time),
        "type": "function",
        "id": tool.call_id or f"tool-{number}",
        "function": tool.name,
        "arguments": _object(tool.arguments),
        "result": as_text(tool.result) or "",
        "agent": tool.agent,
    }
    if not tool.ok:
        made |= {"failed": True, "error": {"type": "unknown", "message": made["result"]}}
    return made


def _times(episode: Episode) -> list[datetime]:
    borders = [event.time for event in (episode.started, episode.ended) if event is not None]
    inner = [*episode.turns, *episode.tools, *episode.humans, *episode.rewards]
    return sorted([*borders, *(event.time for event in inner)])


def _time(time: datetime) -> str:
    return time.isoformat()


def _bytes(value: JsonDict) -> bytes:
    text = json.dumps(_finite(value), default=str, separators=(",", ":"), allow_nan=False)
    return text.encode()


def _finite(value: Any) -> Any:
    """JSON has no infinity; log-probabilities of minus infinity become the lowest there are."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return -9999.0 if value < 0 else None
    return value
