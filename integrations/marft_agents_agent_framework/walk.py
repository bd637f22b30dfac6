"""Finding every agent and chat client below a wrapped object.

Invariant: a client of an agent gets one seat, and keeps it; walking the same objects again, or
others that share agents with them, only adds what is new. Objects are changed by instance
attributes only, which ``close`` puts back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from agent_framework import FunctionTool, Workflow

from marft_agents.recording import IntegrationError, TurnKind
from marft_agents_agent_framework.client import (
    calls_responses,
    is_client,
    own_client,
    say_uncaptured,
    sdk_clients,
    seat_of,
    seated,
)
from marft_agents_agent_framework.observe import HANDOFF, know
from marft_agents_agent_framework.parts import (
    attributes,
    captured,
    class_names,
    held,
    is_agent,
    is_agent_tool,
    is_function,
    is_part,
    kind_inside,
    tools,
)
from marft_agents_agent_framework.seats import Binding, Group, Place, Seat

_groups: weakref.WeakKeyDictionary[Workflow, Group] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Role:
    """What something is in the object that holds it."""

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
            self._once(obj, lambda: self._workflow(obj, role))
        elif is_agent(obj):
            self._agent(obj, role)
        elif is_function(obj):
            self._once(obj, lambda: self._each(captured(obj), role))
        elif is_part(obj):
            self._clients(obj, replace(role, kind=kind_inside(obj, role.kind)))
            self._once(obj, lambda: self._each(held(obj), role))

    def _each(self, found: Iterator[Any], role: Role) -> None:
        for obj in list(found):
            alone = isinstance(obj, FunctionTool) or is_function(obj)
            self.visit(obj, Role(role.owner) if alone else role)

    def _once(self, obj: Any, action: Callable[[], None]) -> None:
        if id(obj) not in self.visited:
            self.visited.add(id(obj))
            action()

    def _workflow(self, workflow: Workflow, role: Role) -> None:
        group = _groups.setdefault(workflow, Group())
        if role.place is not None and role.place not in group.outer:
            group.outer.append(role.place)
        for name, executor in workflow.executors.items():
            names, here = class_names(executor), Role(name, place=Place(group, name))
            if "AgentBasedGroupChatOrchestrator" in names:
                here = Role(name, "select", leads=group)
            elif "BaseGroupChatOrchestrator" in names:
                here = Role(name, "orchestrate", leads=group)
            before = len(self.seats)
            self.visit(executor, here)
            handoffs = _handoffs(executor)
            for seat in self.seats[before:]:
                seat.handoffs.update(handoffs)

    def _agent(self, agent: Any, role: Role) -> None:
        role = replace(role, owner=str(agent.name or agent.id))
        if not agent.name:
            self._say_nameless(agent)
        seats = self._clients(agent, role)
        for seat in seats:
            seat.agent_tools.update(t.name for t in tools(agent) if is_agent_tool(t))
        inner = list(held(agent))
        self._once(agent, lambda: self._each(iter(inner), role))
        if not seats and not inner:
            self._say_foreign(agent, role.owner)

    def _clients(self, holder: Any, role: Role) -> list[Seat]:
        """Put every chat client that ``holder`` has into a seat."""
        seats: list[Seat] = []
        for name, value in attributes(holder):
            if not is_client(value):
                continue
            seat = seat_of(value)
            if seat is None:
                seat = self._seat(holder, name, own_client(value), role)
            elif seat.recorder is not self.binding.recorder:
                raise IntegrationError(
                    f"{seat.name!r} is still recorded by another MarftRecorder; close that one"
                    " first"
                )
            _settle(seat, role)
            seats.append(seat)
        self.seats += seats
        return seats

    def _seat(self, holder: Any, name: str, client: Any, role: Role) -> Seat:
        seat = Seat(self.binding.recorder, role.owner, role.kind)
        self.binding.patches.set(holder, name, seated(client, seat))
        know(seat)
        if calls_responses(client) or not list(sdk_clients(client)):
            say_uncaptured(seat, client)
        self._each(held(client), role)
        return seat

    def _say_nameless(self, agent: Any) -> None:
        self.binding.recorder.core.safety.warn_once(
            ("no name", agent.id),
            f"marft-agents: an agent without a name is recorded under its id {agent.id!r}, which"
            " is another one in every process, so its turns cannot be gathered for training; give"
            " it one: Agent(..., name='planner')",
        )

    def _say_foreign(self, agent: Any, name: str) -> None:
        kind = type(agent)
        self.binding.recorder.core.safety.warn_once(
            ("no client", kind),
            f"marft-agents: agent {name!r} is a {kind.__module__}.{kind.__qualname__} without a"
            " chat client that could be recorded; what it says is not logged as turns; to train it,"
            " make it an agent_framework.Agent with an OpenAIChatCompletionClient",
        )


def _settle(seat: Seat, role: Role) -> None:
    if role.place is not None and role.place not in seat.places:
        seat.places.append(role.place)
    if role.leads is not None and role.leads not in seat.leads:
        seat.leads.append(role.leads)
    if seat.kind in ("act", "select", "orchestrate"):  # a participant acts, whatever else it does
        seat.kind = "act" if seat.places else role.kind


def _handoffs(executor: Any) -> dict[str, str]:
    """Tool that hands off → executor that it hands off to."""
    agent: Any = getattr(executor, "_agent", None)
    names = [t.name for t in tools(agent) if t.name.startswith(HANDOFF)]
    targets: list[str] = sorted(getattr(executor, "_handoff_targets", None) or ())
    return {_closest(target, names): target for target in targets if names}


def _closest(target: str, names: list[str]) -> str:
    """The tool for ``target``: later versions replace what is no letter, digit, - or _."""
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "_" for c in target)
    exact = (HANDOFF + target, (HANDOFF + plain)[:64])
    return next((name for name in exact if name in names), exact[0])
