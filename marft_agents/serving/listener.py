"""The HTTP server's life: ready, stopping, gone.

Invariant: asked to stop it takes no new request for a model and no new swap, lets those in flight
end for as long as it was given, and then ends. Asked again it ends at once.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from marft_agents.serving.fleet import Fleet

_TELL_EVERY_S = 5.0


def _is_news(record: logging.LogRecord) -> bool:
    """Whether it tells more than that all was broken off, as whoever stops us wanted."""
    cut_off = record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError)
    # The application's own end comes as a traceback that is text by then.
    return not (cut_off or record.getMessage().startswith("Traceback "))


class Listener(uvicorn.Server):
    """Serves until a signal, and then drains.

    Args:
        ready: called when requests are accepted.
        stop_timeout_s: longest wait for requests in flight after the first signal.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        fleet: Fleet,
        *,
        ready: Callable[[], None],
        say: Callable[[str], None],
        stop_timeout_s: float,
    ) -> None:
        super().__init__(config)
        self._fleet = fleet
        self._ready = ready
        self._say = say
        self._stop_timeout_s = stop_timeout_s
        self._stop_at: float | None = None
        self._tell_at = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of a signal, between any two instructions: it only takes note."""
        del frame
        self._captured_signals.append(sig)
        if self._fleet.stopping:
            self.should_exit = self.force_exit = True
        self._fleet.stopping = True

    async def on_tick(self, counter: int) -> bool:
        if self.force_exit:
            logging.getLogger("uvicorn.error").addFilter(_is_news)
        if self._fleet.stopping and not self.should_exit:
            self._drain(time.monotonic())
        return await super().on_tick(counter)

    def _drain(self, now: float) -> None:
        busy = self._fleet.in_flight + self._fleet.swaps
        told = f"{busy} request{'' if busy == 1 else 's'}"
        if self._stop_at is None:
            self._stop_at = now + self._stop_timeout_s
        if not busy:
            self.should_exit = True
        elif now >= self._stop_at:
            self._say(f"stopping with {told} unfinished after {self._stop_timeout_s:g} s")
            self.should_exit = True
        elif now >= self._tell_at:
            left = self._stop_at - now
            self._say(f"stopping: {told} in flight, waiting up to {left:.0f} s")
            self._tell_at = now + _TELL_EVERY_S
