"""What the objects of Agent Framework hold, looked at from outside.

Invariant: only attributes, containers one level deep, and the variables of functions are looked at;
nothing is called and nothing changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, cast

from agent_framework import (
    AgentMiddleware,
    ChatMiddleware,
    ContextProvider,
    Executor,
    FunctionMiddleware,
    FunctionTool,
    Workflow,
)

from marft_agents.recording import TurnKind

_PARTS = (Executor, ContextProvider, AgentMiddleware, ChatMiddleware, FunctionMiddleware)
_NAMED = frozenset({"MagenticManagerBase", "FunctionalWorkflow", "StepWrapper"})
_FUNCTIONS = frozenset({"_func", "_original_func", "middleware"})


def class_names(obj: Any) -> frozenset[str]:
    return frozenset(base.__name__ for base in type(obj).__mro__)


def is_function(obj: Any) -> bool:
    return inspect.isfunction(obj) or inspect.ismethod(obj)


def is_agent(obj: Any) -> bool:
    """``SupportsAgentRun``, asked of the class: the app's objects may do things when looked at."""
    kind = type(obj)
    return all(callable(getattr(kind, n, None)) for n in ("run", "create_session", "get_session"))


def is_part(obj: Any) -> bool:
    """Whether ``obj`` is something of Agent Framework that may hold agents or clients."""
    return isinstance(obj, _PARTS) or _is_strategy(obj) or bool(class_names(obj) & _NAMED)


def _is_strategy(obj: Any) -> bool:
    """Whether ``obj`` makes a conversation shorter."""
    return "Strategy" in type(obj).__name__ and callable(obj)


def kind_inside(obj: Any, otherwise: TurnKind) -> TurnKind:
    """What a model call is for that ``obj`` makes with a client of its own."""
    if _is_strategy(obj):
        return "summary"
    if isinstance(obj, AgentMiddleware | ChatMiddleware | FunctionMiddleware):
        return "guard"
    return "reflect" if isinstance(obj, ContextProvider) else otherwise


def _interesting(obj: Any) -> bool:
    if isinstance(obj, type):
        return False
    return isinstance(obj, Workflow | FunctionTool) or is_agent(obj) or is_part(obj)


def attributes(obj: Any) -> list[tuple[str, Any]]:
    return list(getattr(obj, "__dict__", {}).items())


def held(obj: Any) -> Iterator[Any]:
    """Agents, workflows, tools, functions and parts among the attributes of ``obj``."""
    for name, value in attributes(obj):
        for item in _items(value):
            if _interesting(item) or (name in _FUNCTIONS and is_function(item)):
                yield item
    yield from tools(obj)


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from cast("Mapping[Any, Any]", value).values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from cast("list[Any]", value)
    else:
        yield value


def captured(function: Any) -> Iterator[Any]:
    """Agents and the like that a function refers to."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    try:
        variables = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # a cell that is still empty, or no Python function
        return
    yield from filter(_interesting, variables.nonlocals.values())
    yield from filter(_interesting, variables.globals.values())


def tools(agent: Any) -> list[FunctionTool]:
    options: Any = getattr(agent, "default_options", None)
    found: Any = options.get("tools") if isinstance(options, Mapping) else None
    return [t for t in _items(found) if isinstance(t, FunctionTool)]


def is_agent_tool(tool: FunctionTool) -> bool:
    """Whether a tool is what ``as_tool`` makes of an agent."""
    return "as_tool" in str(getattr(tool.func, "__qualname__", ""))
