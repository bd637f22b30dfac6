"""Keys and values of every row in flight, in one buffer per layer.

Invariant: the entry of row ``r`` at position ``p`` lives at ``buffer[r, :, p]``, from the row's
first token to its last. So a row joins, leaves or moves without touching another row, positions are
plain indices, and what lies beyond a row's length is finite and masked out.

Axes: ``_B`` rows of one forward, ``_T`` its tokens per row, ``_S`` key positions; buffers are
(rows, heads, positions, head size).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# reason: transformers ships no complete types
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "marft_local"
_STEP = 256
Segment = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values (heads, positions, head size) of one row, per layer."""


class SlotCache:
    """The buffers; they grow by doubling and are dropped when nothing is in flight."""

    def __init__(self) -> None:
        self._rows = 0
        self._length = 0
        self._layers: dict[int, list[torch.Tensor]] = {}
        self._token_bytes = 0

    @property
    def token_bytes(self) -> int:
        """Bytes that one position of one row takes, over all layers; 0 before the first forward."""
        return self._token_bytes

    def reserve(self, rows: int, length: int) -> None:
        """Make room for ``rows`` rows of ``length`` positions."""
        if rows <= self._rows and length <= self._length:
            return
        if rows > self._rows:
            self._rows = max(rows, 2 * self._rows)
        if length > self._length:
            self._length = max(-(-length // _STEP) * _STEP, min(2 * self._length, length + 2048))
        self._layers = {
            index: [self._grown(buffer) for buffer in pair] for index, pair in self._layers.items()
        }

    def _grown(self, old: torch.Tensor) -> torch.Tensor:
        new = old.new_zeros(self._rows, old.shape[1], self._length, old.shape[3])
        new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def clear(self) -> None:
        """Forget everything."""
        self._rows = self._length = 0
        self._layers = {}

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of one row over another row."""
        if not length:  # a row that has not begun may lie beyond the buffers
            return
        for pair in self._layers.values():
            for buffer in pair:
                buffer[target, :, :length] = buffer[source, :, :length]

    def wipe(self, row: int) -> None:
        """Zero a row that holds something that is not a number."""
        for pair in self._layers.values():
            for buffer in pair:
                buffer[row].zero_()

    def read(self, row: int, length: int) -> Segment:
        """A copy of a row's first ``length`` positions."""
        return [
            (keys[row, :, :length].clone(), values[row, :, :length].clone())
            for _, (keys, values) in sorted(self._layers.items())
        ]

    def write(self, row: int, segment: Segment, length: int) -> None:
        """Put back the first ``length`` positions of what :meth:`read` returned."""
        self.reserve(row + 1, length)
        for index, pair in enumerate(segment):
            for which, part in enumerate(pair):
                self._layer(index, *pair)[which][row, :, :length] = part[:, :length]

    def store(
        self,
        layer: int,
        rows_B1: torch.Tensor,
        positions_BT: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Write new entries (B, heads, T, size) at their places; return the layer's buffers."""
        buffers = self._layer(layer, keys[0], values[0])
        for buffer, new in zip(buffers, (keys, values), strict=True):
            buffer[rows_B1, :, positions_BT] = new.transpose(1, 2)
        return buffers

    def _layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        if index not in self._layers:
            self._layers[index] = [
                part.new_zeros(self._rows, part.shape[0], self._length, part.shape[2])
                for part in (keys, values)
            ]
            if index == len(self._layers) - 1:
                self._token_bytes = sum(
                    buffer.shape[1] * buffer.shape[3] * buffer.element_size()
                    for pair in self._layers.values()
                    for buffer in pair
                )
        return self._layers[index]


class ForwardCache(Cache):
    """What one forward pass sees: the given rows, from position 0 to the last one needed."""

    def __init__(self, slots: SlotCache, rows: Sequence[int], positions_BT: torch.Tensor) -> None:
        super().__init__(layers=[])
        self._slots = slots
        self._positions_BT = positions_BT
        self._rows_B = torch.tensor(list(rows), device=positions_BT.device)
        self._span = _as_slice(rows)
        self.key_length = int(positions_BT.max()) + 1
        slots.reserve(max(rows) + 1, self.key_length)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._slots.store(
            layer_idx, self._rows_B[:, None], self._positions_BT, key_states, value_states
        )
        return self._visible(keys), self._visible(values)

    def _visible(self, buffer: torch.Tensor) -> torch.Tensor:
        contiguous = self._span is not None
        rows = buffer[self._span] if contiguous else buffer.index_select(0, self._rows_B)
        return rows[:, :, : self.key_length]

    def mask(self) -> torch.Tensor:
        """(B, 1, T, S), true where a query may look: at its own position and before."""
        keys_S = torch.arange(self.key_length, device=self._positions_BT.device)
        return (keys_S <= self._positions_BT[:, :, None])[:, None]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.key_length


def _as_slice(rows: Sequence[int]) -> slice | None:
    """The rows as one stretch of the buffer, where they are one: no copy is needed then."""
    first = rows[0]
    if all(row == first + offset for offset, row in enumerate(rows)):
        return slice(first, first + len(rows))
    return None


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention that does not repeat grouped keys and values on a CPU.

    There, the repeated copies cost five times the attention itself; the CPU kernel needs none.
    """
    if query.device.type != "cpu" or attention_mask is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def register_attention() -> None:
    """Make :data:`ATTENTION` known to transformers."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
