"""A stream as a client of the gateway sees it, without a gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator

from marft_agents.serving.rewrite import StreamRewriter


async def rewritten(chunks: AsyncIterator[bytes], rewriter: StreamRewriter) -> AsyncIterator[bytes]:
    """Chunks of an event stream, rewritten; of one that breaks off, all that there is."""
    try:
        async for chunk in chunks:
            if seen := rewriter.feed(chunk):
                yield seen
    except Exception:
        if seen := rewriter.broken():
            yield seen
        raise
    if rest := rewriter.end():
        yield rest
