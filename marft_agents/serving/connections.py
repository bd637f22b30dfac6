"""Connections that send their requests slowly, heads without end, or do not read their answers.

Invariant: a connection is closed when a whole head has not come within ``HEAD_TIMEOUT_S`` of its
first byte (or of the connection), when an unfinished head holds more than ``MAX_UNREAD`` bytes, and
when nothing of an answer that waits to be sent was read for ``READER_TIMEOUT_S``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from marft_agents.serving.scope import WRITE

if TYPE_CHECKING:
    _Base: Any = object
else:
    _Base = HttpToolsProtocol

HEAD_TIMEOUT_S = 20.0
READER_TIMEOUT_S = 300.0
MAX_UNREAD = 64 * 1024
_MOST_FILES = 65_536
_MOST_CONNECTIONS = 8192


class PatientProtocol(_Base):
    """uvicorn's protocol on its quick parser, with a limit to its patience."""

    _head_timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None
    _unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_timer is not None:
            self._unread += len(data)
            if self._unread > MAX_UNREAD:
                self._close()

    def on_message_begin(self) -> None:
        """The first byte of a request, perhaps behind one that is not answered yet."""
        super().on_message_begin()
        if self._head_timer is None:
            self._wait_for_head()

    def on_headers_complete(self) -> None:
        self._head_is_here()
        super().on_headers_complete()
        if self.cycle is not None:
            self.scope[WRITE] = _writer(self.cycle)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader_timer = self.loop.call_later(READER_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._reader_reads()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        self._reader_reads()
        super().connection_lost(exc)

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_is_here(self) -> None:
        self._unread = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._wait_for_head()  # the answer before it goes first
        else:
            self._close()

    def _reader_reads(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


def _writer(cycle: Any) -> Callable[[bytes], bool]:
    """Sends a part of a body that has begun, at once; whether it could.

    It cannot where there is something to wait for, or no client any more.
    """
    flow, transport = cycle.flow, cycle.transport

    def write(body: bytes) -> bool:
        ready = cycle.chunked_encoding and not (flow.write_paused or cycle.disconnected)
        if not ready or cycle.response_complete:
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    return write


def connection_limit() -> int:
    """Connections to hold at once: what this process may open, less than half of it for clients.

    Every request to the engine needs a connection of its own, too.
    """
    try:
        import resource
    except ImportError:  # no such limits there
        return _MOST_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard if hard > 0 else _MOST_FILES, _MOST_FILES)
    if 0 < soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return min(_MOST_CONNECTIONS, max(32, (soft - 128) // 2 if soft > 0 else _MOST_CONNECTIONS))
