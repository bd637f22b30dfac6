"""Finding every agent that a wrapped one can hand off to or call.

Invariant: walking the same agents again adds nothing; an agent that another open recorder records
is refused before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from agents import Agent, Handoff

from marft_agents.recording import EpisodeHandle, IntegrationError, MarftRecorder
from marft_agents_openai_agents.binding import Binding, binding_of
from marft_agents_openai_agents.doors import DOORS
from marft_agents_openai_agents.guards import watch_guardrails
from marft_agents_openai_agents.models import adopt_model
from marft_agents_openai_agents.runner import open_runner
from marft_agents_openai_agents.tools import agent_behind


def wrap_root(
    obj: Any,
    recorder: MarftRecorder,
    runtime: str,
    *,
    end: Literal["auto", "terminated"] = "auto",
    on_end: Callable[[EpisodeHandle, Any], object] | None = None,
) -> None:
    """Make each outermost run of ``obj``, or of an agent below it, an episode."""
    if not isinstance(obj, Agent):
        kind = f"{type(obj).__module__}.{type(obj).__qualname__}"
        raise IntegrationError(
            f"cannot record an object of type {kind}; of the OpenAI Agents SDK, pass the"
            " agents.Agent that Runner.run starts with"
        )
    agents = list(reachable(obj))
    for agent in agents:
        other = binding_of(agent)
        if other is not None and other.recorder is not recorder:
            raise IntegrationError(
                f"agent {agent.name!r} is still recorded by another MarftRecorder; close that one"
                " first"
            )
    user = DOORS.enter(recorder)
    open_runner()
    binding = binding_of(obj)
    if binding is None or binding.root != id(obj):
        binding = Binding(recorder, runtime, user, end, on_end, id(obj))
        binding.mark(obj)
        recorder.keep(binding)
    for agent in agents:
        watch_guardrails(agent)
        adopt_model(agent.model)
        if binding_of(agent) is None:
            binding.mark(agent)


def reachable(root: Any) -> Iterator[Any]:
    """``root`` and the agents below it, each once: handoffs, and agents behind tools."""
    seen: set[int] = set()
    waiting: list[Any] = [root]
    while waiting:
        agent = waiting.pop(0)
        if not isinstance(agent, Agent) or id(agent) in seen:
            continue
        seen.add(id(agent))
        yield agent
        for handoff in getattr(agent, "handoffs", None) or ():
            waiting.append(_target(handoff) if isinstance(handoff, Handoff) else handoff)
        for tool in getattr(agent, "tools", None) or ():
            waiting.append(agent_behind(tool))


def _target(handoff: Any) -> Any:
    """The agent of a ``Handoff``; older versions keep it in a closure only."""
    reference = getattr(handoff, "_agent_ref", None)
    if reference is not None:
        return reference()
    for cell in getattr(handoff.on_invoke_handoff, "__closure__", None) or ():
        if isinstance(cell.cell_contents, Agent):
            return cell.cell_contents
    return None
