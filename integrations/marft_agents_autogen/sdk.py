"""The openai SDK objects under a model client, where requests are captured.

Invariant: a client is only looked into, never changed; one without an SDK object inside is said to
be uncaptured when it answers, not here.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from marft_agents.recording import Claim
from marft_agents_autogen.kinds import is_client
from marft_agents_autogen.seats import Seat


def from_openai(obj: Any) -> bool:
    """Whether a class of the openai SDK is among the bases of ``obj``; asks nothing of ``obj``."""
    return _of_openai(type(obj))


@functools.lru_cache(maxsize=1024)
def _of_openai(kind: type[Any]) -> bool:
    """Asked per class: before each run, every attribute of every agent is looked at."""
    return any(base.__module__.split(".")[0] == "openai" for base in kind.__mro__)


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
            elif is_client(inner):
                yield from sdk_clients(inner, depth + 1)


def capture_sdk(seat: Seat, client: Any) -> None:
    """See to it that the requests of a model client are captured; asking again costs little."""
    if isinstance(seat.captured, _Captured) and seat.captured.holds(client):
        return
    claims = [(sdk, seat.recorder.capture(sdk)) for sdk in sdk_clients(client)]
    seat.captured = _Captured.of(client, *claims[0]) if len(claims) == 1 else None


@dataclass(slots=True)
class _Captured:
    """A client of AutoGen's own, as it was when its one SDK object was found and captured."""

    client: weakref.ref[Any]
    kinds: list[type[Any]]
    name: str
    sdk: weakref.ref[Any]
    claim: Claim

    @classmethod
    def of(cls, client: Any, sdk: Any, claim: Claim) -> _Captured | None:
        """``None`` for a client that has to be looked through each time."""
        if not type(client).__module__.startswith("autogen_ext.models."):
            return None
        fields: dict[str, Any] = getattr(client, "__dict__", {})
        name = next((name for name, value in fields.items() if value is sdk), None)
        if name is None:
            return None
        kinds = list(map(type, fields.values()))
        return cls(weakref.ref(client), kinds, name, weakref.ref(sdk), claim)

    def holds(self, client: Any) -> bool:
        """Whether all of that is so still."""
        if self.client() is not client or self.claim not in self.claim.hook.claims:
            return False
        fields: dict[str, Any] = client.__dict__
        sdk = fields.get(self.name)
        if sdk is None or sdk is not self.sdk() or list(map(type, fields.values())) != self.kinds:
            return False
        return getattr(sdk._client.send, "marft_hook", None) is self.claim.hook
