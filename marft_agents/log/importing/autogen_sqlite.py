"""The database that ``autogen.runtime_logging`` of classic AutoGen and AG2 writes.

Every model call is there with the messages it was sent, so turns are exact. Calls of one logging
session are one episode: the database does not tell where one chat ends and the next begins.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from marft_agents.errors import LogError
from marft_agents.log.importing.chats import Made
from marft_agents.log.importing.draft import Draft, Unreadable, as_time, content_text, wire_calls
from marft_agents.schema import JsonDict, Sampling, TurnKind

_SELECTORS = frozenset({"speaker_selection_agent", "checking_agent"})
_SAMPLING = (
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "max_tokens", "seed",
)  # fmt: skip


def autogen_sqlite(path: Path, prefix: str, begin: datetime) -> Iterator[Made]:
    """One episode a logging session; the number of a bad row stands for its line."""
    try:
        with _opened(path) as db:
            sessions = [
                row[0]
                for row in db.execute(
                    "SELECT session_id FROM chat_completions GROUP BY session_id ORDER BY MIN(id)"
                )
            ]
            spans = {name: _span(db, name) for name in sessions}
            for number, session in enumerate(sessions, 1):
                draft = Draft(f"{prefix}-{number}", "import autogen-sqlite", begin)
                draft.metadata = {"session_id": session}
                yield from _add_session(db, draft, session, _functions(db, session, spans))
                if draft.turns:
                    yield draft
    except sqlite3.Error as error:
        raise LogError(f"cannot read {path} as a database of runtime logging: {error}") from error


def _opened(path: Path) -> sqlite3.Connection:
    # Read only, and not even a journal beside it.
    return sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True)


def _span(db: sqlite3.Connection, session: str) -> tuple[str, str]:
    query = "SELECT MIN(start_time), MAX(end_time) FROM chat_completions WHERE session_id IS ?"
    first, last = db.execute(query, (session,)).fetchone()
    return str(first), str(last)


def _functions(
    db: sqlite3.Connection, session: str, spans: dict[str, tuple[str, str]]
) -> list[tuple[Any, ...]]:
    """Functions that were called in the time of this session; of no other, where they overlap."""
    known = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'function_calls'").fetchone()
    if known is None:
        return []
    rows = db.execute(
        "SELECT timestamp, source_name, function_name, args, returns FROM function_calls"
        " ORDER BY timestamp"
    ).fetchall()

    def owner(time: str) -> str:
        inside = [name for name, (first, last) in spans.items() if first <= time <= last]
        before = [name for name, (first, _) in spans.items() if first <= time]
        return (inside or before or list(spans))[-1]

    return [row for row in rows if owner(str(row[0])) == session]


def _add_session(
    db: sqlite3.Connection, draft: Draft, session: str, functions: list[tuple[Any, ...]]
) -> Iterator[tuple[int, str]]:
    query = (
        "SELECT id, source_name, request, response, is_cached, start_time, end_time"
        " FROM chat_completions WHERE session_id IS ? ORDER BY end_time, id"
    )
    for row in db.execute(query, (session,)):
        number, end = int(row[0]), str(row[6])
        while functions and str(functions[0][0]) <= end:
            _add_function(draft, functions.pop(0))
        try:
            _add_call(draft, row)
        except Unreadable as error:
            yield number, str(error)
    for function in functions:
        _add_function(draft, function)


def _add_function(draft: Draft, row: Sequence[Any]) -> None:
    time, agent, name, arguments, returns = row
    draft.tool(
        str(name),
        agent=agent or None,
        arguments=_loads(arguments),
        result=_loads(returns),
        time=as_time(time),
    )


def _add_call(draft: Draft, row: Sequence[Any]) -> None:
    _, source, raw_request, raw_response, cached, start, end = row
    request, response = _loads(raw_request), _loads(raw_response)
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
        raise Unreadable("the request has no messages")
    messages = [m for m in cast("list[Any]", request["messages"]) if isinstance(m, dict)]
    agent = str(source or "") or "unnamed"
    first, last = as_time(start), as_time(end)
    if draft.task is None:
        asked = [m for m in messages if m.get("role") == "user"]
        draft.task = content_text(asked[0].get("content")) if asked else None
    draft.turn(
        agent,
        cast("list[JsonDict]", messages),
        time=last,
        kind=_kind(agent),
        sampling=Sampling(**{k: request[k] for k in _SAMPLING if _number(request.get(k))}),
        model=request["model"] if isinstance(request.get("model"), str) else None,
        latency_s=(last - first).total_seconds() if first and last else None,
        cached=bool(cached),
        **_answer(response),
    )


def _answer(response: Any) -> dict[str, Any]:
    """What came back: a completion, or ``{"response": text}`` where there was none."""
    fields = cast("JsonDict", response) if isinstance(response, dict) else {}
    choices = fields.get("choices")
    choice = cast("list[Any]", choices)[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        text = fields.get("response")
        return {"text": None, "error": f"no completion: {text}"[:500]}
    chosen = cast("JsonDict", choice)
    message = chosen.get("message")
    said = cast("JsonDict", message) if isinstance(message, dict) else {}
    reason, name = chosen.get("finish_reason"), fields.get("id")
    return {
        "text": content_text(said.get("content")) or None,
        "tool_calls": wire_calls(said),
        "finish_reason": reason if isinstance(reason, str) else None,
        "response_id": name if isinstance(name, str) else None,
    }


def _kind(agent: str) -> TurnKind:
    return "select" if agent in _SELECTORS else "act"


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _loads(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text
