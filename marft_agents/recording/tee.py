"""A response that feeds its record while the app reads it.

Invariant: the app gets what it is to see of each chunk at the moment of the chunk; feeding comes
before that, and ends when the app has read everything, closes the response, or lets it go. From
then on the response is as it was and holds nothing of ours: it may live long.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marft_agents.recording.exchange import Exchange


def tee(response: Any, exchange: Exchange, *, is_async: bool) -> None:
    """Replace the byte iterator and the close of this one response."""
    if is_async:
        _tee_async(response, exchange)
    else:
        _tee_sync(response, exchange)


def _seen(exchange: Exchange, data: bytes) -> bytes:
    """What the app sees of ``data``."""
    try:
        return exchange.feed(data)
    except Exception as error:
        exchange.call.episode.core.safety.failed("read a streamed reply", error)
        return data


def _tee_sync(response: Any, exchange: Exchange) -> None:
    read, close = response.iter_bytes, response.close
    # A close inside of a reading comes from the client, which knows why; it raises next.
    begun = reading = False

    def iter_bytes(*args: Any, **kwargs: Any) -> Iterator[bytes]:
        chunks = read(*args, **kwargs)
        nonlocal reading, begun
        if begun:  # a second reading, of the stored content
            yield from chunks
            return
        begun = True
        problem: BaseException | None = None
        try:
            reading = True
            for chunk in chunks:
                if seen := _seen(exchange, chunk):
                    reading = False
                    yield seen
                    reading = True
            reading = False
            if seen := exchange.rest():
                yield seen
        except GeneratorExit:
            raise
        except BaseException as error:
            problem = error
            raise
        finally:
            reading = False
            _over(exchange, problem)
            _untie(response, ours)

    def close_response() -> None:
        try:
            close()
        finally:
            if not reading:
                _over(exchange)
                _untie(response, ours)

    ours: dict[str, Any] = {"iter_bytes": iter_bytes, "close": close_response}
    vars(response).update(ours)


def _tee_async(response: Any, exchange: Exchange) -> None:
    read, aclose = response.aiter_bytes, response.aclose
    begun = reading = False

    async def aiter_bytes(*args: Any, **kwargs: Any) -> AsyncIterator[bytes]:
        chunks = read(*args, **kwargs)
        nonlocal reading, begun
        problem: BaseException | None = None
        try:
            if begun:  # a second reading, of the stored content
                async for chunk in chunks:
                    yield chunk
                return
            begun = reading = True
            async for chunk in chunks:
                if seen := _seen(exchange, chunk):
                    reading = False
                    yield seen
                    reading = True
            reading = False
            if seen := exchange.rest():
                yield seen
        except GeneratorExit:
            raise
        except BaseException as error:
            problem = error
            raise
        finally:
            reading = False
            _over(exchange, problem)
            _untie(response, ours)
            await chunks.aclose()

    async def close_response() -> None:
        try:
            await aclose()
        finally:
            if not reading:
                _over(exchange)
                _untie(response, ours)

    ours: dict[str, Any] = {"aiter_bytes": aiter_bytes, "aclose": close_response}
    vars(response).update(ours)


def _untie(response: Any, ours: dict[str, Any]) -> None:
    """Take away what replaced the response's own, unless somebody else has replaced that."""
    fields = vars(response)
    for name, value in ours.items():
        if fields.get(name) is value:
            del fields[name]
    ours.clear()  # they know it, too


def _over(exchange: Exchange, problem: BaseException | None = None) -> None:
    """The app is through with the response; ``problem``: why the next bytes did not come.

    Where there is none and the reply is unfinished, the app stopped reading: what came is recorded,
    incomplete.
    """
    with exchange.call.episode.core.safety.guard("record a streamed reply"):
        if not exchange.closed:
            exchange.close(problem)
            exchange.call.over(exchange)
