"""Reply bodies, shaped as vLLM shapes them.

Invariant: ids and log-probabilities go out exactly as sampled, whole or streamed; only text is
derived. A log-probability that JSON cannot carry (minus infinity, of a token that was cut from the
distribution) goes out as -9999.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from marft_agents.serving.local.rows import Piece
from marft_agents.serving.local.sampling import Scored, Top
from marft_agents.serving.local.text import Tokenizer

_FLOOR = -9999.0
JsonDict = dict[str, Any]
Kind = Literal["chat", "completion"]


@dataclass
class Replies:
    """Builds the bodies of one request: one kind, one id, one model name."""

    kind: Kind
    model: str
    request_id: str
    tokenizer: Tokenizer
    prompts: Sequence[Sequence[int]]
    choices: int
    """Choices per prompt; choice ``i`` answers prompt ``i // choices``."""
    logprobs: bool = False
    token_ids: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, pieces: Sequence[Piece]) -> JsonDict:
        """The body of a reply that is not streamed."""
        build = self._chat_choice if self.kind == "chat" else self._completion_choice
        body = self._frame("chat.completion" if self.kind == "chat" else "text_completion")
        body |= {
            "choices": [build(index, piece) for index, piece in enumerate(pieces)],
            "usage": self.usage(sum(len(piece.token_ids) for piece in pieces)),
        }
        if self.kind == "chat":
            body |= {
                "prompt_token_ids": list(self.prompts[0]) if self.token_ids else None,
                "prompt_logprobs": self._prompt_logprobs(pieces[0].prompt_logprobs),
            }
        return body

    def opening(self, index: int) -> list[JsonDict]:
        """Chunks before a choice's first token: the role and the prompt's ids."""
        if self.kind == "completion":
            return []
        delta = {"role": "assistant", "content": ""}
        choice: JsonDict = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        ids = list(self.prompts[0]) if self.token_ids else None
        return [self._chunk(choice) | {"prompt_token_ids": ids}]

    def piece(self, index: int, piece: Piece, *, offset: int, first: bool) -> JsonDict:
        """One chunk; ``offset`` is where its text begins in the choice's text."""
        choice: JsonDict = {
            "index": index,
            "logprobs": self._logprobs(piece, offset),
            "finish_reason": piece.finish_reason,
            "token_ids": piece.token_ids if self.token_ids else None,
        }
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        if self.kind == "chat":
            return self._chunk(choice | {"delta": {"content": piece.text}})
        if first and self.token_ids:
            choice["prompt_token_ids"] = list(self._prompt(index))
        return self._chunk(choice | {"text": piece.text})

    def closing(self, completion_tokens: int) -> JsonDict:
        """The usage chunk, which has no choices."""
        return self._chunk(None) | {"usage": self.usage(completion_tokens)}

    def usage(self, completion_tokens: int) -> JsonDict:
        prompt_tokens = sum(len(prompt) for prompt in self.prompts)
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
            "prompt_tokens_details": None,
        }

    def _prompt(self, index: int) -> Sequence[int]:
        return self.prompts[index // self.choices]

    def _frame(self, name: str) -> JsonDict:
        return {
            "id": self.request_id,
            "object": name,
            "created": self.created,
            "model": self.model,
        }

    def _chunk(self, choice: JsonDict | None) -> JsonDict:
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        return self._frame(name) | {"choices": [] if choice is None else [choice]}

    def _chat_choice(self, index: int, piece: Piece) -> JsonDict:
        return {
            "index": index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._logprobs(piece, 0),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            "token_ids": piece.token_ids if self.token_ids else None,
        }

    def _completion_choice(self, index: int, piece: Piece) -> JsonDict:
        return {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs(piece, 0),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            "token_ids": piece.token_ids if self.token_ids else None,
            "prompt_logprobs": self._prompt_logprobs(piece.prompt_logprobs),
            "prompt_token_ids": list(self._prompt(index)) if self.token_ids else None,
        }

    def _logprobs(self, piece: Piece, offset: int) -> JsonDict | None:
        if not self.logprobs:
            return None
        rows = list(zip(piece.token_ids, piece.logprobs, piece.tops, strict=True))
        if self.kind == "chat":
            return {
                "content": [
                    self._token(token, logprob)
                    | {"top_logprobs": [self._token(*pair) for pair in top]}
                    for token, logprob, top in rows
                ]
            }
        names = [self._name(token) for token in piece.token_ids]
        starts = [offset + sum(len(name) for name in names[:i]) for i in range(len(names))]
        return {
            "tokens": names,
            "token_logprobs": [max(logprob, _FLOOR) for logprob in piece.logprobs],
            "top_logprobs": [self._best(token, logprob, top) for token, logprob, top in rows],
            "text_offset": starts,
        }

    def _best(self, token: int, logprob: float, top: Top) -> dict[str, float]:
        pairs = [(token, logprob), *top]
        return {self._name(token): max(value, _FLOOR) for token, value in pairs}

    def _token(self, token: int, logprob: float) -> JsonDict:
        name = self._name(token)
        raw = list(name.encode("utf-8", errors="replace"))
        return {"token": name, "logprob": max(logprob, _FLOOR), "bytes": raw}

    def _name(self, token: int) -> str:
        return self.tokenizer.decode([token], clean_up_tokenization_spaces=False)

    def _prompt_logprobs(self, scores: Sequence[Scored] | None) -> list[JsonDict | None] | None:
        if scores is None:
            return None
        return [None, *(self._score(score) for score in scores)]

    def _score(self, score: Scored) -> JsonDict:
        entries: JsonDict = {
            str(token): self._entry(token, logprob, rank)
            for rank, (token, logprob) in enumerate(score.top, start=1)
        }
        entries[str(score.token_id)] = self._entry(score.token_id, score.logprob, score.rank)
        return entries

    def _entry(self, token: int, logprob: float, rank: int) -> JsonDict:
        return {
            "logprob": max(logprob, _FLOOR),
            "rank": rank,
            "decoded_token": self._name(token),
        }


def sse(body: Mapping[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


DONE = "data: [DONE]\n\n"
