"""A response that feeds its record while the app reads it.

Invariant: the app gets the same chunks at the same moment; feeding comes before the app sees a
chunk, and ends when the app has read everything, closes the response, or lets it go.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marft_agents.recording.exchange import Exchange

_NO_ERROR = (GeneratorExit, StopIteration, StopAsyncIteration)


def tee(response: Any, exchange: Exchange, *, is_async: bool) -> None:
    """Replace the byte iterator and the close of this one response."""
    if is_async:
        _tee_async(response, exchange)
    else:
        _tee_sync(response, exchange)


def _safely_feed(exchange: Exchange, data: bytes) -> None:
    with exchange.call.episode.core.safety.guard("read a streamed reply"):
        exchange.feed(data)


def _tee_sync(response: Any, exchange: Exchange) -> None:
    read, close = response.iter_bytes, response.close

    def iter_bytes(*args: Any, **kwargs: Any) -> Iterator[bytes]:
        chunks = read(*args, **kwargs)
        if exchange.closed:  # a second reading, of the stored content
            yield from chunks
            return
        try:
            for chunk in chunks:
                _safely_feed(exchange, chunk)
                yield chunk
        finally:
            _over(exchange)

    def close_response() -> None:
        try:
            close()
        finally:
            _over(exchange)

    response.iter_bytes, response.close = iter_bytes, close_response


def _tee_async(response: Any, exchange: Exchange) -> None:
    read, aclose = response.aiter_bytes, response.aclose

    async def aiter_bytes(*args: Any, **kwargs: Any) -> AsyncIterator[bytes]:
        chunks = read(*args, **kwargs)
        try:
            if exchange.closed:  # a second reading, of the stored content
                async for chunk in chunks:
                    yield chunk
                return
            async for chunk in chunks:
                _safely_feed(exchange, chunk)
                yield chunk
        finally:
            _over(exchange)
            await chunks.aclose()

    async def close_response() -> None:
        try:
            await aclose()
        finally:
            _over(exchange)

    response.aiter_bytes, response.aclose = aiter_bytes, close_response


def _over(exchange: Exchange) -> None:
    """The app is through with the response, perhaps because of the exception in flight."""
    error = sys.exception()
    if isinstance(error, _NO_ERROR):
        error = None  # the app stopped reading: what came is recorded, incomplete unless finished
    with exchange.call.episode.core.safety.guard("record a streamed reply"):
        if not exchange.closed:
            exchange.close(error)
            exchange.call.over(exchange)
