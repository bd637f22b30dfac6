"""The relay's tokenizer: one token a word.

Invariant: a prompt's ids are those of the tokenizer's own chat template, as a server would make
them; a reply's ids end with the end token. Encoding has a memory, since the same few phrases come
again and again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from benchmarks.learning.relay import MODULUS, NAMES, OPERATIONS, Task, messages

END, START, UNKNOWN = "<|end|>", "<|start|>", "<|unknown|>"
VOCABULARY = (
    END, START, UNKNOWN, "system", "user", "assistant", "you", "are", "your", "digit", "task",
    "start", ":", "###", *NAMES, *OPERATIONS, *(str(n) for n in range(MODULUS)),
)  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start|> ' + message['role'] + ' ' + message['content'] + ' <|end|> ' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|> assistant' }}{% endif %}"
)


def make_tokenizer() -> Any:
    """Pad is the end token, as in many chat models."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word: i for i, word in enumerate(VOCABULARY)}
    raw = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token=START,
        eos_token=END,
        pad_token=END,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
    )


class Words:
    """Text to ids and back."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.end: int = tokenizer.eos_token_id
        self._encoded = lru_cache(maxsize=8192)(self._encode)
        self._rendered = lru_cache(maxsize=8192)(self._render)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _render(self, system: str, user: str) -> tuple[int, ...]:
        sent = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        text = self.tokenizer.apply_chat_template(sent, tokenize=False, add_generation_prompt=True)
        return self._encode(text)

    def encode(self, text: str) -> list[int]:
        return list(self._encoded(text))

    def prompt(self, task: Task, agent: int, said: str) -> list[int]:
        """Prompt ids of one agent's call."""
        system, user = messages(task, agent, said)
        return list(self._rendered(system["content"], user["content"]))

    def reply(self, text: str) -> list[int]:
        return [*self._encoded(text), self.end]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)
