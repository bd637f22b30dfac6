"""The connection to the engine, and the watch over the client while it is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from marft_agents.serving.upstream import Upstream, WhileThere
from tests.serving.fake_engine import BASE, FakeEngine


def client(*messages: str) -> tuple[Callable[[], Any], asyncio.Event]:
    """What a client sends after its request, and an event that makes it leave."""
    left = asyncio.Event()
    before = list(messages)

    async def receive() -> Message:
        if before:
            return {"type": before.pop(0)}
        await left.wait()
        return {"type": "http.disconnect"}

    return receive, left


def tasks() -> int:
    return len(asyncio.all_tasks())


async def test_a_client_that_leaves_cancels_the_block() -> None:
    receive, left = client("http.request")
    cancelled = False
    asyncio.get_running_loop().call_soon(left.set)
    with pytest.raises(ClientDisconnect):
        async with WhileThere(receive):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled = True
                raise
    assert cancelled
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    await asyncio.sleep(0)
    assert tasks() == 1


async def test_a_block_that_ends_ends_the_watch() -> None:
    receive, left = client()
    before = tasks()
    async with WhileThere(receive):
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert tasks() == before
    left.set()
    await asyncio.sleep(0)


async def test_an_error_of_the_block_is_its_own() -> None:
    receive, _ = client()
    with pytest.raises(ValueError, match="mine"):
        async with WhileThere(receive):
            raise ValueError("mine")


async def test_who_is_cancelled_from_outside_stays_so() -> None:
    receive, _ = client()
    inside = asyncio.Event()

    async def block() -> None:
        async with WhileThere(receive):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def request_of(receive: Callable[[], Any], headers: dict[str, str]) -> Request:
    raw = [(k.encode(), v.encode("latin-1")) for k, v in headers.items()]
    return Request({"type": "http", "method": "POST", "headers": raw}, receive)


async def test_large_bodies_arrive_whole_and_few_headers_pass() -> None:
    receive, _ = client()
    body = json.dumps({"model": BASE, "text": "é" * (3 << 20)}, ensure_ascii=False).encode()
    asked = {"x-request-id": "r1", "accept": "a/b", "cookie": "c", "authorization": "Bearer mine"}
    request = request_of(receive, asked)
    with FakeEngine() as engine:
        upstream = Upstream(engine.url, api_key="its key")
        try:
            answer = await upstream.post("/v1/chat/completions", body, request)
            assert answer.status_code == 200
            assert json.loads(await upstream.read(answer, request))["model"] == BASE
            answer.close()
        finally:
            await upstream.close()
        (seen,) = engine.seen
    assert len(seen.body["text"]) == 3 << 20
    assert {k: seen.headers.get(k) for k in asked} == {
        "x-request-id": "r1", "accept": "a/b", "cookie": None, "authorization": "Bearer its key",
    }  # fmt: skip
    assert seen.headers["content-type"] == "application/json"


async def test_an_idle_connection_is_used_again() -> None:
    receive, _ = client()
    request = request_of(receive, {})
    body = json.dumps({"model": BASE}).encode()
    with FakeEngine() as engine:
        upstream = Upstream(engine.url)
        try:
            for _ in range(3):
                answer = await upstream.post("/v1/chat/completions", body, request)
                await upstream.read(answer, request)
                answer.close()
            assert upstream.connections == 1
        finally:
            await upstream.close()
