"""Finding every agent, team and model client below a wrapped object.

Invariant: each object is patched once per recorder; walking the same tree again, or a tree that
shares agents with it, only adds the new root's binding to the seats.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any, Literal, cast

from autogen_agentchat.base import ChatAgent, Team
from autogen_agentchat.teams import SelectorGroupChat
from autogen_core.models import ChatCompletionClient

from marft_agents.recording import EpisodeHandle, IntegrationError, MarftRecorder, TurnKind
from marft_agents_autogen.client import RecordingClient, not_recorded, sdk_clients
from marft_agents_autogen.observe import observe
from marft_agents_autogen.runs import patch_runs
from marft_agents_autogen.seats import SEAT, Binding, Seat, close_stream, seat_of


def wrap_root(
    obj: Any,
    recorder: MarftRecorder,
    *,
    end: Literal["auto", "terminated"] = "auto",
    on_end: Callable[[EpisodeHandle, Any], object] | None = None,
) -> None:
    """Walk ``obj`` and make its runs episodes."""
    if not isinstance(obj, ChatAgent | Team):
        kind = f"{type(obj).__module__}.{type(obj).__qualname__}"
        raise IntegrationError(
            f"cannot record an object of type {kind}; of AutoGen AgentChat, pass a team"
            " (RoundRobinGroupChat, SelectorGroupChat, Swarm, …) or an agent"
        )
    seat = seat_of(obj)
    if seat is not None and seat.is_root and seat.recorder is recorder:
        return
    binding = Binding(recorder, end, on_end)
    try:
        seat = _walk(obj, binding)
        patch_runs(obj, seat, binding)
    except Exception:
        binding.release()
        raise
    seat.is_root = True
    recorder.keep(binding)


def _walk(obj: Any, binding: Binding, team: Seat | None = None) -> Seat:
    seat = seat_of(obj)
    if seat is None:
        seat = Seat(binding.recorder, _name(obj))
        binding.patches.set(obj, SEAT, seat)
        seat.bindings.append(binding)
        if isinstance(obj, Team):
            _patch_team(obj, seat, binding)
        else:
            _patch_agent(obj, seat, binding)
    elif seat.recorder is not binding.recorder:
        raise IntegrationError(
            f"{seat.name!r} is still recorded by another MarftRecorder; close that one first"
        )
    elif binding not in seat.bindings:
        seat.bindings.append(binding)
    else:
        return seat
    if team is not None and team not in seat.teams:
        seat.teams.append(team)
    for child in _children(obj):
        _walk(child, binding, seat if isinstance(obj, Team) else None)
    return seat


def _name(obj: Any) -> str:
    manager = getattr(obj, "_group_chat_manager_name", None)
    return str(manager if isinstance(obj, Team) and manager else obj.name)


def _children(obj: Any) -> Iterator[Any]:
    """Agents and teams held by ``obj``: participants, inner teams, agents behind tools."""
    for value in vars(obj).values():
        items: Sequence[Any] = (
            cast("Sequence[Any]", value) if isinstance(value, list | tuple) else (value,)
        )
        for item in items:
            if isinstance(item, ChatAgent | Team):
                yield item
    for tool in _tools(obj):
        runner = getattr(tool, "_task_runner", None)
        if isinstance(runner, ChatAgent | Team):
            yield runner


def _tools(obj: Any) -> Iterator[Any]:
    benches: Any = getattr(obj, "_workbench", None) or ()
    for bench in benches if isinstance(benches, list | tuple) else (benches,):
        yield from getattr(bench, "_tools", None) or ()


def _patch_team(team: Any, seat: Seat, binding: Binding) -> None:
    kind: TurnKind = "select" if isinstance(team, SelectorGroupChat) else "orchestrate"
    _patch_clients(team, seat, binding, kind)
    runtime = getattr(team, "_runtime", None)
    live: dict[Any, Any] = getattr(runtime, "_instantiated_agents", None) or {}
    topic = getattr(team, "_group_chat_manager_topic_type", None)
    for agent_id, manager in live.items():  # the team has run before
        if topic is not None and getattr(agent_id, "type", None) == topic:
            _patch_clients(manager, seat, binding, kind)


def _patch_clients(holder: Any, seat: Seat, binding: Binding, kind: TurnKind) -> None:
    for name, value in list(vars(holder).items()):
        client = not_recorded(value) if isinstance(value, ChatCompletionClient) else None
        if client is None:
            continue
        for sdk in sdk_clients(client):
            binding.recorder.capture(sdk)
        binding.patches.set(holder, name, RecordingClient(client, seat, kind))


def _patch_agent(agent: Any, seat: Seat, binding: Binding) -> None:
    _patch_clients(agent, seat, binding, "act")
    runners = {t.name for t in _tools(agent) if getattr(t, "_task_runner", None) is not None}
    handoffs: dict[str, Any] = getattr(agent, "_handoffs", None) or {}
    seat.own_tools = frozenset(runners | set(handoffs))
    original_stream, original, reset = agent.on_messages_stream, agent.on_messages, agent.on_reset
    guard = binding.recorder.core.safety.guard

    @functools.wraps(original_stream)
    async def on_messages_stream(
        messages: Sequence[Any], *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        with guard("see what an agent is given"):
            seat.begin_speaking(messages)
        stream = original_stream(messages, *args, **kwargs)
        try:
            async for item in stream:
                with guard("see what an agent does"):
                    observe(agent, seat, item)
                yield item
        finally:
            await close_stream(stream)

    @functools.wraps(original)
    async def on_messages(messages: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        # Agents that stream come through the other door as well; events count once, by id.
        with guard("see what an agent is given"):
            seat.begin_speaking(messages)
        response = await original(messages, *args, **kwargs)
        with guard("see what an agent does"):
            observe(agent, seat, response)
        return response

    @functools.wraps(reset)
    async def on_reset(*args: Any, **kwargs: Any) -> Any:
        seat.delivered.clear()
        return await reset(*args, **kwargs)

    binding.patches.set(agent, "on_messages_stream", on_messages_stream)
    binding.patches.set(agent, "on_messages", on_messages)
    binding.patches.set(agent, "on_reset", on_reset)
