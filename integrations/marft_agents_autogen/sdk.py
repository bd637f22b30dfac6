"""The openai SDK objects under a model client, where requests are captured.

Invariant: a client is only looked into, never changed; one without an SDK object inside is said to
be uncaptured when it answers, not here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

from autogen_core.models import ChatCompletionClient

from marft_agents_autogen.seats import Seat


def from_openai(obj: Any) -> bool:
    """Whether a class of the openai SDK is among the bases of ``obj``; asks nothing of ``obj``."""
    return any(base.__module__.split(".")[0] == "openai" for base in type(obj).__mro__)


def is_sdk(obj: Any) -> bool:
    """Whether ``obj`` is an SDK client with chat completions: OpenAI's, Azure's, or a stand-in."""
    return hasattr(obj, "_client") and hasattr(getattr(obj, "chat", None), "completions")


def sdk_clients(client: Any, depth: int = 0) -> Iterator[Any]:
    """The SDK objects under a model client, through caches, fallbacks and other wrappers."""
    if depth > 4:
        return
    for value in list(getattr(client, "__dict__", {}).values()):
        if isinstance(value, dict):
            held: Iterable[Any] = list(cast("dict[Any, Any]", value).values())
        else:
            held = (
                list(cast("Iterable[Any]", value)) if isinstance(value, list | tuple) else [value]
            )
        for inner in held:
            if from_openai(inner) and is_sdk(inner):
                yield inner
            elif isinstance(inner, ChatCompletionClient):
                yield from sdk_clients(inner, depth + 1)


def capture_sdk(seat: Seat, client: Any) -> None:
    """See to it that the requests of a model client are captured; asking again costs little."""
    for sdk in sdk_clients(client):
        seat.recorder.capture(sdk)
