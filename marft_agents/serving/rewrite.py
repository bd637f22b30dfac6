"""Put the name that was asked for back into what the engine answers, and hide what was not.

Invariant: the reply is restored as the recorder in a process restores it; the top-level ``model``
changes only where it is the engine's name for the version.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection

from marft_agents.recording.lines import Lines, parsed
from marft_agents.recording.restoring import NOTHING, Restorer
from marft_agents.serving.usage import StreamUsage, Told, tell_usage


def rewrite_json(
    body: bytes,
    engine_name: str,
    asked: str,
    hidden: Collection[str] = NOTHING,
    told: Told | None = None,
) -> bytes:
    """The JSON body with its model renamed; anything else as it is.

    ``hidden``: of ``token_ids`` and ``logprobs``, what the client is not to see. ``told`` learns
    the usage.
    """
    value = parsed(body)
    if told is not None:
        tell_usage(value, told)
    return Restorer(asked, hidden, served=engine_name).whole(body, value)


async def rewrite_stream(
    chunks: AsyncIterator[bytes],
    engine_name: str,
    asked: str,
    hidden: Collection[str] = NOTHING,
    usage: StreamUsage | None = None,
) -> AsyncIterator[bytes]:
    """Chunks of an event stream, rewritten line by line; only an unfinished line is held back.

    ``usage`` reads the usage on the way, and may hold the last chunk until it is there.
    """
    lines, restorer = Lines(), Restorer(asked, hidden, served=engine_name)
    usage = usage or StreamUsage(_ignored, ours=False)
    try:
        async for chunk in chunks:
            if seen := restorer.lines(usage.take(lines.feed(chunk))):
                yield seen
    except Exception:
        if seen := restorer.lines(usage.end()):
            yield seen
        raise
    if rest := restorer.end(usage.end(lines.rest())):
        yield rest


def _ignored(_prompt: int | None, _reply: int | None) -> None:
    """Nobody asks what a reply cost."""


__all__ = ["NOTHING", "rewrite_json", "rewrite_stream"]
