"""Log-probabilities that only the recorder asked for, taken out of the SDK's objects again.

Invariant: an app that asked for none finds none, as without recording. The SDK puts those of a
reply into its items, from where they would go into sessions, at some sixty bytes a token.
"""

from __future__ import annotations

from typing import Any


def asked_for_logprobs(settings: Any) -> bool:
    """Whether the app's own model settings ask for log-probabilities."""
    if getattr(settings, "top_logprobs", None) is not None:
        return True
    return any(
        "logprobs" in (getattr(settings, name, None) or ()) for name in ("extra_args", "extra_body")
    )


def quieten(thing: Any) -> None:
    """Empty the log-probabilities in a response, or in one event of a stream."""
    if getattr(thing, "logprobs", None):
        thing.logprobs = []
    for name in ("response", "item", "part"):
        inner = getattr(thing, name, None)
        if inner is not None:
            quieten(inner)
    for name in ("output", "content"):
        inner = getattr(thing, name, None)
        for part in inner if isinstance(inner, list) else ():
            quieten(part)
