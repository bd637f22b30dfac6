"""Finding every agent and chat client below a wrapped object.

Invariant: an agent gets one seat per recorder; walking the same objects again, or others that share
agents with them, only adds what the agents are there. Objects are changed by instance attributes
only, which ``close`` puts back.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from agent_framework import (
    ContextProvider,
    Executor,
    FunctionTool,
    SupportsAgentRun,
    Workflow,
)

from marft_agents.recording import (
    EpisodeHandle,
    IntegrationError,
    KnownDistribution,
    MarftRecorder,
    TurnKind,
    installed_runtime,
)
from marft_agents_agent_framework.client import (
    is_client,
    own_client,
    say_uncaptured,
    sdk_clients,
    seat_of,
    seated,
)
from marft_agents_agent_framework.observe import know
from marft_agents_agent_framework.runs import patch_run
from marft_agents_agent_framework.seats import Binding, Group, Place, Seat

KNOWN = (KnownDistribution("agent-framework-core", "1.9", "2"),)


@dataclass(frozen=True)
class Role:
    """What a thing found is in the object that holds it."""

    owner: str
    kind: TurnKind = "act"
    place: Place | None = None
    leads: Group | None = None


@dataclass
class Walk:
    binding: Binding
    visited: set[int] = field(default_factory=set[int])
    seats: list[Seat] = field(default_factory=list[Seat])

    def visit(self, obj: Any, role: Role) -> None:
        """Go through ``obj`` and everything in it."""
        if isinstance(obj, FunctionTool):
            obj = obj.func
        if isinstance(obj, Workflow):
            self._workflow(obj, role)
        elif isinstance(obj, SupportsAgentRun):
            self._agent(obj, role)
        elif is_function(obj):
            self._once(obj, lambda: self._each(captured(obj), role))
        elif is_part(obj):
            self._clients(obj, role)
            self._once(obj, lambda: self._each(held(obj), role))

    def _each(self, found: Iterator[Any], role: Role) -> None:
        for obj in list(found):
            self.visit(obj, role)

    def _once(self, obj: Any, action: Callable[[], None]) -> None:
        if id(obj) not in self.visited:
            self.visited.add(id(obj))
            action()

    def _workflow(self, workflow: Any, role: Role) -> None:
        if id(workflow) in self.visited:
            return
        self.visited.add(id(workflow))
        group = Group([role.place] if role.place else [])
        for name, executor in workflow.executors.items():
            here = Role(name, place=Place(group, name))
            bases = {base.__name__ for base in type(executor).__mro__}
            if "AgentBasedGroupChatOrchestrator" in bases:
                here = Role(name, "select", leads=group)
            elif "BaseGroupChatOrchestrator" in bases:
                here = Role(name, "orchestrate", leads=group)
            before = len(self.seats)
            self.visit(executor, here)
            for target in getattr(executor, "_handoff_targets", None) or ():
                for seat in self.seats[before:]:
                    seat.handoffs[_handoff_tool(target)] = target

    def _agent(self, agent: Any, role: Role) -> None:
        role = replace(role, owner=str(agent.name or agent.id))
        if not agent.name:
            self._say_nameless(agent)
        found = self._clients(agent, role)
        self._once(agent, lambda: self._inside(agent, role, found))

    def _inside(self, agent: Any, role: Role, found: bool) -> None:
        inner = [*held(agent), *tools(agent)]
        for tool in tools(agent):
            if isinstance(tool, FunctionTool) and _is_agent(tool):
                for seat in self.seats[-1:]:
                    seat.agent_tools.add(tool.name)
        for obj in inner:
            nested = isinstance(obj, FunctionTool) or is_function(obj)
            self.visit(obj, Role(role.owner) if nested else role)
        if not found and not inner:
            self.binding.recorder.core.safety.warn_once(
                ("no client", type(agent)),
                f"marft-agents: agent {role.owner!r} is a {type(agent).__module__}."
                f"{type(agent).__qualname__} without a chat client that could be recorded; what it"
                " says is not logged as turns; give it an agent_framework.Agent with"
                " OpenAIChatCompletionClient inside to train it",
            )

    def _clients(self, holder: Any, role: Role) -> bool:
        """Put every chat client that ``holder`` has into a seat; whether it has any."""
        found = False
        for name, value in list(vars(holder).items()):
            if not is_client(value):
                continue
            found = True
            client, seat = own_client(value), seat_of(value)
            if seat is None:
                kind: TurnKind = "summary" if is_strategy(holder) else role.kind
                seat = Seat(self.binding.recorder, role.owner, kind)
                self.binding.patches.set(holder, name, seated(client, seat))
                know(seat)
                if _responses(client) or not list(sdk_clients(client)):
                    say_uncaptured(seat, client)
                self._each(held(client), role)
            elif seat.recorder is not self.binding.recorder:
                raise IntegrationError(
                    f"{seat.name!r} is still recorded by another MarftRecorder; close that one"
                    " first"
                )
            self._settle(seat, role)
        return found

    def _settle(self, seat: Seat, role: Role) -> None:
        self.seats.append(seat)
        if role.place is not None and role.place not in seat.places:
            seat.places.append(role.place)
        if role.leads is not None and role.leads not in seat.leads:
            seat.kind = role.kind
            seat.leads.append(role.leads)

    def _say_nameless(self, agent: Any) -> None:
        self.binding.recorder.core.safety.warn_once(
            ("no name", agent.id),
            f"marft-agents: an agent without a name is recorded under its id {agent.id!r}, which"
            " is another one in every process, so its turns cannot be gathered for training; give"
            " it one: Agent(..., name='planner')",
        )


def is_function(obj: Any) -> bool:
    return inspect.isfunction(obj) or inspect.ismethod(obj)


def is_strategy(obj: Any) -> bool:
    """Whether ``obj`` makes a conversation shorter."""
    return "Strategy" in type(obj).__name__ and callable(obj)


def is_part(obj: Any) -> bool:
    """Whether ``obj`` is something of Agent Framework that may hold agents or clients."""
    if isinstance(obj, Executor | ContextProvider) or is_strategy(obj):
        return True
    names = {base.__name__ for base in type(obj).__mro__}
    return bool(names & {"MagenticManagerBase", "FunctionalWorkflow", "StepWrapper"})


def _interesting(obj: Any) -> bool:
    if isinstance(obj, type):
        return False
    return isinstance(obj, Workflow | SupportsAgentRun | FunctionTool) or is_part(obj)


def held(obj: Any) -> Iterator[Any]:
    """Agents, workflows, functions and parts among the attributes of ``obj``."""
    for name, value in list(vars(obj).items()):
        if name.startswith("_marft"):
            continue
        for item in _items(value):
            if _interesting(item) or (is_function(item) and name in ("_func", "_original_func")):
                yield item


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from cast("Mapping[Any, Any]", value).values()
    elif isinstance(value, list | tuple | set):
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


def tools(agent: Any) -> list[Any]:
    options: Any = getattr(agent, "default_options", None)
    found: Any = options.get("tools") if isinstance(options, Mapping) else None
    return [t for t in _items(found) if isinstance(t, FunctionTool)]


def _is_agent(tool: FunctionTool) -> bool:
    """Whether a tool is what ``as_tool`` makes of an agent."""
    return "as_tool" in str(getattr(tool.func, "__qualname__", ""))


def _responses(client: Any) -> bool:
    return any(base.__name__ == "RawOpenAIChatClient" for base in type(client).__mro__)


def _handoff_tool(target: str) -> str:
    from agent_framework_orchestrations._handoff import get_handoff_tool_name

    return get_handoff_tool_name(target)


def wrap_root(
    obj: Any,
    recorder: MarftRecorder,
    *,
    end: Literal["auto", "terminated"] = "auto",
    on_end: Callable[[EpisodeHandle, Any], object] | None = None,
) -> None:
    """Walk ``obj`` and make its runs episodes; of a builder, those of what it builds."""
    binding = Binding(recorder, installed_runtime("agent-framework", KNOWN), end, on_end)
    runs = isinstance(obj, Workflow | SupportsAgentRun) or _is_functional(obj)
    if not runs and not callable(getattr(obj, "build", None)):
        kind = f"{type(obj).__module__}.{type(obj).__qualname__}"
        raise IntegrationError(
            f"cannot record an object of type {kind}; of Agent Framework, pass a workflow, an agent"
            " or a builder (GroupChatBuilder, SequentialBuilder, HandoffBuilder, …)"
        )
    before = getattr(getattr(obj, "run" if runs else "build"), "marft_binding", None)
    if isinstance(before, Binding) and before.recorder is recorder:
        return
    try:
        if runs:
            Walk(binding).visit(obj, Role(str(getattr(obj, "name", None) or "agent")))
            patch_run(obj, binding)
        else:
            _patch_build(obj, binding)
    except Exception:
        binding.release()
        raise
    recorder.keep(binding)


def _is_functional(obj: Any) -> bool:
    return type(obj).__name__ == "FunctionalWorkflow"


def _patch_build(builder: Any, binding: Binding) -> None:
    original = builder.build

    def build(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        recorder = binding.recorder
        if not recorder.core.closed:
            wrap_root(made, recorder, end=cast("Any", binding.end), on_end=binding.on_end)
        return made

    patched: Any = functools.wraps(original)(build)
    patched.marft_binding = binding
    binding.patches.set(builder, "build", patched)
