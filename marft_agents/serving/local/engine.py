"""The thread that owns the model.

Invariant: only this thread runs the model or changes it; others put commands into its inbox. A
failing step ends the rows it held with an error and nothing else: the engine goes on.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from marft_agents.serving.local.adapter_files import read_adapter
from marft_agents.serving.local.adapters import AdapterTable
from marft_agents.serving.local.batch import Batch
from marft_agents.serving.local.model import LocalModel
from marft_agents.serving.local.prefixes import PrefixStore
from marft_agents.serving.local.refusal import Refusal, unknown_model
from marft_agents.serving.local.rows import Generation, Row

logger = logging.getLogger(__name__)
T = TypeVar("T")
_MIB = 2**20


@dataclass(frozen=True)
class EngineOptions:
    """What ``--help`` says about them."""

    base_name: str = "base"
    max_batch: int = 32
    window: int | None = None
    max_rank: int = 16
    cache_mib: int = 4096
    prefix_mib: int = 256
    prompt_tokens: int | None = None
    chat_template: str | None = None


class LocalEngine:
    """Loads the model, then serves generations until :meth:`close`."""

    def __init__(self, model_dir: Path, options: EngineOptions | None = None) -> None:
        self.options = options or EngineOptions()
        self.model = LocalModel(model_dir, window=self.options.window)
        if self.options.chat_template is not None:
            self.model.tokenizer.chat_template = self.options.chat_template
        self.adapters = AdapterTable(self.model, self.options.base_name)
        on_cpu = self.model.device.type == "cpu"
        self._batch = Batch(
            self.model,
            PrefixStore(self.options.prefix_mib * _MIB),
            max_rows=self.options.max_batch,
            cache_bytes=self.options.cache_mib * _MIB,
            prompt_tokens=self.options.prompt_tokens or (512 if on_cpu else 4096),
        )
        self._waiting: deque[Row] = deque()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="local-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    @property
    def in_flight(self) -> int:
        """Rows that wait or run."""
        return len(self._waiting) + len(self._batch.rows)

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that were not computed again."""
        return self._batch.prefixes.reused_tokens

    def submit(self, model: str, generations: Sequence[Generation]) -> None:
        """Start these generations under a served name.

        Raises:
            Refusal: 404 when nothing is served under that name, 503 when the engine is closing.
        """
        adapter = self.adapters.take(model, len(generations))

        def start() -> None:
            self._waiting.extend(
                Row(generation, adapter, self.model.decoder, self.model.end_ids)
                for generation in generations
            )

        self._put(start)

    def cancel(self, generations: Sequence[Generation]) -> None:
        """Forget these generations; those that have ended already are no trouble."""
        wanted = {id(generation) for generation in generations}

        def mark() -> None:
            for row in (*self._waiting, *self._batch.rows):
                row.over = row.over or id(row.generation) in wanted

        self._put(mark)

    def load_adapter(self, name: str, folder: Path, *, replace: bool = False) -> None:
        """Read, check and serve an adapter; blocks for a step or two.

        Raises:
            Refusal: 404 without the folder, 400 for a name in use or an adapter not servable.
        """
        self.adapters.check_free(name, replace=replace)
        staged = read_adapter(folder, self.model.linears, self.options.max_rank)
        self._call(lambda: self.adapters.install(name, staged, replace=replace)).result()

    def unload_adapter(self, name: str) -> None:
        """Stop serving a name; rows in flight on it finish.

        Raises:
            Refusal: 404 for an unknown name.
        """
        self.adapters.retire(name)
        self._put(lambda: None)

    def close(self, timeout: float = 10.0) -> None:
        """End every row with an error and stop the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout)

    def known(self, model: str) -> None:
        """Refuse (404) a name that is not served."""
        if not self.adapters.knows(model):
            raise unknown_model(model)

    def _put(self, command: Callable[[], None]) -> None:
        with self._wake:
            if not self.alive:
                raise _closing()
            self._inbox.append(command)
            self._wake.notify()

    def _call(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def command() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        self._put(command)
        return future

    def _run(self) -> None:
        while not self._closing:
            with self._wake:
                self._wake.wait_for(lambda: self._inbox or self._closing or self.in_flight)
            try:
                self._obey()
                with torch.inference_mode():
                    self._advance()
                self.adapters.tidy(self._batch.prefixes.forget)
            except Exception as error:
                logger.exception("a step failed; its %d rows end here", len(self._batch.rows))
                self._fail(Refusal(500, f"the engine failed: {type(error).__name__}: {error}"))
        self._obey()
        self._fail(_closing())
        while self._waiting:
            self._waiting.popleft().fail(_closing())

    def _obey(self) -> None:
        with self._wake:
            commands, self._inbox = self._inbox, deque()
        for command in commands:
            command()

    def _advance(self) -> None:
        while self._waiting and (self._waiting[0].over or self._batch.fits(self._waiting[0])):
            row = self._waiting.popleft()
            if row.over:
                self.adapters.give_back(row.adapter)
            else:
                self._batch.rows.append(row)
        for row in self._batch.step():
            self.adapters.give_back(row.adapter)

    def _fail(self, error: Refusal) -> None:
        for row in self._batch.reset():
            row.fail(error)
            self.adapters.give_back(row.adapter)


def _closing() -> Refusal:
    return Refusal(503, "the engine is shutting down", kind="ServiceUnavailable")
