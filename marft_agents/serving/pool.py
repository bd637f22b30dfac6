"""Connections to one engine: opened where none is idle, used again, closed when idle for long.

Invariant: the connection that was used last is used next, so what a burst needed is soon closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Sequence
from urllib.parse import urlsplit

from marft_agents.serving.wire import Answer, Connection

CONNECT_TIMEOUT_S = 5.0


class Pool:
    """The connections to one address; it belongs to the loop that it is used in.

    Args:
        url: ``http://host:port`` or ``https://host:port``.
        read_timeout_s: longest wait for the next byte of an answer.
        keepalive_s: how long an idle connection may be used again.
        tls: for ``https``.
    """

    def __init__(
        self, url: str, *, read_timeout_s: float, keepalive_s: float, tls: ssl.SSLContext
    ) -> None:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port or (443 if secure else 80)
        self._tls = tls if secure else None
        self._read_timeout_s = read_timeout_s
        self._keepalive_s = keepalive_s
        self.heard = 0.0
        """When the last byte came, on the loop's clock."""
        self._all: set[Connection] = set()
        self._idle: list[Connection] = []
        """The one that was used last is used next."""
        self._reaper: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def connections(self) -> int:
        """How many there are, idle ones included."""
        return len(self._all)

    @property
    def silent_s(self) -> float:
        """How long no answer had a byte although there are some to come; 0 where there are none."""
        waiting = [since for c in self._all if (since := c.waits_since) is not None]
        if not waiting:
            return 0.0
        return asyncio.get_running_loop().time() - max(self.heard, min(waiting))

    async def ask(self, data: Sequence[bytes]) -> Answer:
        """Send a request; returns when the head of its answer is here.

        Raises:
            OSError, TimeoutError: no connection, or no answer.
        """
        connection = self._take() or await self._connect()
        answer = connection.ask(data)
        try:
            await answer.begun()
        except BaseException:
            answer.close()
            raise
        return answer

    def close(self) -> None:
        """Close every connection."""
        self._closed = True
        for connection in list(self._all):
            connection.abort()
        self._idle.clear()
        if self._reaper is not None:
            self._reaper.cancel()

    def retire(self) -> None:
        """Close what is idle; the others go when their answers are over."""
        self._closed = True
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    # -- of connections --------------------------------------------------------------------

    def remember(self, connection: Connection) -> None:
        """It is open."""
        self._all.add(connection)

    def give_back(self, connection: Connection) -> None:
        """It may be used again."""
        if self._closed:
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.append(connection)
        if self._reaper is None:
            self._reaper = loop.call_later(self._keepalive_s, self._reap)

    def forget(self, connection: Connection) -> None:
        """It is closed."""
        self._all.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    # -- inside ----------------------------------------------------------------------------

    def _take(self) -> Connection | None:
        since = asyncio.get_running_loop().time() - self._keepalive_s
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since > since and not connection.closing:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await loop.create_connection(
                lambda: Connection(self, self._read_timeout_s),
                self._host,
                self._port,
                ssl=self._tls,
            )
        if self._closed:
            connection.abort()
            raise ConnectionError("this server is stopping, or asks elsewhere by now")
        return connection

    def _reap(self) -> None:
        self._reaper = None
        loop = asyncio.get_running_loop()
        since = loop.time() - self._keepalive_s
        while self._idle and self._idle[0].idle_since <= since:
            self._idle.pop(0).abort()
        if self._idle:
            self._reaper = loop.call_later(self._idle[0].idle_since - since, self._reap)
