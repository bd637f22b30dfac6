"""A request's generations, seen from the event loop.

Invariant: a job that is left, for whatever reason, is cancelled in the engine, so no row outlives
the client it was for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from marft_agents.serving.local.engine import LocalEngine
from marft_agents.serving.local.protocol import Settings
from marft_agents.serving.local.refusal import Refusal
from marft_agents.serving.local.rows import Generation, Piece

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection before its reply was complete."""


class Job:
    """Generations submitted together; an async context that cancels what is left at its end."""

    def __init__(
        self, engine: LocalEngine, model: str, orders: Sequence[tuple[list[int], Settings]]
    ) -> None:
        self._engine = engine
        self._arrivals: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def sink_for(index: int) -> Callable[[Piece], None]:
            def sink(piece: Piece) -> None:
                loop.call_soon_threadsafe(self._arrivals.put_nowait, (index, piece))

            return sink

        self._generations = [
            Generation(prompt, settings, sink_for(index))
            for index, (prompt, settings) in enumerate(orders)
        ]
        self._open = len(orders)
        engine.submit(model, self._generations)

    def cancel(self) -> None:
        """Free the rows of this job, if any are left."""
        if self._open:
            self._open = 0
            with contextlib.suppress(Refusal):  # an engine that closes frees them itself
                self._engine.cancel(self._generations)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(choice, piece) as they come, until every choice has ended.

        Raises:
            Refusal: when the engine ended a choice with an error.
        """
        while self._open:
            index, piece = await self._arrivals.get()
            if piece.error is not None:
                raise piece.error
            if piece.finish_reason is not None:
                self._open -= 1
            yield index, piece

    async def collect(self) -> list[Piece]:
        """Every choice, complete."""
        whole = [Piece() for _ in self._generations]
        async for index, piece in self.pieces():
            whole[index].add(piece)
        return whole


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``, but stop it when the client goes away.

    Raises:
        ClientGone: when it did.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, written as they come; ``at_end`` runs however the stream ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], at_end: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await unless_gone(receive, self._write(send))
        except (ClientGone, OSError):
            pass
        finally:
            self._at_end()

    async def _write(self, send: Send) -> None:
        async for event in self._events:
            body = event.encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
