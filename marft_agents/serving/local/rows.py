"""One reply in the making.

Invariant: a row's pieces, in order, carry every sampled token exactly once, each with its
log-probability; the last piece, and only it, has a finish reason or an error. The token that ended
the reply is among the ids; its text is not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from marft_agents.serving.local.protocol import Settings
from marft_agents.serving.local.refusal import Refusal
from marft_agents.serving.local.sampling import Sampled, Scored, Top, generator_for
from marft_agents.serving.local.text import TextStream, Tokenizer

logger = logging.getLogger(__name__)


@dataclass
class Piece:
    """What one step added to a reply; pieces of one reply can be added up."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    tops: list[Top] = field(default_factory=list[Top])
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[Scored] | None = None
    """Of every prompt token but the first; on the first piece, when asked for."""
    error: Refusal | None = None

    def add(self, other: Piece) -> None:
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.tops += other.tops
        self.text += other.text
        self.finish_reason = other.finish_reason
        self.stop_reason = other.stop_reason
        if other.prompt_logprobs is not None:
            self.prompt_logprobs = other.prompt_logprobs
        self.error = other.error


@dataclass(eq=False)
class Generation:
    """An order for one reply. ``sink`` is called from the model's thread and must not block."""

    prompt_ids: list[int]
    settings: Settings
    sink: Callable[[Piece], None]


class Row:
    """A generation with its state; ``filled`` positions of it are in the cache."""

    def __init__(
        self,
        generation: Generation,
        adapter: str,
        tokenizer: Tokenizer,
        end_ids: frozenset[int],
    ) -> None:
        self.generation = generation
        self.adapter = adapter
        self.prompt = generation.prompt_ids
        self.settings = generation.settings
        self.generator: torch.Generator = generator_for(self.settings.seed)
        self.out: list[int] = []
        self.filled = 0
        self.scores: list[Scored] = []
        self.over = False
        self._end_ids = frozenset() if self.settings.ignore_eos else end_ids
        self._text = TextStream(
            tokenizer,
            self.prompt,
            self.settings.stop,
            include_stop=self.settings.include_stop,
        )

    @property
    def to_fill(self) -> int:
        """Prompt tokens that are not in the cache yet."""
        return max(0, len(self.prompt) - self.filled)

    @property
    def tokens(self) -> list[int]:
        """The tokens whose keys and values are in the cache."""
        return (self.prompt + self.out)[: self.filled]

    @property
    def wants_scores(self) -> bool:
        return self.settings.prompt_logprobs is not None

    def accept(self, sampled: Sampled | None) -> None:
        """Add one sampled token, and send it. None: the model gave no numbers."""
        if sampled is None:
            self.fail(Refusal(500, "the model's output is not a number; is the adapter damaged?"))
            return
        self.out.append(sampled.token_id)
        piece = Piece([sampled.token_id], [sampled.logprob], [sampled.top])
        self._decide(sampled.token_id, piece)
        if len(self.out) == 1 and self.wants_scores:
            piece.prompt_logprobs = self.scores
        self.over = self.over or piece.finish_reason is not None
        self._send(piece)

    def _decide(self, token: int, piece: Piece) -> None:
        if token in self._end_ids or token in self.settings.stop_token_ids:
            piece.finish_reason = "stop"
            piece.stop_reason = None if token in self._end_ids else token
            piece.text = self._text.push([], final=True)
            return
        last = len(self.out) >= self.settings.max_tokens
        piece.text = self._text.push([token], final=last)
        if self._text.stopped_by is not None:
            piece.finish_reason, piece.stop_reason = "stop", self._text.stopped_by
        elif last:
            piece.finish_reason = "length"

    def fail(self, error: Refusal) -> None:
        """End the reply with an error."""
        if not self.over:
            self.over = True
            self._send(Piece(error=error))

    def _send(self, piece: Piece) -> None:
        try:
            self.generation.sink(piece)
        except Exception:  # a reader that is gone must not stop the others
            self.over = True
            logger.debug("the reader of a reply is gone", exc_info=True)
