"""Which agents belong to an object that the app wraps.

Invariant: an agent has one seat for one open recorder; wrapping the same again changes nothing.
Agents that only appear while a chat runs are met there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, cast

from autogen import Agent, ConversableAgent, GroupChat

from marft_agents.recording import EpisodeHandle, IntegrationError, MarftRecorder
from marft_agents_classic.agents import adopt
from marft_agents_classic.classes import engage
from marft_agents_classic.seats import Binding, group_of, seat_of


def wrap_root(
    objs: list[Any],
    recorder: MarftRecorder,
    runtime: str,
    *,
    end: Literal["auto", "terminated"] = "auto",
    on_end: Callable[[EpisodeHandle, Any], object] | None = None,
) -> None:
    """Make the chats of every agent in ``objs`` episodes."""
    agents = list({id(a): a for obj in objs for a in _agents(obj)}.values())
    for agent in agents:
        seat = seat_of(agent)
        if seat is not None and seat.recorder is not recorder:
            raise IntegrationError(
                f"{seat.name!r} is still recorded by another MarftRecorder; close that one first"
            )
    if not agents:
        raise IntegrationError("there is no agent to record in what was wrapped")
    if all((seat := seat_of(a)) is not None and seat.wrapped for a in agents):
        return
    binding = Binding(recorder, runtime, end, on_end)
    engage(binding)
    try:
        for agent in agents:
            seat = adopt(agent, binding)
            if seat is not None and not seat.wrapped:
                seat.wrapped, seat.binding = True, binding
                binding.seats.add(seat)
    except Exception:
        binding.release()
        raise
    recorder.keep(binding)


def _agents(obj: Any) -> Iterator[Any]:
    """The agents of an agent, a group chat, a manager or a pattern, inner groups included."""
    if isinstance(obj, GroupChat):
        for agent in cast("list[Any]", obj.agents):
            yield from _agents(agent)
    elif isinstance(obj, ConversableAgent):
        yield obj
        group = group_of(obj)
        if group is not None:
            yield from _agents(group)
        inner = getattr(obj, "chat_manager", None)  # SocietyOfMindAgent
        if isinstance(inner, ConversableAgent):
            yield from _agents(inner)
    elif hasattr(obj, "prepare_group_chat") and hasattr(obj, "agents"):
        for agent in [*obj.agents, getattr(obj, "user_agent", None)]:
            if agent is not None:
                yield from _agents(agent)
    elif isinstance(obj, Agent) and callable(getattr(obj, "generate_reply", None)):
        yield obj
    else:
        kind = f"{type(obj).__module__}.{type(obj).__qualname__}"
        raise IntegrationError(
            f"cannot record an object of type {kind}; of classic AutoGen, pass an agent, a"
            " GroupChatManager, a GroupChat, a pattern or a list of agents"
        )
