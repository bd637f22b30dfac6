"""Finding the agents below a wrapped object, and putting the recorder on them.

Invariant: each agent gets one middleware per recorder; an agent that another open recorder records
is refused before anything is changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

from ag2 import Agent

from marft_agents.recording import Call, EpisodeHandle, IntegrationError, MarftRecorder
from marft_agents_ag2.binding import Binding
from marft_agents_ag2.channels import channels_of
from marft_agents_ag2.clients import RecordingConfig
from marft_agents_ag2.middleware import RecordingMiddleware
from marft_agents_ag2.turns import Turn, parent_of_new_channel


def wrap_root(
    obj: Any,
    recorder: MarftRecorder,
    runtime: str,
    *,
    end: Literal["auto", "terminated"] = "auto",
    on_end: Callable[[EpisodeHandle, Any], object] | None = None,
) -> None:
    """Record an agent or a hub."""
    hub = _hub(obj)
    if not isinstance(obj, Agent) and hub is None:
        kind = f"{type(obj).__module__}.{type(obj).__qualname__}"
        raise IntegrationError(
            f"cannot record an object of type {kind}; of AG2, pass an ag2.Agent, or the"
            " ag2.network Hub that the agents are registered with"
        )
    agents = [a for root in ([obj] if hub is None else _registered(obj)) for a in below(root)]
    _refuse_others(agents, recorder)
    binding = Binding(recorder, runtime, end, on_end)
    recorder.keep(binding)
    for agent in agents:
        record_agent(agent, binding)
    if hub is not None:
        _record_hub(obj, hub, binding)


def _refuse_others(agents: list[Any], recorder: MarftRecorder) -> None:
    for agent in agents:
        for factory in _ours(agent):
            if factory.binding.recorder is not recorder:
                raise IntegrationError(
                    f"agent {agent.name!r} is still recorded by another MarftRecorder; close that"
                    " one first"
                )


def _ours(agent: Any) -> list[RecordingMiddleware]:
    return [m for m in agent._middleware if isinstance(m, RecordingMiddleware) and m.binding.open]


def record_agent(agent: Any, binding: Binding) -> None:
    """Put the recorder's middleware before all others of ``agent``, unless it is there."""
    if _ours(agent):
        return
    ours = RecordingMiddleware(binding, str(agent.name), _delegations(agent))
    agent.insert_middleware(ours)
    held = agent._middleware
    binding.undo.append(lambda: held.remove(ours) if ours in held else None)
    tasks = getattr(agent, "_task_config", None)
    if tasks is not None:
        config = tasks.config or agent.config
        subtask = replace(tasks, config=RecordingConfig(config, _subtask))
        binding.patches.set(agent, "_task_config", subtask)
    for strategy in _strategies(agent):
        config = RecordingConfig(strategy._config, _summary)
        binding.patches.set(strategy, "_config", config)


def _delegations(agent: Any) -> frozenset[str]:
    """Names of tools behind which an agent is."""
    tools = [tool for tool in agent.tools if isinstance(_agent_behind(tool), Agent)]
    return frozenset(str(getattr(tool, "name", "")) for tool in tools)


def _subtask(turn: Turn) -> Call:
    return turn.call(subtask=True)


def _summary(turn: Turn) -> Call:
    return turn.call("summary")


def _strategies(agent: Any) -> Iterator[Any]:
    """What compacts the agent's history or keeps its memory with a model of its own."""
    for factory in agent._middleware:
        config = getattr(factory, "config", None)
        for strategy in (getattr(config, "compact", None), getattr(factory, "_strategy", None)):
            held = getattr(strategy, "_config", None)
            if hasattr(held, "create") and not isinstance(held, RecordingConfig):
                yield strategy


def below(root: Any) -> Iterator[Any]:
    """``root`` and the agents behind its tools, each once."""
    seen: set[int] = set()
    waiting: list[Any] = [root]
    while waiting:
        agent = waiting.pop(0)
        if not isinstance(agent, Agent) or id(agent) in seen:
            continue
        seen.add(id(agent))
        yield agent
        waiting += [_agent_behind(tool) for tool in agent.tools]


def _agent_behind(tool: Any) -> Any:
    """The agent of a delegation tool; where the tool does not name it, its closure does."""
    named = getattr(tool, "agent", None)
    if named is not None:
        return named
    function: Any = getattr(getattr(tool, "model", None), "call", None)
    while function is not None and not getattr(function, "__closure__", None):
        function = getattr(function, "__wrapped__", None)
    for cell in getattr(function, "__closure__", None) or ():
        if isinstance(cell.cell_contents, Agent):
            return cell.cell_contents
    return None


def _hub(obj: Any) -> Any:
    """The hub of a hub, or of a client of one in this process."""
    if hasattr(obj, "register_listener"):
        return obj
    inner = getattr(obj, "_hub", None)
    return inner if hasattr(inner, "register_listener") else None


def _registered(obj: Any) -> Iterator[Any]:
    for client in [obj, *getattr(obj, "_owned_clients", ())]:
        handles: dict[str, Any] = getattr(client, "_clients", None) or {}
        for handle in handles.values():
            yield getattr(handle, "agent", None)


def _record_hub(obj: Any, hub: Any, binding: Binding) -> None:
    """Hear of the hub's channels, and record agents that are registered later."""
    recorder = binding.recorder
    channels_of(recorder).listen(hub, binding, parent_of_new_channel)
    original = obj.register
    if getattr(original, "marft_recorder", None) is recorder:
        return

    @functools.wraps(original)
    async def register(agent: Any, *args: Any, **kwargs: Any) -> Any:
        client = await original(agent, *args, **kwargs)
        if binding.open:
            with recorder.core.safety.guard("record an agent that joins a hub"):
                agents = list(below(agent))
                _refuse_others(agents, recorder)
                for found in agents:
                    record_agent(found, binding)
        return client

    vars(register)["marft_recorder"] = recorder
    binding.patches.set(obj, "register", register)
