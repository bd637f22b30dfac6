"""The address that serve listens on."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing

import uvicorn

from marft_agents.serving import server
from marft_agents.serving.fleet import Fleet
from marft_agents.serving.listener import Listener


async def test_small_writes_leave_at_once() -> None:
    """Otherwise the kernel holds a reply back until its headers are acknowledged: 40 ms."""
    accepted = asyncio.get_running_loop().create_future()

    def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(writer)

    with closing(server._listen("127.0.0.1", 0)) as sock:  # pyright: ignore[reportPrivateUsage]
        async with await asyncio.start_server(connected, sock=sock):
            _, client = await asyncio.open_connection(*sock.getsockname())
            writer: asyncio.StreamWriter = await accepted
            found: socket.socket = writer.get_extra_info("socket")
            assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for each in (client, writer):
                each.close()
                await each.wait_closed()


async def test_a_swap_under_way_is_waited_for() -> None:
    async def app(*_: object) -> None:
        """Nobody asks it."""

    fleet, said = Fleet(()), list[str]()
    config = uvicorn.Config(app, log_config=None)
    listener = Listener(config, fleet, ready=lambda: None, say=said.append, stop_timeout_s=60)
    fleet.stopping, fleet.swaps = True, 1
    assert not await listener.on_tick(0)
    fleet.swaps = 0
    assert await listener.on_tick(1)
    assert len(said) == 1
