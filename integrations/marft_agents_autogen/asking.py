"""One question to a model, from its beginning in a frame to the turns it has become.

Invariant: a call is the agent's whose client it goes through; where the agent is acting says which
kind of call it is, who selected the agent, and inside whose turn all this happens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from marft_agents.recording import Call, LiveEpisode, TurnKind, Unseen
from marft_agents_autogen.frames import Frame, Run, Speech, here, own_frame
from marft_agents_autogen.sdk import capture_sdk, sdk_clients
from marft_agents_autogen.seats import Seat

_TEAM_KINDS: dict[str, TurnKind] = {
    "selector": "select",
    "swarm": "orchestrate",
    "team": "orchestrate",
    "society": "summary",
}


class Ask:
    """A model call under way; ``frame``: whose turns it adds to."""

    def __init__(self, call: Call, frame: Frame | None, client: Any, messages: Any) -> None:
        self.call = call
        self._frame = frame
        self._client = client
        self._messages = messages

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        try:
            self._finish(result, error)
        except Exception as problem:
            self.call.episode.core.safety.failed("record a model call", problem)

    def _finish(self, result: Any, error: BaseException | None) -> None:
        call = self.call
        unseen = None if call.sent else _unseen(self._messages, result, self._client)
        call.finish(error, unseen)
        if call.turn_ids and self._frame is not None:
            self._add(self._frame, call.turn_ids, isinstance(_content(result), list))
        if unseen is not None and error is None:
            self._say_cached() if unseen.cached else self._say_uncaptured()

    def _add(self, frame: Frame, turn_ids: list[str], tools: bool) -> None:
        if frame.seat.name == self.call.agent:
            if isinstance(frame, Speech):
                frame.turns += turn_ids
                frame.asking = turn_ids[-1] if tools else None
            elif isinstance(frame, Run) and frame.seat.is_team:
                frame.chose(turn_ids[-1])
        frame.made(turn_ids[-1])

    def _say_cached(self) -> None:
        agent = self.call.agent
        self.call.episode.core.safety.warn_once(
            ("cached", agent),
            f"marft-agents: agent {agent!r} was answered from a cache; cached replies are"
            " logged and never trained on, and after a swap the cache still answers with what the"
            " old adapter said; record without a cache, or give each adapter version its own",
        )

    def _say_uncaptured(self) -> None:
        kind = type(self._client)
        self.call.episode.core.safety.warn_once(
            ("uncaptured", kind),
            f"marft-agents: agent {self.call.agent!r} uses {kind.__module__}.{kind.__qualname__},"
            " whose calls do not go through an openai SDK client; its turns are logged without"
            " tokens and cannot be trained on; use"
            " autogen_ext.models.openai.OpenAIChatCompletionClient",
        )


def begin(
    seat: Seat, client: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, shared: bool
) -> Ask | None:
    """A call through the seat's client starts; ``None`` outside any episode."""
    messages = kwargs["messages"] if "messages" in kwargs else args[0] if args else ()
    place = here(seat)
    frame = own_frame(seat, place)
    if shared:  # it is the speaker's; outside any speech it may be anybody's
        frame = place or frame
        if frame is None:
            return None
        seat = frame.seat
    around = frame or place
    episode = around.episode if around else seat.recorder.current()
    if episode is None:
        _say_outside(seat)
        return None
    capture_sdk(seat, client)
    return Ask(_call(seat, episode, frame, around, kwargs), around, client, messages)


def _call(
    seat: Seat,
    episode: LiveEpisode,
    frame: Frame | None,
    around: Frame | None,
    kwargs: Mapping[str, Any],
) -> Call:
    parent = frame.parent() if frame else around.as_parent() if around else (None, None)
    selected_by: str | None = None
    delivered: list[tuple[str, str]] = []
    if isinstance(frame, Speech):
        selected_by, delivered = frame.selected_by, frame.delivered()
    elif isinstance(frame, Run):
        selected_by = frame.take_inherited()
    return Call(
        episode,
        seat.name,
        _kind(seat, frame, kwargs),
        selected_by=selected_by,
        delivered=delivered,
        parent_agent=parent[0],
        parent_turn=parent[1],
    )


def _kind(seat: Seat, frame: Frame | None, kwargs: Mapping[str, Any]) -> TurnKind:
    """AutoGen's own agents offer tools when they act, also none, and not when they look back."""
    looks_back = seat.role == "assistant" and "tools" not in kwargs
    if looks_back and isinstance(frame, Speech) and frame.turns:
        return "reflect"
    return _TEAM_KINDS.get(seat.role, "act")


def _say_outside(seat: Seat) -> None:
    if any(frame.open for frame in seat.open):
        seat.recorder.core.safety.warn_once(
            ("no context", seat.name),
            f"marft-agents: agent {seat.name!r} is in several runs at once and called its model"
            " from a thread that does not say which one, so the call is not recorded; use"
            " asyncio.to_thread, which takes the context along",
        )
        return
    seat.recorder.core.safety.warn_once(
        ("no run", seat.name),
        f"marft-agents: agent {seat.name!r} called its model outside a recorded run and the call"
        " is not recorded; run the wrapped team, or use `with recorder.episode():`",
    )


def _content(result: Any) -> Any:
    return getattr(result, "content", None)


def _unseen(messages: Any, result: Any, client: Any) -> Unseen:
    """A call without HTTP request, as far as AutoGen's objects tell.

    A replay client calls its answers cached; without an SDK object or a store they are scripted.
    """
    text: str | None = None
    calls: list[dict[str, Any]] | None = None
    content = _content(result)
    if isinstance(content, str):
        text = content
    elif isinstance(content, list):
        calls = [_wire_call(c) for c in cast("list[Any]", content)]
    wire = [m for message in messages for m in _wire_messages(message)]
    cached = bool(getattr(result, "cached", False))
    cached = cached and (hasattr(client, "store") or any(True for _ in sdk_clients(client)))
    return Unseen(wire, text, calls, cached=cached)


def _wire_call(call: Any) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _wire_messages(message: Any) -> Iterator[dict[str, Any]]:
    """An AutoGen message in the form it has on the wire, nearly."""
    kind, content = type(message).__name__, message.content
    if kind == "SystemMessage":
        yield {"role": "system", "content": content}
    elif kind == "AssistantMessage" and isinstance(content, list):
        calls = [_wire_call(c) for c in cast("list[Any]", content)]
        yield {"role": "assistant", "content": None, "tool_calls": calls}
    elif kind == "AssistantMessage":
        yield {"role": "assistant", "name": message.source, "content": content}
    elif kind == "FunctionExecutionResultMessage":
        for result in content:
            yield {"role": "tool", "tool_call_id": result.call_id, "content": result.content}
    elif isinstance(content, list):
        parts = cast("list[Any]", content)
        texts = [{"type": "text", "text": p if isinstance(p, str) else str(p)} for p in parts]
        yield {"role": "user", "name": message.source, "content": texts}
    else:
        yield {"role": "user", "name": message.source, "content": content}
