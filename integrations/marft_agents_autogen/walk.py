"""Finding every agent, team and model client below a wrapped object.

Invariant: each object is patched once per recorder; walking the same tree again, at each run of its
root, only adds what the app has put there since.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from autogen_agentchat.agents import AssistantAgent, CodeExecutorAgent, SocietyOfMindAgent
from autogen_agentchat.base import Team
from autogen_agentchat.teams import SelectorGroupChat, Swarm

from marft_agents.recording import ConfigError, EpisodeHandle, IntegrationError, MarftRecorder
from marft_agents_autogen.compat import FILTER_AGENT
from marft_agents_autogen.holders import patch_clients, patch_manager
from marft_agents_autogen.kinds import NEITHER, is_member
from marft_agents_autogen.runs import patch_runs
from marft_agents_autogen.seats import SEAT, Binding, Role, Seat, seat_of
from marft_agents_autogen.speeches import patch_executor, patch_speeches

ENDS = ("auto", "terminated")


def wrap_root(
    obj: Any,
    recorder: MarftRecorder,
    runtime: str,
    *,
    end: str = "auto",
    on_end: Callable[[EpisodeHandle, Any], object] | None = None,
) -> None:
    """Walk ``obj`` and make its runs episodes."""
    if not is_member(obj):
        kind = f"{type(obj).__module__}.{type(obj).__qualname__}"
        raise IntegrationError(
            f"cannot record an object of type {kind}; of AutoGen AgentChat, pass a team"
            " (RoundRobinGroupChat, SelectorGroupChat, Swarm, …) or an agent"
        )
    if end not in ENDS:
        raise ConfigError(f"wrap(..., end={end!r}): end is one of {', '.join(ENDS)}")
    seat = seat_of(obj)
    if seat is not None and seat.root is not None and seat.recorder is recorder:
        return
    binding = Binding(recorder, runtime, end, on_end)
    try:
        seat = walk(obj, binding)
    except Exception:
        binding.release()
        raise
    seat.root = binding
    recorder.keep(binding)


def walk(obj: Any, binding: Binding, seen: set[int] | None = None) -> Seat:
    """The seat of ``obj``; everything below it is recorded, too."""
    seen = set() if seen is None else seen
    seat = seat_of(obj)
    if seat is not None and seat.recorder is not binding.recorder:
        raise IntegrationError(
            f"{seat.name!r} is still recorded by another MarftRecorder; close that one first"
        )
    if seat is None:
        seat = _seat(obj, binding)
        binding.patches.set(obj, SEAT, seat)
        patch_runs(obj, seat, binding, functools.partial(_again, obj))
        if seat.is_team:
            _patch_managers(obj, seat, binding)
        else:
            patch_speeches(obj, seat, binding)
    if id(obj) in seen:
        return seat
    seen.add(id(obj))
    patch_clients(obj, seat, binding)
    if isinstance(obj, CodeExecutorAgent):
        patch_executor(obj, seat, binding)
    for child in _children(obj):
        walk(child, binding, seen)
    seat.handoffs = frozenset(getattr(obj, "_handoffs", None) or ())
    for name, runner in _runners(obj):
        seat.runners[name] = walk(runner, binding, seen)
    return seat


def _again(obj: Any, binding: Binding) -> None:
    """Before a run: what the app has added to the tree since it was walked."""
    walk(obj, binding)


def _seat(obj: Any, binding: Binding) -> Seat:
    is_team = isinstance(obj, Team)
    manager = getattr(obj, "_group_chat_manager_name", None) if is_team else None
    label = getattr(obj, "name", None) or manager or type(obj).__name__
    return Seat(
        binding.recorder,
        name=str(manager or label),
        role=_role(obj, is_team),
        label=str(label),
        team_id=getattr(obj, "_team_id", None) if is_team else None,
    )


def _role(obj: Any, is_team: bool) -> Role:
    if is_team:
        if isinstance(obj, SelectorGroupChat):
            return "selector"
        return "swarm" if isinstance(obj, Swarm) else "team"
    if isinstance(obj, SocietyOfMindAgent):
        return "society"
    if isinstance(obj, FILTER_AGENT):
        return "filter"
    return "assistant" if isinstance(obj, AssistantAgent | CodeExecutorAgent) else "agent"


def _children(obj: Any) -> Iterator[Any]:
    """Agents and teams held by ``obj``, also in lists and dicts."""
    for value in list(vars(obj).values()):
        items: Iterable[Any] = (value,)
        if isinstance(value, dict):
            items = list(cast("dict[Any, Any]", value).values())
        elif isinstance(value, list | tuple | set | frozenset):
            items = list(cast("Iterable[Any]", value))
        for item in items:
            if type(item) not in NEITHER and is_member(item):
                yield item


def _runners(obj: Any) -> Iterator[tuple[str, Any]]:
    """Agents and teams behind the tools of an agent, with the tool's name."""
    benches: Any = getattr(obj, "_workbench", None) or ()
    for bench in (obj, *(benches if isinstance(benches, list | tuple) else (benches,))):
        renamed: dict[str, Any] = getattr(bench, "_tool_overrides", None) or {}
        for tool in getattr(bench, "_tools", None) or ():
            shown = getattr(renamed.get(tool.name), "name", None) or tool.name
            for value in list(getattr(tool, "__dict__", {}).values()):
                if is_member(value):
                    yield str(shown), value


def _patch_managers(team: Any, seat: Seat, binding: Binding) -> None:
    """The group chat manager holds clients of its own, from the team's first run on."""
    runtime, topic = (
        getattr(team, "_runtime", None),
        getattr(team, "_group_chat_manager_topic_type", None),
    )
    live: dict[Any, Any] = getattr(runtime, "_instantiated_agents", None) or {}
    for agent_id, manager in list(live.items()):  # the team has run before
        if topic is not None and getattr(agent_id, "type", None) == topic:
            _manager(manager, seat, binding)
    make = getattr(team, "_create_group_chat_manager_factory", None)
    if make is None:
        return
    guard = binding.recorder.core.safety.guard

    @functools.wraps(make)
    def make_factory(*args: Any, **kwargs: Any) -> Any:
        factory = make(*args, **kwargs)

        @functools.wraps(factory)
        def build(*args: Any, **kwargs: Any) -> Any:
            manager = factory(*args, **kwargs)
            if not seat.closed:
                with guard("record a group chat manager"):
                    _manager(manager, seat, binding)
            return manager

        return build

    binding.patches.set(team, "_create_group_chat_manager_factory", make_factory)


def _manager(manager: Any, seat: Seat, binding: Binding) -> None:
    patch_manager(manager, seat, binding)
    for child in _children(manager):
        walk(child, binding)
