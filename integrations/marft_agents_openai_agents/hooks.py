"""Run hooks that tell the run who speaks, which tools work and who is handed the conversation.

Invariant: the app's own hooks are called as before, with the same arguments, and their exceptions
are theirs.
"""

from __future__ import annotations

from typing import Any

from agents import Handoff, RunHooks

from marft_agents_openai_agents.binding import binding_of
from marft_agents_openai_agents.guards import watch_guardrails
from marft_agents_openai_agents.models import adopt_model
from marft_agents_openai_agents.runs import Run
from marft_agents_openai_agents.tools import agent_behind


class RecordingHooks(RunHooks[Any]):
    """Stands before ``inner``; methods that this version does not know go straight to it."""

    def __init__(self, run: Run, inner: Any) -> None:
        self._run = run
        self._inner: Any = inner if inner is not None else RunHooks[Any]()
        for name in dir(self._inner):
            if name.startswith("on_") and name not in vars(RecordingHooks):
                setattr(self, name, getattr(self._inner, name))

    async def on_agent_start(self, context: Any, agent: Any) -> None:
        self._speaks(agent)
        await self._inner.on_agent_start(context, agent)

    async def on_llm_start(
        self, context: Any, agent: Any, system_prompt: Any, input_items: Any
    ) -> None:
        self._speaks(agent)
        await self._inner.on_llm_start(context, agent, system_prompt, input_items)

    async def on_handoff(self, context: Any, from_agent: Any, to_agent: Any) -> None:
        with self._run.safety.guard("record a handoff"):
            self._run.handed_off(_handoff_names(from_agent), str(to_agent.name))
        await self._inner.on_handoff(context, from_agent, to_agent)

    async def on_tool_start(self, context: Any, agent: Any, tool: Any) -> None:
        self._run.tools[_key(context, tool)] = str(getattr(tool, "name", type(tool).__name__))
        await self._inner.on_tool_start(context, agent, tool)

    async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: Any) -> None:
        with self._run.safety.guard("record a tool"):
            name = str(getattr(tool, "name", type(tool).__name__))
            is_agent = agent_behind(tool) is not None
            self._run.tool_ended(_key(context, tool), name, result, is_agent)
        await self._inner.on_tool_end(context, agent, tool, result)

    def _speaks(self, agent: Any) -> None:
        with self._run.safety.guard("see who speaks"):
            self._run.agent = str(agent.name)
            watch_guardrails(agent)
            adopt_model(getattr(agent, "model", None))
            if binding_of(agent) is None:
                self._run.binding.mark(agent)  # made while running; a later run may start with it


def _key(context: Any, tool: Any) -> str:
    return str(getattr(context, "tool_call_id", None) or f"tool-{id(tool)}")


def _handoff_names(agent: Any) -> set[str]:
    """The tool names by which ``agent`` can hand off."""
    return {
        h.tool_name if isinstance(h, Handoff) else Handoff.default_tool_name(h)
        for h in getattr(agent, "handoffs", ())
    }
