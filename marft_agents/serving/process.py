"""Child processes that start with a log, are waited for, and never outlive their parent.

Invariant: a started child is the head of a process group of its own under a guard. ``stop`` ends
the whole group; so does the guard when the parent dies, even by SIGKILL.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from marft_agents.errors import EngineError, ServerError
from marft_agents.serving import guard
from marft_agents.serving.client import EngineClient
from marft_agents.serving.commands import LOOPBACK, EngineCommand
from marft_agents.serving.engine_key import key_of

_TAIL_LINES = 15
_POLL_S = 0.05
_ERROR_LENGTH = 500
# Not in backticks: those are errors that an engine only warns of.
_ERROR = re.compile(r"(?<![`\w.])[\w.]*(Error|Exception): \S|\bmarft-agents: \S")
# What an engine says when another of its processes failed; the cause stands further up.
_CONSEQUENCE = re.compile(r"EngineDeadError|Engine core initialization failed|cancelled", re.I)
Progress = Callable[[float, str], None]
"""Called with the seconds waited and the last line of the log."""


def free_port(host: str = LOOPBACK) -> int:
    """A port that nothing listens on right now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


class GuardedProcess:
    """One command, its log, and its end."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log: Path,
        name: str,
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        self.argv = tuple(argv)
        self.log = log
        self.name = name
        merged: dict[str, str | None] = {**os.environ, **(env or {})}
        self._env = {key: value for key, value in merged.items() if value is not None}
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; its output goes to ``log`` alone.

        Raises:
            EngineError: when it runs already, or its log cannot be written.
        """
        if self._guard is not None:
            raise EngineError(f"{self.name} was started already")
        command = [sys.executable, "-I", str(Path(guard.__file__)), *self.argv]
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("wb") as out:
                self._guard = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=self._env,
                    start_new_session=True,
                )
        except OSError as error:
            raise EngineError(
                f"cannot start {self.name} with its log {self.log}: {error}"
            ) from error
        atexit.register(self.stop)

    @property
    def pid(self) -> int | None:
        """Of the guard, whose only child is the command; ``None`` when it was not started."""
        return self._guard.pid if self._guard is not None else None

    @property
    def exit_code(self) -> int | None:
        """``None`` while it runs."""
        return self._guard.poll() if self._guard is not None else None

    @property
    def running(self) -> bool:
        return self._guard is not None and self._guard.poll() is None

    def wait(self, timeout: float) -> int | None:
        """Wait for its end; ``None`` when it still runs after ``timeout`` seconds."""
        if self._guard is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(timeout)
        return self.exit_code

    def tail(self, lines: int = _TAIL_LINES) -> str:
        """The last lines of the log."""
        return "\n".join(self._log_lines(16_384)[-lines:])

    def last_error(self) -> str | None:
        """The last line of the log that names a cause, or else a mere consequence."""
        consequence: str | None = None
        for line in reversed(self._log_lines(1 << 20)):
            if match := _ERROR.search(line):
                told = line[match.start() :].strip()[:_ERROR_LENGTH]
                if not _CONSEQUENCE.search(line):
                    return told
                consequence = consequence or told
        return consequence

    def _log_lines(self, size: int) -> list[str]:
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - size))
                text = file.read().decode(errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()]

    def check_alive(self) -> None:
        """Raise when the process has ended.

        Raises:
            EngineError: with the exit code and the end of the log.
        """
        if self.running:
            return
        message = f"{self.name} ended with code {self.exit_code}; see {self.log}"
        if error := self.last_error():
            raise EngineError(f"{message}, whose last error is: {error}")
        tail = self.tail()
        raise EngineError(message + (f", which ends with:\n{tail}" if tail else ", which is empty"))

    def stop(self, grace_s: float = 15.0) -> None:
        """Ask the group to end, then end it; safe to call again."""
        process, self._guard = self._guard, None
        if process is None:
            return
        atexit.unregister(self.stop)
        self._signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._signal_group(process, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()

    @staticmethod
    def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):  # macOS: EPERM for a group of zombies
            return

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class EngineProcess(GuardedProcess):
    """A model engine on a loopback port."""

    def __init__(self, command: EngineCommand, *, port: int, log: Path, name: str) -> None:
        super().__init__(command.argv, log=log, name=name, env=command.env)
        self._key = key_of(command)
        self.url = f"http://{LOOPBACK}:{port}"

    def wait_ready(self, timeout: float = 600.0, progress: Progress | None = None) -> None:
        """Wait until it answers a first request.

        Raises:
            EngineError: when it dies or is not ready in time, with the error from its log.
        """

        start = time.monotonic()

        def tell(seconds: float, line: str | None = None) -> None:
            if progress is not None:
                progress(seconds, line or self.tail(1) or "no output yet")

        with EngineClient(self.url, api_key=self._key) as client:
            try:
                client.wait_healthy(timeout, still_alive=self.check_alive, progress=tell)
                waited = time.monotonic() - start
                tell(waited, "the engine is up; a first request warms it")
                client.warm_up(max(1.0, timeout - waited))
            except ServerError as error:
                self.check_alive()
                cause = self.last_error() or self.tail(1)
                raise EngineError(
                    f"{self.name} does not work: {error}; see {self.log}: {cause}"
                ) from error
