"""AutoGen AgentChat: a team's saved state, and the result of a run.

A result tells what was said, not what each agent was sent: an agent is taken to have been sent all
that was said before, its own words as ``assistant``, the others' as ``user`` with their names. A
saved state holds what each agent kept in its context, and that is what its turns are given. System
messages are in neither.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from marft_agents.errors import LogError
from marft_agents.log.importing.chats import Made
from marft_agents.log.importing.draft import Draft, Unreadable, as_time, content_text
from marft_agents.log.importing.lines import document, rows
from marft_agents.schema import JsonDict

_SPOKEN = frozenset(
    {"TextMessage", "StructuredMessage", "MultiModalMessage", "StopMessage", "HandoffMessage",
     "ToolCallSummaryMessage"}
)  # fmt: skip
"""Messages that the other agents are sent."""
_MADE_BY_CODE = frozenset({"HandoffMessage", "ToolCallSummaryMessage", "StopMessage"})


def agentchat_state(path: Path, prefix: str, begin: datetime) -> Iterator[Made]:
    """``team.save_state()`` as JSON: one episode."""
    state = document(path)
    contexts, threads = dict[str, list[JsonDict]](), list[list[JsonDict]]()
    if isinstance(state, dict):
        _walk("assistant", cast("JsonDict", state), contexts, threads)
    thread = max(threads, key=len, default=[])
    draft = Draft(f"{prefix}-1", "import agentchat-state", begin)
    try:
        if thread:
            add_thread(draft, thread, contexts)
        elif len(contexts) == 1:
            _add_context(draft, *next(iter(contexts.items())))
        else:
            raise Unreadable("no message thread of a team, and no context of one agent")
    except Unreadable as error:
        yield 1, str(error)
        return
    yield draft


def agentchat_result(path: Path, prefix: str, begin: datetime) -> Iterator[Made]:
    """``TaskResult.model_dump_json()``, one document or one a line; or the list of its messages."""
    for line, value in _results_of(path):
        messages = cast("JsonDict", value).get("messages") if isinstance(value, dict) else value
        draft = Draft(f"{prefix}-{line}", "import agentchat-result", begin)
        try:
            add_thread(draft, _messages(messages), {})
        except Unreadable as error:
            yield line, str(error)
            continue
        if isinstance(value, dict):
            reason = cast("JsonDict", value).get("stop_reason")
            draft.detail = reason if isinstance(reason, str) else None
        yield draft


def _results_of(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        whole = document(path)
    except LogError:
        yield from ((line, wrong if value is None else value) for line, value, wrong in rows(path))
        return
    several = isinstance(whole, list) and all("messages" in r for r in _results(whole))
    yield from enumerate(cast("list[Any]", whole), 1) if several else [(1, whole)]


def _messages(value: Any) -> list[JsonDict]:
    if isinstance(value, str):
        raise Unreadable(value)
    items = cast("list[Any]", value) if isinstance(value, list) else []
    if not items or not all(isinstance(i, dict) and "source" in i for i in items):
        raise Unreadable("no list of messages with a source each")
    return cast("list[JsonDict]", items)


def _walk(
    name: str,
    state: Mapping[str, Any],
    contexts: dict[str, list[JsonDict]],
    threads: list[list[JsonDict]],
) -> None:
    """Collect what each agent kept, and the threads of the managers, nested teams included."""
    thread, context = state.get("message_thread"), state.get("llm_context")
    if isinstance(thread, list):
        threads.append([m for m in cast("list[Any]", thread) if isinstance(m, dict)])
    if isinstance(context, dict):
        kept = cast("JsonDict", context).get("messages")
        if isinstance(kept, list):
            found = [cast("JsonDict", m) for m in cast("list[Any]", kept) if isinstance(m, dict)]
            own = [m["source"] for m in found if m.get("type") == "AssistantMessage"]
            contexts[str(own[0]) if own else name] = found
    inner = state.get("agent_states")
    if isinstance(inner, dict):
        for key, value in cast("JsonDict", inner).items():
            if isinstance(value, dict):
                _walk(key.split("/")[0], cast("JsonDict", value), contexts, threads)
    for key in ("agent_state", "inner_team_state"):
        value = state.get(key)
        if isinstance(value, dict):
            _walk(name, cast("JsonDict", value), contexts, threads)


def add_thread(
    draft: Draft, thread: Sequence[JsonDict], contexts: Mapping[str, Sequence[JsonDict]]
) -> None:
    """Add what a team said, in order; the turns of an agent with a context are given that.

    Raises:
        Unreadable: when no model spoke.
    """
    counted = any(message.get("models_usage") for message in thread)
    team = _Team(draft, contexts, counted)
    for message in thread:
        team.add(message)
    if not draft.turns:
        raise Unreadable("no message that a model wrote")


class _Team:
    """A team while its messages come, in order. ``counted``: a model's have their tokens."""

    def __init__(
        self, draft: Draft, contexts: Mapping[str, Sequence[JsonDict]], counted: bool
    ) -> None:
        self._draft = draft
        self._contexts = contexts
        self._counted = counted
        self._place = dict.fromkeys(contexts, 0)
        self._seen: list[tuple[str, JsonDict]] = []
        self._thoughts: dict[str, str | None] = {}

    def add(self, message: JsonDict) -> None:
        source, kind = str(message["source"]), str(message.get("type", "TextMessage"))
        content, time = message.get("content"), as_time(message.get("created_at"))
        if kind == "ThoughtEvent":
            self._thoughts[source] = _text(content)
        elif kind == "ToolCallRequestEvent":
            self._asked_tools(source, _calls(content), time)
        elif kind == "ToolCallExecutionEvent":
            self._tools_answered(source, _results(content), time)
        elif kind in _SPOKEN:
            usage = bool(message.get("models_usage"))
            by_model = usage if self._counted else source != "user"
            self._said(source, kind, _text(content), by_model, time)

    def _asked_tools(self, source: str, calls: list[JsonDict], time: datetime | None) -> None:
        thought = self._thoughts.pop(source, None)
        sent = self._sent(source, calls=calls)
        self._draft.turn(source, sent, thought, tool_calls=calls, time=time)
        own: JsonDict = {"role": "assistant", "content": thought, "tool_calls": calls}
        self._seen.append((source, own))

    def _tools_answered(self, source: str, results: list[JsonDict], time: datetime | None) -> None:
        for result in results:
            self._draft.tool(
                str(result.get("name") or "tool"),
                agent=source,
                call_id=result.get("call_id"),
                result=result.get("content"),
                ok=not result.get("is_error"),
                time=time,
            )
            self._seen.append((source, _tool_message(result)))

    def _said(
        self, source: str, kind: str, text: str | None, by_model: bool, time: datetime | None
    ) -> None:
        draft, by_code = self._draft, kind in _MADE_BY_CODE
        if by_model and not by_code:
            thought = self._thoughts.pop(source, None)
            sent = self._sent(source, text=text)
            draft.turn(source, sent, text, time=time, reasoning=thought)
        elif draft.task is None and not draft.turns:
            draft.task = text
        elif not by_code:
            draft.human(source, text, time)
        self._seen.append((source, {"role": "assistant", "content": text}))

    def _sent(
        self, agent: str, *, text: str | None = None, calls: Sequence[JsonDict] | None = None
    ) -> list[JsonDict]:
        """What stands in the agent's context before it says this, or else all that was said."""
        before = _context_before(self._contexts, self._place, agent, text=text, calls=calls)
        return before if before is not None else _view(agent, self._seen)


def _view(agent: str, seen: Sequence[tuple[str, JsonDict]]) -> list[JsonDict]:
    """What an agent was sent: its own words and tools as they were, and what the others said."""
    out: list[JsonDict] = []
    for source, message in seen:
        if source == agent:
            out.append(message)
        elif message["role"] == "assistant" and "tool_calls" not in message:
            out.append({"role": "user", "content": message["content"], "name": source})
    return out


def _context_before(
    contexts: Mapping[str, Sequence[JsonDict]],
    place: dict[str, int],
    agent: str,
    *,
    text: str | None = None,
    calls: Sequence[JsonDict] | None = None,
) -> list[JsonDict] | None:
    """What stands in the agent's context before the next reply that says this; ``None`` if none."""
    context = contexts.get(agent, ())
    for at in range(place.get(agent, 0), len(context)):
        message = context[at]
        if message.get("type") != "AssistantMessage":
            continue
        content = message.get("content")
        same = _calls(content) == list(calls) if calls else content == text
        if same:
            place[agent] = at + 1
            return [wire for m in context[:at] for wire in _wire(m)]
    return None


def _wire(message: JsonDict) -> Iterator[JsonDict]:
    """A message of a context as a server is sent it."""
    content = message.get("content")
    match message.get("type"):
        case "SystemMessage":
            yield {"role": "system", "content": content}
        case "UserMessage":
            yield {"role": "user", "content": _text(content), "name": message.get("source")}
        case "FunctionExecutionResultMessage":
            yield from (_tool_message(result) for result in _results(content))
        case _:
            calls = _calls(content)
            thought = message.get("thought")
            text = thought if calls else _text(content)
            yield {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def _tool_message(result: Mapping[str, Any]) -> JsonDict:
    return {
        "role": "tool",
        "tool_call_id": result.get("call_id"),
        "content": result.get("content"),
    }


def _add_context(draft: Draft, agent: str, context: Sequence[JsonDict]) -> None:
    """One agent without a team."""
    for at, message in enumerate(context):
        sent = [wire for m in context[:at] for wire in _wire(m)]
        content = message.get("content")
        match message.get("type"):
            case "AssistantMessage":
                calls = _calls(content)
                text = message.get("thought") if calls else _text(content)
                draft.turn(agent, sent, text, tool_calls=calls)
            case "UserMessage" if draft.task is None:
                draft.task = _text(content)
            case "UserMessage":
                draft.human(str(message.get("source")), _text(content))
            case "FunctionExecutionResultMessage":
                for r in _results(content):
                    draft.tool(str(r.get("name") or "tool"), agent=agent, result=r.get("content"))
            case _:
                pass
    if not draft.turns:
        raise Unreadable("no message that a model wrote")


def _calls(content: Any) -> list[JsonDict]:
    items = cast("list[Any]", content) if isinstance(content, list) else []
    return [
        {
            "id": item["id"],
            "type": "function",
            "function": {"name": item["name"], "arguments": item.get("arguments", "")},
        }
        for item in items
        if isinstance(item, dict) and "id" in item and "name" in item
    ]


def _results(content: Any) -> list[JsonDict]:
    items = cast("list[Any]", content) if isinstance(content, list) else []
    return [cast("JsonDict", item) for item in items if isinstance(item, dict)]


def _text(content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list):
        return content_text(content)
    return json.dumps(content, ensure_ascii=False)
