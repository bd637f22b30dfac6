"""Streaming clients that note how long they waited for every chunk, in a process of their own.

    python -m benchmarks.swap.clients '{"url": ..., "models": [...], "clients": 8, ...}'

Invariant: a wait is one between two chunks of one stream, never between two streams; when a chunk
came is told by the machine's monotonic clock, which all processes share. They ask until they
are told to stop by the end of their input.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from urllib.parse import urlsplit

from benchmarks.gateway.engine import run
from benchmarks.gateway.load import Client, Plan, request


class _Noting(Client):
    def __init__(self, notes: list[tuple[float, float]]) -> None:
        super().__init__()
        self._notes = notes
        self._last = 0.0

    def arrives(self) -> None:
        now = time.monotonic()
        if self._first:  # of this stream something came before
            self._notes.append((now, now - self._last))
        self._last = now


async def watch(plan: Plan) -> list[tuple[float, float]]:
    """(when, seconds waited) of every chunk but the first of each stream."""
    loop, address = asyncio.get_running_loop(), urlsplit(plan.url)
    notes: list[tuple[float, float]] = []

    async def one(data: bytes) -> None:
        _, client = await loop.create_connection(
            lambda: _Noting(notes), address.hostname or "", address.port or 80
        )
        while True:
            reply = await client.ask(data)
            if not reply.ok:
                raise RuntimeError("a stream failed")

    tasks = [
        loop.create_task(one(request(plan, plan.models[i % len(plan.models)])))
        for i in range(plan.clients)
    ]
    stop = loop.run_in_executor(None, sys.stdin.read)
    done, _ = await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task in done:
            task.result()
        task.cancel()
    return notes


if __name__ == "__main__":
    print(json.dumps(run(watch(Plan(**json.loads(sys.argv[1]))))))
