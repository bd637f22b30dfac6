"""Putting stand-ins before the model clients that agents, teams and their managers hold.

Invariant: the app's clients stay as they are, also in a list or dict of the app, where only the
place is taken; what cannot be recorded is said once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, cast

from marft_agents.recording import ConfigError
from marft_agents_autogen.client import RecordingClient, not_recorded, recorder_of, stood_for
from marft_agents_autogen.kinds import NEITHER, is_client, is_member
from marft_agents_autogen.sdk import capture_sdk, from_openai, is_sdk
from marft_agents_autogen.seats import Binding, Seat

_NOTHING_INSIDE = NEITHER - {list, dict}


def patch_clients(holder: Any, seat: Seat, binding: Binding) -> None:
    """Record every model client among the attributes of ``holder``, once."""
    for name, value in _attributes(holder).items():
        if type(value) in _NOTHING_INSIDE:
            continue
        if is_client(value):
            _stand_in(holder, name, value, seat, binding)
        elif isinstance(value, list | dict):
            if _fill(cast("Any", value), seat):
                binding.undo.append(_emptying(weakref.ref(holder), name, seat))
        elif from_openai(value) and not seat.is_team:
            _own_sdk(holder, value, seat)
        elif _of_the_same_code(value, holder):
            _helper(value, seat, binding)


def _helper(value: Any, seat: Seat, binding: Binding) -> None:
    """An object of the app around a client; others may hold it, too, or it may be frozen."""
    for name, client in _attributes(value).items():
        if is_client(client):
            with suppress(Exception):  # said when the agent answers and no call was seen
                weakref.ref(value)
                _stand_in(value, name, client, seat, binding, shared=True)


def _attributes(holder: Any) -> dict[str, Any]:
    """What an object has, and the clients that its class gives it."""
    found: dict[str, Any] = {}
    for base in reversed(type(holder).__mro__):
        for name, value in vars(base).items():
            if type(value) not in NEITHER and is_client(value):
                found[name] = value
    return found | vars(holder)


def _of_the_same_code(value: Any, holder: Any) -> bool:
    """Whether a plain object comes from the package that the app's own ``holder`` comes from."""
    if isinstance(value, type) or is_member(value) or not hasattr(value, "__dict__"):
        return False
    root = type(holder).__module__.split(".")[0]
    return not root.startswith("autogen_") and type(value).__module__.split(".")[0] == root


def _stand_in(
    holder: Any, name: str, value: Any, seat: Seat, binding: Binding, *, shared: bool = False
) -> None:
    client = not_recorded(value)
    if client is not None:
        capture_sdk(seat, client)
        binding.patches.set(holder, name, RecordingClient(client, seat, shared=shared))


def patch_manager(manager: Any, seat: Seat, binding: Binding) -> None:
    """Record a group chat manager, which may hold a stand-in that its team gave it."""
    for name, value in list(vars(manager).items()):
        if is_client(value) and not_recorded(value) is None:
            setattr(manager, name, stood_for(value))
    patch_clients(manager, seat, binding)


def _places(container: Any) -> list[tuple[Any, Any]]:
    pairs: Iterable[Any] = (
        container.items() if isinstance(container, dict) else enumerate(container)
    )
    return list(pairs)


def _fill(container: Any, seat: Seat) -> bool:
    """Stand-ins for the clients in a list or dict; whether there were any."""
    found = False
    for place, value in _places(container):
        client = not_recorded(value) if is_client(value) else None
        if client is not None:
            capture_sdk(seat, client)
            container[place] = RecordingClient(client, seat, shared=True)
            found = True
    return found


def _emptying(holder: weakref.ref[Any], name: str, seat: Seat) -> Any:
    def empty() -> None:
        container = getattr(holder(), name, None)
        if isinstance(container, list | dict):
            for place, value in _places(container):
                if recorder_of(value) is seat.recorder:
                    cast("Any", container)[place] = stood_for(value)

    return empty


def _own_sdk(agent: Any, client: Any, seat: Seat) -> None:
    """An SDK object that an agent holds without a model client around it."""
    if type(agent).__module__.split(".")[0] == "autogen_ext":
        say_other_api(agent, seat)
    elif is_sdk(client):
        seat.own_sdk = True
        with suppress(ConfigError):  # another agent holds it, too; each call is the speaker's
            seat.recorder.capture(client, seat.name)


def say_other_api(agent: Any, seat: Seat) -> None:
    """An agent of AutoGen's own that asks its model in another way."""
    seat.recorder.core.safety.warn_once(
        ("no chat completions", type(agent)),
        f"marft-agents: agent {seat.name!r} is of the class {type(agent).__qualname__}, which does"
        " not use the chat completions API; its model calls are not recorded; use an AssistantAgent"
        " with an OpenAIChatCompletionClient",
    )
