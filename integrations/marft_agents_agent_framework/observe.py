"""What happens in a reply besides the model's calls: tools, handoffs, approvals, old history.

Invariant: everything is read from the messages that Agent Framework hands on anyway; a result is
recorded once per episode, by the call that it answers, and only when that call was made in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from marft_agents.recording import LiveEpisode, MarftRecorder
from marft_agents_agent_framework.seats import Seat, Speech
from marft_agents_agent_framework.words import contents, spoken

HANDOFF = "handoff_to_"
_names: weakref.WeakKeyDictionary[MarftRecorder, set[str]] = weakref.WeakKeyDictionary()


def know(seat: Seat) -> None:
    """Remember that an agent of this name is recorded."""
    _names.setdefault(seat.recorder, set()).add(seat.name)


def tools(speech: Speech, messages: Sequence[Any]) -> None:
    """Record the tool results in ``messages`` that are new."""
    many = list(messages)
    calls = {c.call_id: c for c in contents(many, "function_call")}
    for result in contents(many, "function_result"):
        turn_id = _asked_in(speech.episode, result.call_id)
        if turn_id is None or not speech.episode.first_time(f"tool {turn_id} {result.call_id}"):
            continue
        call = calls.get(result.call_id)
        name = str(getattr(call, "name", None) or "tool")
        handoff = name.startswith(HANDOFF)
        speech.episode.tool(
            name,
            agent=speech.name,
            call_id=result.call_id,
            arguments=getattr(call, "arguments", None),
            result=result.result,
            ok=result.exception is None,
            environment=not handoff and name not in speech.seat.agent_tools,
        )
        target = speech.seat.handoffs.get(name)
        if target is not None:
            for place in speech.seat.places:
                place.group.choose(speech.episode, turn_id, target)


def _asked_in(episode: LiveEpisode, call_id: str | None) -> str | None:
    """The turn of this episode that made a tool call."""
    if not call_id:
        return None
    with episode.lock:
        found = episode.ledger.link([{"role": "tool", "tool_call_id": call_id}])
    return found[-1] if found else None


def approvals(episode: LiveEpisode, messages: Sequence[Any]) -> None:
    """Record what humans decided about tool calls."""
    for answer in contents(list(messages), "function_approval_response"):
        human(episode, answer)


def human(episode: LiveEpisode, answer: Any) -> None:
    """Record what a human answered. A decision comes by more than one way, and counts once."""
    decision = getattr(answer, "type", None) == "function_approval_response"
    if not decision or episode.first_time(f"approval {answer.id} {answer.approved}"):
        episode.human(None, spoken(answer))


def history(speech: Speech, messages: Sequence[Any]) -> None:
    """Warn once about replies of recorded agents that this episode knows nothing of."""
    seat, episode = speech.seat, speech.episode
    if episode in seat.met:
        return
    seat.met.add(episode)
    known = _names.get(seat.recorder, set())
    for message in messages:
        text, author = (message.text or "").strip(), message.author_name
        if str(message.role) != "assistant" or not text or author not in known:
            continue
        with episode.lock:
            found = episode.ledger.link([{"role": "assistant", "content": text, "name": author}])
        if not found:
            speech.safety.warn_once(
                ("history", seat.name),
                f"marft-agents: agent {seat.name!r} was given words of {author!r} that were not"
                " said in this episode: a workflow, once built, and a session keep what was said"
                " in earlier runs; build the workflow (or make the session) anew for each run, or"
                " put the runs that belong together into one `with recorder.episode():`",
            )
            return
