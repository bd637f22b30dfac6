"""Progress as plain lines: which adapter, which step, how long.

Invariant: a line at least every ten seconds of steps, and one at the end of each adapter; no
cursor movement, so it reads well in a log file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from marft_agents.training.schedule import Block

_QUIET_S = 10.0
_SHOWN = ("loss", "logp", "kl", "entropy")


class Progress:
    """Says where training is."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._started = self._spoke = time.monotonic()

    def start(self) -> None:
        """An update begins."""
        self._started = self._spoke = time.monotonic()

    def step(self, block: Block, means: Mapping[str, float]) -> None:
        """A step was taken."""
        now = time.monotonic()
        if block.step < block.steps and now - self._spoke < _QUIET_S:
            return
        self._spoke = now
        shown = "".join(f"  {name} {means[name]:.4f}" for name in _SHOWN if name in means)
        seconds = now - self._started
        self._say(f"  {block.adapter}: step {block.step}/{block.steps}{shown}  {seconds:.0f} s")
