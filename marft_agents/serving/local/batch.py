"""The rows in flight, advanced together.

Invariant: slot ``i`` of the cache belongs to ``rows[i]``. Each step first computes a bounded amount
of prompt, oldest row first, then one token for every row whose prompt is complete, so new rows join
without waiting for old ones to end and old ones never wait long for a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from marft_agents.serving.local.cache import Segment, SlotCache
from marft_agents.serving.local.model import LocalModel
from marft_agents.serving.local.prefixes import MIN_SHARED, PrefixStore, common
from marft_agents.serving.local.rows import Row
from marft_agents.serving.local.sampling import sample, score

_RESERVED_OUTPUT = 512
"""Output tokens a row is expected to need when deciding whether it fits."""


class Batch:
    """Rows, their cache and the prefix store. Every method runs on the model's thread.

    Args:
        max_rows: rows in flight at once.
        cache_bytes: soft limit for the keys and values in flight; one row always fits.
        prompt_tokens: prompt tokens computed in one step.
    """

    def __init__(
        self,
        model: LocalModel,
        prefixes: PrefixStore,
        *,
        max_rows: int,
        cache_bytes: int,
        prompt_tokens: int,
    ) -> None:
        self.rows: list[Row] = []
        self.prefixes = prefixes
        self._model = model
        self._slots = SlotCache()
        self._max_rows = max_rows
        self._cache_bytes = cache_bytes
        self._prompt_tokens = prompt_tokens

    def fits(self, row: Row) -> bool:
        """Whether the row can join now."""
        if not self.rows:
            return True
        count = len(self.rows) + 1
        longest = max(_expected(each) for each in (row, *self.rows))
        bytes_needed = count * longest * self._slots.token_bytes
        return count <= self._max_rows and bytes_needed <= self._cache_bytes

    def step(self) -> list[Row]:
        """Advance every row; returns those that ended, which are no longer here."""
        ended = self._remove_ended()
        filling = [index for index, row in enumerate(self.rows) if row.to_fill]
        if filling:
            self._fill(filling)
            ended += self._remove_ended()
        ready = [index for index, row in enumerate(self.rows) if not row.to_fill]
        if ready:
            self._decode(ready)
            ended += self._remove_ended()
        return ended

    def reset(self) -> list[Row]:
        """Give up every row."""
        rows, self.rows = self.rows, []
        self._slots.clear()
        return rows

    def _fill(self, filling: Sequence[int]) -> None:
        parts: dict[int, int] = {}
        for index in filling:
            row = self.rows[index]
            hit = self._known_prefix(row)
            start = max(row.filled, hit[1] if hit else 0)
            part = min(len(row.prompt) - start, self._prompt_tokens)
            width = max(part, *parts.values(), 0)
            if parts and (len(parts) + 1) * width > self._prompt_tokens:
                break
            if self._better_wait(row, start, parts):
                continue
            if hit is not None:
                self._slots.write(index, *hit)
                row.filled = start
            parts[index] = part
        self._compute_prompts(parts)

    def _known_prefix(self, row: Row) -> tuple[Segment, int] | None:
        if row.filled or row.wants_scores or not self.prefixes.enabled:
            return None
        return self.prefixes.find(row.adapter, row.prompt[:-1])

    def _better_wait(self, row: Row, start: int, others: dict[int, int]) -> bool:
        """Whether most of what is left of this prompt is being computed for another row now."""
        if row.filled or row.wants_scores or not self.prefixes.enabled:
            return False
        gain = max(MIN_SHARED, (len(row.prompt) - start) // 2)
        return any(
            other.adapter == row.adapter and common(other.prompt, row.prompt) - start >= gain
            for other in (self.rows[index] for index in others)
        )

    def _compute_prompts(self, parts: dict[int, int]) -> None:
        indices = list(parts)
        rows = [self.rows[index] for index in indices]
        starts = [row.filled for row in rows]
        picks: list[tuple[int, int]] = []
        for place, (row, part) in enumerate(zip(rows, parts.values(), strict=True)):
            first = 0 if row.wants_scores else part - 1
            picks += [(place, offset) for offset in range(first, part)]
        logits_NV = self._model.forward(
            self._slots,
            indices,
            [
                row.prompt[start : start + part]
                for row, start, part in zip(rows, starts, parts.values(), strict=True)
            ],
            starts,
            [row.adapter for row in rows],
            picks,
        )
        begin = 0
        complete: list[int] = []
        last: list[int] = []
        for index, row, part in zip(indices, rows, parts.values(), strict=True):
            count = part if row.wants_scores else 1
            if row.wants_scores:
                _score_prompt(row, logits_NV[begin : begin + count])
            begin += count
            row.filled += part
            if not row.to_fill:
                complete.append(index)
                last.append(begin - 1)
        if complete:
            self._sample(complete, logits_NV[last])
        for index in complete:
            self._remember(index)

    def _decode(self, ready: Sequence[int]) -> None:
        rows = [self.rows[index] for index in ready]
        logits_NV = self._model.forward(
            self._slots,
            ready,
            [[row.out[-1]] for row in rows],
            [row.filled for row in rows],
            [row.adapter for row in rows],
            [(place, 0) for place in range(len(rows))],
        )
        for row in rows:
            row.filled += 1
        self._sample(ready, logits_NV)

    def _sample(self, indices: Sequence[int], logits_NV: torch.Tensor) -> None:
        rows = [self.rows[index] for index in indices]
        tokens = sample(logits_NV, [r.settings for r in rows], [r.generator for r in rows])
        for index, row, token in zip(indices, rows, tokens, strict=True):
            row.accept(token)
            if token is None:
                self._slots.wipe(index)
                row.filled = 0

    def _remember(self, index: int) -> None:
        row = self.rows[index]
        if row.filled and self.prefixes.wants(row.adapter, row.tokens):
            segment = self._slots.read(index, row.filled)
            self.prefixes.add(row.adapter, row.tokens, segment)

    def _remove_ended(self) -> list[Row]:
        """Take ended rows out; the last row moves into each hole."""
        ended: list[Row] = []
        for index in reversed(range(len(self.rows))):
            if not self.rows[index].over:
                continue
            self._remember(index)
            ended.append(self.rows[index])
            last = self.rows.pop()
            if index < len(self.rows):
                self._slots.move(len(self.rows), index, last.filled)
                self.rows[index] = last
        if ended and not self.rows:
            self._slots.clear()
        return ended


def _expected(row: Row) -> int:
    return len(row.prompt) + min(row.settings.max_tokens, _RESERVED_OUTPUT)


def _score_prompt(row: Row, logits_NV: torch.Tensor) -> None:
    """Score the prompt tokens that the newly computed positions predict."""
    following = row.prompt[row.filled + 1 : row.filled + 1 + len(logits_NV)]
    if following:
        row.scores += score(
            logits_NV[: len(following)], following, row.settings.prompt_logprobs or 0
        )
