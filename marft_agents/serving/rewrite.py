"""Put the name that was asked for back into what the engine answers, and hide what was not.

Invariant: the reply is restored as the recorder in a process restores it; the top-level ``model``
changes only where it is the engine's name for the version.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection

from marft_agents.recording.lines import Lines
from marft_agents.recording.restoring import NOTHING, Restorer


def rewrite_json(
    body: bytes, engine_name: str, asked: str, hidden: Collection[str] = NOTHING
) -> bytes:
    """The JSON body with its model renamed; anything else as it is.

    ``hidden``: of ``token_ids`` and ``logprobs``, what the client is not to see.
    """
    return Restorer(asked, hidden, served=engine_name).whole(body)


async def rewrite_stream(
    chunks: AsyncIterator[bytes], engine_name: str, asked: str, hidden: Collection[str] = NOTHING
) -> AsyncIterator[bytes]:
    """Chunks of an event stream, rewritten line by line; only an unfinished line is held back."""
    lines, restorer = Lines(), Restorer(asked, hidden, served=engine_name)
    async for chunk in chunks:
        if seen := restorer.lines(lines.feed(chunk)):
            yield seen
    if rest := restorer.end(lines.rest()):
        yield rest


__all__ = ["NOTHING", "rewrite_json", "rewrite_stream"]
