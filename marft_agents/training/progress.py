"""Progress as plain lines: which adapter, which step, how long.

Invariant: a line at least every ten seconds of steps, and one at the end of each adapter; no
cursor movement, so it reads well in a log file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback

_QUIET_S = 10.0


class Progress(TrainerCallback):
    """Says where training is; ``steps`` are the optimizer steps per adapter, in order."""

    def __init__(self, steps: Mapping[str, int], say: Callable[[str], None]) -> None:
        self._steps, self._say = dict(steps), say
        self._started = self._spoke = time.monotonic()

    def _where(self, step: int) -> tuple[str, int, int]:
        """Adapter, step within it and its steps, for a global step (from 1)."""
        for adapter, count in self._steps.items():
            if step <= count:
                return adapter, step, count
            step -= count
        adapter, count = list(self._steps.items())[-1]
        return adapter, count, count

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started = self._spoke = time.monotonic()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        adapter, step, count = self._where(state.global_step)
        values = logs or {}
        loss, logp = values.get(f"{adapter}/loss"), values.get(f"{adapter}/logp")
        if loss is None or logp is None:
            return
        self._line(adapter, step, count, f"  loss {loss:.4f}  log-prob {logp:.4f}")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        adapter, step, count = self._where(state.global_step)
        if step == count:
            control.should_log = True
        elif time.monotonic() - self._spoke > _QUIET_S and not control.should_log:
            self._line(adapter, step, count, "")

    def _line(self, adapter: str, step: int, count: int, rest: str) -> None:
        self._spoke = time.monotonic()
        seconds = self._spoke - self._started
        self._say(f"  {adapter}: step {step}/{count}{rest}  {seconds:.0f} s")
