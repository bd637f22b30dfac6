"""An engine of ours that can be started again.

Invariant: at most one process runs; after ``close`` none ever starts. The log of the run before is
kept beside the current one.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from marft_agents.errors import EngineError
from marft_agents.serving.commands import LOOPBACK, EngineCommand
from marft_agents.serving.process import EngineProcess, Progress, free_port


class RestartableEngine:
    """One engine on this machine.

    Args:
        command: what to run for a port.
        port: of the first run.
        progress: told how a start goes on.
    """

    def __init__(
        self,
        name: str,
        log: Path,
        command: Callable[[int], EngineCommand],
        *,
        port: int | None = None,
        start_timeout_s: float = 600.0,
        progress: Progress | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self._port = port or free_port()
        self._runs = 0
        self._command = command
        self._start_timeout_s = start_timeout_s
        self._progress = progress
        self._guard = threading.Lock()
        self._process: EngineProcess | None = None
        self._failed: str | None = None
        self._closed = False

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Of the guard that its process runs under; ``None`` while there is none."""
        process = self._process
        return process.pid if process is not None else None

    @property
    def old_log(self) -> Path:
        """The log of the run before."""
        return self.log.with_name(f"{self.log.name}.1")

    def start(self) -> str:
        """Start it, each time on another port, and wait until it answers; its address.

        Raises:
            EngineError: when it does not become ready in time, with the error from its log.
        """
        try:
            process = self._launch()
            process.wait_ready(self._start_timeout_s, self._progress)
        except EngineError as error:
            self._failed = str(error)
            self.stop()
            raise
        return self.url

    def _launch(self) -> EngineProcess:
        with self._guard:
            if self._closed:
                raise EngineError(f"{self.name} is not started any more")
            if self._process is not None:
                raise EngineError(f"{self.name} runs already")
            with contextlib.suppress(OSError):
                os.replace(self.log, self.old_log)
            if self._runs:  # whatever is left of the run before may hold its port
                self._port = free_port()
            self._runs += 1
            command = self._command(self._port)
            process = EngineProcess(command, port=self._port, log=self.log, name=self.name)
            process.start()
            self._process, self._failed = process, None
        return process

    def death(self) -> str | None:
        """Why it does not run; ``None`` while it does."""
        process = self._process
        if process is None:
            return f"{self.name} did not start"
        if process.running:
            return None
        return f"{self.name} ended with code {process.exit_code}"

    def detail(self) -> str:
        """What an operator should know: the error of its start, or the last one of its log."""
        process = self._process
        if process is None:
            return self._failed or "it was not started"
        cause = process.last_error()
        return f"see {self.log}" + (f": {cause}" if cause else "")

    def stop(self) -> None:
        """End its process, if any; safe to call again."""
        with self._guard:
            process, self._process = self._process, None
        if process is not None:
            process.stop()

    def close(self) -> None:
        """End it for good."""
        with self._guard:
            self._closed = True
        self.stop()
