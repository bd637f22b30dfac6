"""What an episode that never ends keeps of itself.

Invariant: whatever grows with an episode's length is bounded here. What is let go is written
already; it can only no longer be compared with what comes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

MOST_TURNS = 4096
"""Turns of an episode whose ids, speakers and outputs are held."""
MOST_TEXT = 16 * 2**20
"""Characters of these outputs, with ``ENTRY`` added for each."""
ENTRY = 256
"""What is held beside a text or an id, in bytes, roughly."""
MOST_NAMES = 65_536
"""Ids of replies, tool calls and messages that are told apart."""


class Newest(OrderedDict[K, V]):
    """A mapping of the ``most`` entries that were set last."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.let_go = False
        """Whether it ever had more."""

    def __setitem__(self, key: K, value: V) -> None:
        known = key in self
        super().__setitem__(key, value)
        if known:
            self.move_to_end(key)
        elif len(self) > self.most:
            self.let_go = True
            self.popitem(last=False)
