"""Keys and values of prompts seen before, so that a shared beginning is computed once.

Invariant: an entry is used only for the same adapter and the same tokens, so what is read back is
what a forward pass would compute. Least recently used entries leave first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from marft_agents.serving.local.cache import Segment

MIN_SHARED = 16
"""Shorter common beginnings are not worth a copy."""
_Key = tuple[str, tuple[int, ...]]


class PrefixStore:
    """At most ``budget`` bytes of keys and values; 0 turns it off."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._entries: OrderedDict[_Key, tuple[Segment, int]] = OrderedDict()
        self._bytes = 0
        self.reused_tokens = 0

    @property
    def enabled(self) -> bool:
        return self._budget > 0

    def find(self, adapter: str, tokens: Sequence[int]) -> tuple[Segment, int] | None:
        """The entry that shares most with the beginning of ``tokens``, and how many tokens."""
        best: _Key | None = None
        length = MIN_SHARED - 1
        for key in self._entries:
            if key[0] == adapter and (shared := common(key[1], tokens)) > length:
                best, length = key, shared
        if best is None:
            return None
        self._entries.move_to_end(best)
        self.reused_tokens += length
        return self._entries[best][0], length

    def wants(self, adapter: str, tokens: Sequence[int]) -> bool:
        """Whether an entry for these tokens would hold anything new."""
        if not self.enabled or len(tokens) < MIN_SHARED:
            return False
        return not any(
            key[0] == adapter and common(key[1], tokens) == len(tokens) for key in self._entries
        )

    def add(self, adapter: str, tokens: Sequence[int], segment: Segment) -> None:
        """Keep an entry; those that it continues are dropped."""
        size = sum(part.numel() * part.element_size() for pair in segment for part in pair)
        if size > self._budget:
            return
        for key in [
            key
            for key in self._entries
            if key[0] == adapter and common(key[1], tokens) == len(key[1])
        ]:
            self._drop(key)
        self._entries[adapter, tuple(tokens)] = (segment, size)
        self._bytes += size
        while self._bytes > self._budget:
            self._drop(next(iter(self._entries)))

    def forget(self, adapter: str) -> None:
        """Drop every entry of one adapter."""
        for key in [key for key in self._entries if key[0] == adapter]:
            self._drop(key)

    def _drop(self, key: _Key) -> None:
        self._bytes -= self._entries.pop(key)[1]


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
