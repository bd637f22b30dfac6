"""An episode in the making, from what another program kept of it.

Invariant: a turn holds the messages that its agent was sent, as far as they are known, and no token
ids: text is never encoded here. Its ``depends_on`` names the earlier turns whose words or calls
stand in those messages. Times that a format does not tell rise by a millisecond: order is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from marft_agents.schema import (
    AnyEvent,
    EpisodeEnded,
    EpisodeStarted,
    HumanEvent,
    JsonDict,
    RewardEvent,
    ToolEvent,
    Turn,
)

_TICK = timedelta(milliseconds=1)


class Unreadable(ValueError):
    """Why a piece of a file is left out."""


class Draft:
    """Events of one episode, in order; ``events`` gives them with their borders."""

    def __init__(self, episode_id: str, runtime: str, begin: datetime) -> None:
        self.id = episode_id
        self.task: Any = None
        self.metadata: JsonDict = {}
        self.detail: str | None = None
        self._runtime = runtime
        self._clock = begin
        self._begin = begin
        self._events: list[AnyEvent] = []
        self._said: dict[str, list[tuple[str, str]]] = {}
        self._called: dict[str, str] = {}
        self._turns = 0

    @property
    def turns(self) -> int:
        return self._turns

    def tick(self, time: datetime | None = None) -> datetime:
        """The time of the next event: the one given, never earlier than the last."""
        if time is not None and not self._events and time < self._begin:
            self._begin = self._clock = time - _TICK
        self._clock = max(self._clock + _TICK, time or self._clock)
        return self._clock

    def turn(
        self,
        agent: str,
        messages: Sequence[JsonDict],
        text: str | None,
        *,
        tool_calls: list[JsonDict] | None = None,
        time: datetime | None = None,
        **fields: Any,
    ) -> Turn:
        """Add a model call by ``agent``, given the ``messages`` it was sent."""
        turn = Turn(
            episode_id=self.id,
            turn_id=f"{self.id}-t{self._turns}",
            time=self.tick(time),
            agent=agent,
            index=self._turns,
            step=self._turns,
            messages=list(messages),
            text=text,
            tool_calls=tool_calls or None,
            depends_on=self._depends_on(messages),
            **fields,
        )
        self._turns += 1
        self._events.append(turn)
        if text and text.strip():
            self._said.setdefault(text.strip(), []).append((turn.turn_id, agent))
        for call in tool_calls or ():
            if isinstance(call.get("id"), str):
                self._called[call["id"]] = turn.turn_id
        return turn

    def tool(self, name: str, *, time: datetime | None = None, **fields: Any) -> None:
        """Add the answer of a tool."""
        self._events.append(
            ToolEvent(
                episode_id=self.id, time=self.tick(time), name=name, index=self._turns, **fields
            )
        )

    def human(self, name: str | None, text: str | None, time: datetime | None = None) -> None:
        """Add what a person said after the task."""
        self._events.append(
            HumanEvent(
                episode_id=self.id, time=self.tick(time), name=name, text=text, index=self._turns
            )
        )

    def events(self, reward: float | None = None) -> Iterator[AnyEvent]:
        """Everything, from start to end."""
        yield EpisodeStarted(
            episode_id=self.id,
            time=self._begin,
            task=self.task,
            metadata=self.metadata,
            runtime=self._runtime,
        )
        yield from self._events
        if reward is not None:
            yield RewardEvent(episode_id=self.id, time=self.tick(), value=reward, source="import")
        yield EpisodeEnded(episode_id=self.id, time=self.tick(), detail=self.detail)

    def _depends_on(self, messages: Sequence[JsonDict]) -> list[str]:
        """Earlier turns in the messages: by tool call, or by text and, where told, by name."""
        found: dict[str, None] = {}
        for message in messages:
            call_id = message.get("tool_call_id")
            if isinstance(call_id, str) and call_id in self._called:
                found[self._called[call_id]] = None
            said = self._said.get(content_text(message.get("content")).strip(), [])
            if said and message.get("role") != "system":
                named = [turn_id for turn_id, agent in said if agent == message.get("name")]
                found[(named or [said[-1][0]])[-1]] = None
        return sorted(found, key=lambda name: int(name.rpartition("-t")[2]))


def content_text(content: Any) -> str:
    """The text of a message's content, with parts that are no text left out."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = [part for part in cast("list[Any]", content) if isinstance(part, dict | str)]
    return "\n".join(
        part if isinstance(part, str) else str(part.get("text") or "") for part in parts
    )


def wire_calls(message: Mapping[str, Any]) -> list[JsonDict]:
    """The tool calls of a chat message; an old ``function_call`` counts as one."""
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        found = [cast("JsonDict", c) for c in cast("list[Any]", calls) if isinstance(c, dict)]
        if found:
            return found
    old = message.get("function_call")
    if isinstance(old, dict):
        return [{"type": "function", "function": cast("JsonDict", old)}]
    return []


def as_time(value: Any) -> datetime | None:
    """A time written as text in ISO form; one without a zone is taken as UTC."""
    if not isinstance(value, str):
        return None
    try:
        time = datetime.fromisoformat(value)
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def add_chat(draft: Draft, messages: Sequence[JsonDict], *, agent: str | None = None) -> None:
    """Add a chat as one model was sent it: a turn for every reply, with all that stands before it.

    Raises:
        Unreadable: a message is no chat message, or there is no reply.
    """
    names: dict[str, str] = {}
    for place, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str):
            raise Unreadable(f"message {place} has no role")
        if draft.task is None and role == "user":
            draft.task = content_text(message.get("content")) or None
        elif role == "user":
            draft.human(_name(message), content_text(message.get("content")))
        elif role in ("tool", "function"):
            call_id = message.get("tool_call_id")
            name = message.get("name") or names.get(str(call_id)) or "tool"
            content = message.get("content")
            draft.tool(
                str(name), call_id=call_id if isinstance(call_id, str) else None, result=content
            )
        elif role == "assistant":
            calls = wire_calls(message)
            for call in calls:
                function = call.get("function")
                if isinstance(function, dict):
                    names[str(call.get("id"))] = str(cast("JsonDict", function).get("name"))
            if message.get("weight") != 0:  # zero asks not to learn this reply
                text = content_text(message.get("content")) or None
                seen = [_plain(m) for m in messages[:place]]
                draft.turn(agent or _name(message) or "assistant", seen, text, tool_calls=calls)
        elif role not in ("system", "developer"):
            raise Unreadable(f"message {place} has the unknown role {role!r}")
    if not draft.turns:
        raise Unreadable("no reply of an assistant to learn from")


def _plain(message: JsonDict) -> JsonDict:
    """The message as a server takes it; the weight is for the trainer."""
    return {key: value for key, value in message.items() if key != "weight"}


def _name(message: Mapping[str, Any]) -> str | None:
    name = message.get("name")
    return name if isinstance(name, str) and name else None
