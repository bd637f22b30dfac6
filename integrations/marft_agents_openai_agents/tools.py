"""Tools behind which an agent is.

Invariant: a tool counts as one only by what ``Agent.as_tool`` made; newer versions name the agent,
older ones keep it in the closure of the SDK's own function.
"""

from __future__ import annotations

from typing import Any

from agents import Agent


def agent_behind(tool: Any) -> Agent[Any] | None:
    """The agent that ``Agent.as_tool`` put behind ``tool``."""
    named = getattr(tool, "_agent_instance", None)
    if isinstance(named, Agent):
        return named
    return _enclosed(getattr(tool, "on_invoke_tool", None))


def _enclosed(function: Any, depth: int = 0) -> Agent[Any] | None:
    own = getattr(function, "__module__", None) == Agent.__module__
    for cell in getattr(function, "__closure__", None) or ():
        try:
            inner = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if own and isinstance(inner, Agent):
            return inner
        found = _enclosed(inner, depth + 1) if callable(inner) and depth < 4 else None
        if found is not None:
            return found
    return None
