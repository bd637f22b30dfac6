"""``marft-agents serve`` as a child process, for scripts and tests that need a running server.

Invariant: when ``start`` returns, the server answers; when the owner is gone, so is the server.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from marft_agents.errors import EngineError, ServerError
from marft_agents.serving.calls import call, new_client
from marft_agents.serving.commands import LOOPBACK
from marft_agents.serving.process import GuardedProcess, Progress, free_port

_POLL_S = 0.2
_TELL_EVERY_S = 5.0


class ServerProcess:
    """A running ``serve``; use it as a context manager.

    Args:
        adapters: the registry's folder.
        model: base model, a folder or a hub id.
        agents: agents that get an untrained first version when they have none.
        extra: more arguments of the command, e.g. ``["--engine", "local"]``.
        log: file for the output; ``.serve.log`` in ``adapters`` unless given.
    """

    def __init__(
        self,
        adapters: str | Path,
        *,
        model: str | Path,
        agents: Sequence[str] = (),
        extra: Sequence[str] = (),
        port: int | None = None,
        log: Path | None = None,
        env: Mapping[str, str | None] | None = None,
        start_timeout_s: float = 600.0,
        progress: Progress | None = None,
    ) -> None:
        self.adapters = Path(adapters)
        self.port = port or free_port()
        self.url = f"http://{LOOPBACK}:{self.port}"
        self.base_url = f"{self.url}/v1"
        argv = [sys.executable, "-m", "marft_agents", "serve", str(adapters)]
        argv += ["--model", str(model), "--port", str(self.port)]
        argv += ["--agents", ",".join(agents)] if agents else []
        self._process = GuardedProcess(
            [*argv, *extra],
            log=log or self.adapters / ".serve.log",
            name="marft-agents serve",
            env=env,
        )
        self._start_timeout_s = start_timeout_s
        self._progress = progress

    @property
    def log(self) -> Path:
        return self._process.log

    def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            EngineError: when it ends or is not ready in time, with the end of its output.
        """
        self._process.start()
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self) -> None:
        begin = told = time.monotonic()
        with new_client({}) as http:
            while True:
                self._process.check_alive()
                try:
                    call(http, "GET", f"{self.url}/ready", timeout_s=5.0)
                    return
                except ServerError as error:
                    now = time.monotonic()
                    if now - begin > self._start_timeout_s:
                        raise EngineError(
                            f"{self._process.name} was not ready within"
                            f" {self._start_timeout_s:g} s; its output ends with:\n"
                            f"{self._process.tail()}"
                        ) from error
                    if self._progress is not None and now - told >= _TELL_EVERY_S:
                        self._progress(now - begin, self._process.tail(1))
                        told = now
                    time.sleep(_POLL_S)

    @property
    def pid(self) -> int | None:
        """Of the guard, whose only child is the server; ``None`` when it was not started."""
        return self._process.pid

    def stop(self, grace_s: float = 60.0) -> None:
        """Stop it and its engines; safe to call again.

        Requests in flight have its ``--stop-timeout`` to end, but no longer than ``grace_s``.
        """
        self._process.stop(grace_s)

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
