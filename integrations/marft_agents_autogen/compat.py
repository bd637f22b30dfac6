"""What differs between the versions of AgentChat that are recorded, 0.4.9 to 0.7.

Invariant: the rest of the package asks here instead of looking at version numbers; a class that a
version does not have is an empty tuple, which nothing is an instance of.
"""

from __future__ import annotations

import itertools
import weakref
from importlib import import_module
from typing import Any, cast

Classes = tuple[type[Any], ...]


def optional(module: str, name: str) -> Classes:
    """The class for ``isinstance``, or nothing where this version has none."""
    try:
        found = getattr(import_module(module), name, None)
    except ImportError:
        found = None
    return (found,) if isinstance(found, type) else ()


CODE_GENERATION = optional("autogen_agentchat.messages", "CodeGenerationEvent")
CODE_EXECUTION = optional("autogen_agentchat.messages", "CodeExecutionEvent")
FILTER_AGENT = optional("autogen_agentchat.agents", "MessageFilterAgent")

_numbers = itertools.count(1)
_known: dict[int, tuple[weakref.ref[Any], str]] = {}


def message_id(message: Any) -> str:
    """What identifies a message among all of this process; before 0.6 the object itself does."""
    own = getattr(message, "id", None)
    if isinstance(own, str) and own:
        return own
    place = id(message)
    if place not in _known or _known[place][0]() is not message:
        gone = weakref.ref(message, lambda _: _known.pop(place, None))
        _known[place] = (gone, f"message-{next(_numbers)}")
    return _known[place][1]


def message_text(message: Any) -> str:
    """The message as an application would show it."""
    return _text(message, "to_text")


def model_text(message: Any) -> str:
    """The message as a model reads it."""
    return _text(message, "to_model_text")


def _text(message: Any, method: str) -> str:
    render = getattr(message, method, None)
    if render is not None:
        return str(render())
    content = getattr(message, "content", "")
    if isinstance(content, list):
        parts = cast("list[Any]", content)
        return "\n".join(part if isinstance(part, str) else "<image>" for part in parts)
    return str(content)
