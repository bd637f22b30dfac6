"""Connections to an engine: what they hand on, when they are used again, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import pytest

from marft_agents.serving.calls import tls
from marft_agents.serving.pool import Pool
from marft_agents.serving.wire import MOST_HEAD, Answer, BadReplyError

REQUEST = (b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n",)
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
Script = Sequence[bytes | asyncio.Event | None]
"""What to send; an event to wait for; ``None``: a reset; no bytes: the end of the connection."""


@dataclass
class Engine:
    """Answers every request with the next script, and then waits for ever."""

    scripts: list[Script]
    connections: int = 0
    tasks: list[asyncio.Task[None] | None] = field(default_factory=list[asyncio.Task[None] | None])
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """A client has left, or was left."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.tasks.append(asyncio.current_task())
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                for step in self.scripts.pop(0) if self.scripts else [asyncio.Event()]:
                    if isinstance(step, asyncio.Event):
                        await step.wait()
                    elif step:
                        writer.write(step)
                        await writer.drain()
                    elif step is None:
                        writer.transport.abort()
                    else:
                        writer.close()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.lost.set()
        finally:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def pool_of(
    *scripts: Script, read_s: float = 5.0, keep_s: float = 5.0
) -> AsyncGenerator[tuple[Pool, Engine]]:
    engine = Engine(list(scripts))
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    pool = Pool(url, read_timeout_s=read_s, keepalive_s=keep_s, tls=tls())
    try:
        yield pool, engine
    finally:
        pool.close()
        server.close()
        for task in engine.tasks:
            if task is not None:
                task.cancel()
        await asyncio.gather(*filter(None, engine.tasks), return_exceptions=True)


class Flow:
    """What was handed on of a body."""

    def __init__(self, answer: Answer) -> None:
        self.parts: list[bytes] = []
        self.error: Exception | None = None
        self.ended = asyncio.Event()
        self.came = asyncio.Event()
        answer.flow(self)

    def __call__(self, data: bytes, over: bool, error: Exception | None) -> None:
        self.parts += [data] if data else []
        self.error = error
        self.came.set()
        if over or error is not None:
            self.ended.set()


@pytest.mark.parametrize(
    ("script", "body", "again"),
    [
        ([OK + b"content-length: 3\r\n\r\nabc"], b"abc", True),
        ([OK + b"content-length: 3\r\n", b"\r\na", b"bc"], b"abc", True),
        ([CHUNKED + b"2\r\nab\r\n", b"1\r\nc\r\n0\r\n\r\n"], b"abc", True),
        ([CHUNKED + b"3\r\nabc\r\n0\r\nx-late: 1\r\n\r\n"], b"abc", True),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"content-length: 1\r\n\r\na"], b"a", True),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], b"", True),
        ([OK + b"connection: close\r\ncontent-length: 1\r\n\r\na"], b"a", False),
        ([b"HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\na"], b"a", False),
        ([OK + b"\r\nabc", b""], b"abc", False),
        ([OK + b"content-length: 1\r\n\r\na" + OK], b"a", False),
    ],
)
async def test_bodies_are_whole_and_connections_used_again_where_they_may_be(
    script: Script, body: bytes, again: bool
) -> None:
    async with pool_of(script, [OK + b"content-length: 1\r\n\r\nz"]) as (pool, engine):
        answer = await pool.ask(REQUEST)
        assert answer.status_code in (200, 204)
        assert await answer.read() == body
        assert await (await pool.ask(REQUEST)).read() == b"z"
        assert engine.connections == (1 if again else 2)


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        ([None], ConnectionError, None),
        ([OK, None], ConnectionError, None),
        ([b"no http\r\n\r\n"], BadReplyError, "no HTTP"),
        ([OK + b"x-long: " + b"x" * (2 * MOST_HEAD)], BadReplyError, "longer than"),
        ([b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n"], BadReplyError, "no HTTP"),
        ([], TimeoutError, None),
    ],
)
async def test_what_is_no_answer_is_an_error(
    script: Script, error: type[Exception], message: str | None
) -> None:
    async with pool_of(script, read_s=0.1) as (pool, _):
        with pytest.raises(error, match=message):
            await pool.ask(REQUEST)
        await asyncio.sleep(0)
        assert pool.connections == 0


@pytest.mark.parametrize(
    "script",
    [
        [OK + b"content-length: 9\r\n\r\nabc", None],
        [CHUNKED + b"3\r\nabc\r\n", None],
        [CHUNKED + b"3\r\nabc\r\n", b"no size\r\n"],
        [CHUNKED + b"3\r\nabc\r\n", b""],
        [CHUNKED + b"3\r\nabc\r\n"],
    ],
)
@pytest.mark.parametrize("flows", [False, True])
async def test_a_body_that_breaks_off_is_never_whole(script: Script, flows: bool) -> None:
    async with pool_of(script, read_s=0.1) as (pool, _):
        try:
            answer = await pool.ask(REQUEST)
        except OSError:  # it broke off before anybody could look
            return
        if flows:
            flow = Flow(answer)
            await flow.ended.wait()
            assert isinstance(flow.error, OSError) and b"".join(flow.parts) in (b"", b"abc")
        else:
            with pytest.raises(OSError):
                await answer.read()
        assert not answer.complete


async def test_what_is_sent_is_handed_on_before_more_is_there() -> None:
    more = asyncio.Event()
    script = [CHUNKED + b"1\r\na\r\n2\r\nbc\r\n", more, b"1\r\nd\r\n0\r\n\r\n"]
    async with pool_of(script) as (pool, _):
        answer = await pool.ask(REQUEST)
        flow = Flow(answer)
        if not flow.parts:
            await flow.came.wait()
        assert flow.parts == [b"abc"] and not flow.ended.is_set()
        more.set()
        await flow.ended.wait()
        assert flow.parts == [b"abc", b"d"] and answer.complete and flow.error is None


async def test_a_reply_that_is_let_go_of_ends_for_the_engine() -> None:
    async with pool_of([CHUNKED + b"1\r\na\r\n"]) as (pool, _):
        answer = await pool.ask(REQUEST)
        flow = Flow(answer)
        answer.close()
        await asyncio.sleep(0.01)
        assert pool.connections == 0 and flow.error is None


async def test_who_gives_up_before_the_head_takes_the_connection_along() -> None:
    async with pool_of([]) as (pool, engine):
        task = asyncio.ensure_future(pool.ask(REQUEST))
        while not engine.connections:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert pool.connections == 0


async def test_a_body_that_nobody_takes_is_not_read_without_end() -> None:
    part = b"%x\r\n%b\r\n" % (1 << 16, b"x" * (1 << 16))
    size = 1 << 10  # 64 MiB
    async with pool_of([CHUNKED, *[part] * size, b"0\r\n\r\n"]) as (pool, engine):
        answer = await pool.ask(REQUEST)
        await asyncio.sleep(0.2)
        held = sum(map(len, answer._parts))  # pyright: ignore[reportPrivateUsage]
        assert held < 2 << 20 and not engine.lost.is_set()
        assert len(await answer.read()) == size << 16


async def test_idle_connections_go_after_a_while() -> None:
    script = [OK + b"content-length: 0\r\n\r\n"]
    async with pool_of(script, list(script), keep_s=0.05) as (pool, engine):
        await (await pool.ask(REQUEST)).read()
        assert pool.connections == 1
        async with asyncio.timeout(5):
            while pool.connections:
                await asyncio.sleep(0.01)
        await (await pool.ask(REQUEST)).read()
        assert engine.connections == 2


async def test_a_pool_that_was_retired_keeps_nothing() -> None:
    more = asyncio.Event()
    async with pool_of([OK + b"content-length: 1\r\n\r\n", more, b"a"]) as (pool, _):
        answer = await pool.ask(REQUEST)
        pool.retire()
        more.set()
        assert await answer.read() == b"a"
        await asyncio.sleep(0)
        assert pool.connections == 0
