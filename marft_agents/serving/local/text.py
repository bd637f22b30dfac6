"""From token ids to text, one token at a time.

Invariant: the pieces returned by :meth:`TextStream.push` concatenate to the whole reply's text; no
piece ends inside a UTF-8 character, and none holds a part of a stop string that later completes.
The ids are never touched: only text is cut at a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

_PROMPT_TAIL = 5
_INCOMPLETE = "�"


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that the engine uses."""

    chat_template: Any
    eos_token_id: int | None

    def __len__(self) -> int: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str: ...
    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...


class TextStream:
    """Decodes one reply incrementally and watches for stop strings.

    The last prompt ids give the decoder its context, so that a tokenizer which marks words by a
    leading space puts that space where the text continues the prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-_PROMPT_TAIL:])
        self._read = len(self._ids)
        self._context = self._decode(self._ids)
        self._stops = tuple(stop)
        self._include_stop = include_stop
        self._text = ""
        self._released = 0
        self.stopped_by: str | None = None

    def push(self, token_ids: Sequence[int], *, final: bool = False) -> str:
        """Add ids; return the text that can now be shown. ``final`` releases what was held back."""
        self._ids += token_ids
        whole = self._decode(self._ids)
        if final or (len(whole) > len(self._context) and not whole.endswith(_INCOMPLETE)):
            self._extend(whole[len(self._context) :])
            self._ids = self._ids[self._read :]
            self._read = len(self._ids)
            self._context = self._decode(self._ids)
        safe = len(self._text) if final or self.stopped_by else self._safe_length()
        piece = self._text[self._released : safe]
        self._released = max(self._released, safe)
        return piece

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _extend(self, text: str) -> None:
        before = len(self._text)
        self._text += text
        found = [
            (place, stop)
            for stop in self._stops
            if (place := self._text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if found:
            place, self.stopped_by = min(found)
            keep = place + (len(self.stopped_by) if self._include_stop else 0)
            self._text = self._text[:keep]

    def _safe_length(self) -> int:
        """Length of the text without its longest tail that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(self._text)), 0, -1):
            tail = self._text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return len(self._text) - length
        return len(self._text)
