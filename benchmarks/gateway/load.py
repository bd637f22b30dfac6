"""Clients of a gateway or an engine, in a process of their own.

    python -m benchmarks.gateway.load

Every line of its input is a job, every line of its output what came of one: a list of plans. One
plan: its clients ask again as soon as they are answered; with a rate, requests begin when they are
due, whatever became of those before. Several plans: one client asks each of them in turn, request
by request, so that whatever else the machine does strikes all of them alike.

Invariant: it is no bottleneck: a bare protocol on a connection a client, requests made beforehand,
replies looked at only for where they end. A reply that is not whole, or no success, is counted
as failed and never timed. No request begins after the time is over; those under way are waited for.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from benchmarks.gateway.engine import run

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_END = b"\r\n0\r\n\r\n"
_DONE = b"data: [DONE]"
KEY = "sk-of-the-benchmark"
"""Both servers ask for it."""
PATIENCE_S = 300.0
"""A client gives up on a reply after so long: many wait for long at an engine that is slow."""


@dataclass(frozen=True)
class Plan:
    """One measurement; clients take the models in turn.

    It lasts ``seconds``, or, for the same work whoever answers, until ``requests`` were asked;
    with a ``rate``, requests begin so many a second and ``clients`` says nothing.
    """

    url: str
    models: Sequence[str]
    clients: int
    seconds: float
    stream: bool
    max_tokens: int = 64
    turns: int = 10
    """Messages before the question: about 180 bytes each."""
    requests: int = 0
    rate: float = 0.0


def request(plan: Plan, model: str) -> bytes:
    """The bytes of one request."""
    said = "We looked at the tests again and think that the second plan is the better one. " * 2
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": f"{i}: {said}"} for i in range(plan.turns)]
    body: dict[str, Any] = {
        "model": model,
        "messages": [*messages, {"role": "user", "content": "What now?"}],
        "max_tokens": plan.max_tokens,
        "temperature": 1.0,
        "ignore_eos": True,
    }
    body |= {"stream": True} if plan.stream else {}
    data, host = json.dumps(body).encode(), urlsplit(plan.url).netloc
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\naccept: application/json\r\n"
        f"content-type: application/json\r\nauthorization: Bearer {KEY}\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


@dataclass
class Reply:
    """What came of one request, in seconds; ``events``: chunks of a stream with text."""

    seconds: float
    first: float
    ok: bool
    events: int


class Client(asyncio.Protocol):
    """One connection; ``done`` is told of each reply."""

    def __init__(self) -> None:
        self.lost = False
        self._waiting: asyncio.Future[Reply] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def ask(self, data: bytes) -> asyncio.Future[Reply]:
        self._head, self._kind, self._left, self._tail = b"", 0, 0, b""
        self._first, self._events, self._finished, self._ok = 0.0, 0, False, False
        self._waiting = asyncio.get_running_loop().create_future()
        self._begun = time.perf_counter()
        self._transport.write(data)
        return self._waiting

    def data_received(self, data: bytes) -> None:
        if not self._kind:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head, data = self._head[: end + 2], self._head[end + 4 :]
            self._ok = head.startswith(b"HTTP/1.1 200")
            found = _LENGTH.search(head)
            self._kind, self._left = (1, int(found[1])) if found else (2, 0)
            if not found and not _CHUNKED.search(head):
                self.connection_lost(None)
                return
        if self._kind == 1:
            self._left -= len(data)
            if self._left <= 0:
                self._end(whole=True)
            return
        self._chunk(data)

    def arrives(self) -> None:
        """Something of a stream is here."""

    def _chunk(self, data: bytes) -> None:
        self.arrives()
        if not self._first and b"data: " in data:
            self._first = time.perf_counter()
        self._events += data.count(b'"content":')
        tail = self._tail + data
        self._finished = self._finished or _DONE in tail
        if tail.endswith(_END) or tail == b"0\r\n\r\n":
            self._end(whole=self._finished)
        self._tail = tail[-32:]

    def _end(self, *, whole: bool) -> None:
        now, waiting = time.perf_counter(), self._waiting
        if waiting is not None and not waiting.done():
            first = (self._first or now) - self._begun
            waiting.set_result(Reply(now - self._begun, first, self._ok and whole, self._events))

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._ok = False
        if self._waiting is not None:
            self._end(whole=False)

    def close(self) -> None:
        self._transport.close()


async def _connected(url: str) -> Client:
    address = urlsplit(url)
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(Client, address.hostname or "", address.port or 80)
    return client


class _Asker:
    """One client: connects anew where it was cut off."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: Client | None = None

    async def ask(self, data: bytes) -> Reply:
        if self._client is None or self._client.lost:
            self._client = await _connected(self._url)
        try:
            return await asyncio.wait_for(self._client.ask(data), PATIENCE_S)
        except TimeoutError:
            self.close()
            return Reply(PATIENCE_S, PATIENCE_S, False, 0)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client.lost = True


async def _closed(plan: Plan, data: Sequence[bytes], out: list[Reply]) -> None:
    """Every client asks again as soon as it is answered."""
    until = time.perf_counter() + plan.seconds
    left = plan.requests

    async def one(data: bytes) -> None:
        nonlocal left
        asker = _Asker(plan.url)
        while left > 0 if plan.requests else time.perf_counter() < until:
            left -= 1
            out.append(await asker.ask(data))
        asker.close()

    await asyncio.gather(*(one(data[i % len(data)]) for i in range(plan.clients)))


async def _open(plan: Plan, data: Sequence[bytes], out: list[Reply]) -> None:
    """Requests begin when they are due; a reply's time counts from then."""
    loop = asyncio.get_running_loop()
    begun, idle = loop.time(), list[_Asker]()

    async def one(data: bytes, due: float) -> None:
        asker = idle.pop() if idle else _Asker(plan.url)
        late = loop.time() - due
        reply = await asker.ask(data)
        out.append(Reply(late + reply.seconds, late + reply.first, reply.ok, reply.events))
        idle.append(asker)

    tasks: list[asyncio.Task[None]] = []
    for i in range(int(plan.seconds * plan.rate)):
        due = begun + i / plan.rate
        await asyncio.sleep(max(0.0, due - loop.time()))
        tasks.append(loop.create_task(one(data[i % len(data)], due)))
    await asyncio.gather(*tasks)
    for asker in idle:
        asker.close()


def quantile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of the values do not exceed; of at least one value."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(replies: Sequence[Reply], elapsed: float, cpu: float) -> dict[str, Any]:
    """Requests a second and milliseconds of the replies that were whole."""
    good = [reply for reply in replies if reply.ok]
    out: dict[str, Any] = {
        "requests": len(good),
        "failed": len(replies) - len(good),
        "elapsed_s": elapsed,
        "per_s": len(good) / elapsed,
        "client_cpu_s": cpu,
    }
    if not good:
        return out
    times, firsts = [r.seconds for r in good], [r.first for r in good]
    return out | {
        "p50_ms": 1e3 * quantile(times, 0.5),
        "p99_ms": 1e3 * quantile(times, 0.99),
        "first_p50_ms": 1e3 * quantile(firsts, 0.5),
        "first_p99_ms": 1e3 * quantile(firsts, 0.99),
        "events": sum(r.events for r in good) / len(good),
    }


async def load(plan: Plan) -> dict[str, Any]:
    """Run the clients of one plan; seconds are by the clock."""
    out: list[Reply] = []
    data = [request(plan, model) for model in plan.models]
    cpu, begun = time.process_time(), time.perf_counter()
    await (_open if plan.rate else _closed)(plan, data, out)
    return summary(out, time.perf_counter() - begun, time.process_time() - cpu)


async def take_turns(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """One client asks every plan in turn, there and back again: milliseconds of each round.

    A round in which one failed is left out for all of them, and counted.
    """
    askers = [_Asker(plan.url) for plan in plans]
    data = [[request(plan, model) for model in plan.models] for plan in plans]
    rounds: list[list[Reply]] = []
    failed = [0] * len(plans)
    until = time.perf_counter() + plans[0].seconds
    turn = 0
    while time.perf_counter() < until:
        replies: dict[int, Reply] = {}
        for which in range(len(plans))[:: -1 if turn % 2 else 1]:
            replies[which] = await askers[which].ask(data[which][turn % len(data[which])])
        for which, reply in replies.items():
            failed[which] += not reply.ok
        if turn and all(reply.ok for reply in replies.values()):  # connections are open by then
            rounds.append([replies[which] for which in range(len(plans))])
        turn += 1
    for asker in askers:
        asker.close()
    return [
        {
            "ms": [round(1e3 * replies[which].seconds, 3) for replies in rounds],
            "first_ms": [round(1e3 * replies[which].first, 3) for replies in rounds],
            "failed": failed[which],
        }
        for which in range(len(plans))
    ]


def _allow_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))


def main() -> None:
    _allow_connections()
    for line in sys.stdin:
        plans = [Plan(**plan) for plan in json.loads(line)]
        told = [run(load(plans[0]))] if len(plans) == 1 else run(take_turns(plans))
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
