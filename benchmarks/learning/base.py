"""The base model of the relay: a small Llama that knows the format and half of the work.

Pre-trained on two kinds of text, as a language model has read both chats and talk about chats:

- calls of one agent: a prompt and a reply whose operation is + or - by the toss of a coin and whose
  value is the right one of that operation with probability ``VALUE_ACCURACY``, else any;
- whole relays as transcripts. In half of them the team is good (right operations, right values), in
  the other half its replies are like those of the calls. Who guesses the next words well has to
  notice how well a relay went so far; no agent's prompt says anything of it.

The untrained team therefore succeeds now and then, in the proportion that follows from its errors.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.learning.relay import (
    MODULUS,
    NAMES,
    OPERATIONS,
    TEAM_SIZES,
    apply,
    draw_task,
    opening,
    right_operation,
    said_value,
)
from benchmarks.learning.words import Words, make_tokenizer
from marft_agents.training.transcript import Line, tokenise

CACHE = Path(".cache")
VALUE_ACCURACY = 0.9
_TEXTS = 6000


@dataclass(frozen=True)
class BaseSettings:
    """Size and schooling of a base; its folder is named after all of it."""

    seed: int = 0
    hidden: int = 48
    layers: int = 2
    steps: int = 2000
    batch: int = 64
    learning_rate: float = 5e-3


def _reply(draw: random.Random, agent: int, value: int, digit: int, *, good: bool) -> str:
    operation = right_operation(agent) if good else draw.choice(OPERATIONS)
    result = apply(operation, value, digit)
    if not good and draw.random() >= VALUE_ACCURACY:
        result = draw.randrange(MODULUS)
    return f"{operation} {result}"


def call(draw: random.Random, words: Words) -> tuple[list[int], list[int]]:
    """Prompt and reply ids of one agent somewhere in a relay; all prompts are of one length."""
    task, agent = draw_task(draw, len(NAMES)), draw.randrange(len(NAMES))
    value = draw.randrange(MODULUS)
    said = f"{draw.choice(OPERATIONS)} {value}"
    if agent == 0:
        said = opening(dataclasses.replace(task, start=value))
    reply = _reply(draw, agent, value, task.digits[agent], good=False)
    return words.prompt(task, agent, said), words.reply(reply)


def transcript(draw: random.Random, words: Words, agents: int, *, sampled: bool) -> list[int]:
    """Ids of a relay of a good or a poor team, as the central critic reads them.

    With the replies as text (action level), or as their sampled ids (token level).
    """
    task, good = draw_task(draw, agents), draw.random() < 0.5
    lines, value = [Line("task", task.text)], task.start
    for agent, (name, digit) in enumerate(zip(task.names, task.digits, strict=True)):
        text = _reply(draw, agent, value, digit, good=good)
        value = said_value(text) or 0
        lines.append(Line(name, text, action=True))
    ids = [words.reply(line.text) for line in lines[1:]] if sampled else []
    return list(tokenise(lines, words.encode, ids).ids)


def _transcripts(draw: random.Random, words: Words) -> list[Tensor]:
    """Tables (N, T) of transcripts, one per team size and form."""
    return [
        torch.tensor([transcript(draw, words, n, sampled=s) for _ in range(_TEXTS // 2)])
        for n in TEAM_SIZES.values()
        for s in (False, True)
    ]


def _call_loss(model: Any, prompts: Tensor, replies: Tensor) -> Tensor:
    logits = model(torch.cat([prompts, replies], 1)).logits[:, prompts.shape[1] - 1 : -1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), replies.flatten())


def _text_loss(model: Any, ids: Tensor) -> Tensor:
    logits = model(ids).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _new_model(settings: BaseSettings, tokenizer: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden,
        intermediate_size=4 * settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).float()


def pretrain(settings: BaseSettings, say: Callable[[str], None]) -> tuple[Any, Any]:
    """Model and tokenizer; the same settings give the same model."""
    tokenizer = make_tokenizer()
    words, draw = Words(tokenizer), random.Random(settings.seed)
    calls = [call(draw, words) for _ in range(_TEXTS)]
    prompts = torch.tensor([prompt for prompt, _ in calls])
    replies = torch.tensor([reply for _, reply in calls])
    relays = _transcripts(draw, words)
    model = _new_model(settings, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.learning_rate, total_steps=settings.steps, pct_start=0.1
    )
    generator = torch.Generator().manual_seed(settings.seed)
    for step in range(settings.steps):
        rows = torch.randint(_TEXTS, (settings.batch,), generator=generator)
        read = relays[step % len(relays)][rows[: settings.batch // 2] // 2]
        loss = _call_loss(model, prompts[rows], replies[rows]) + _text_loss(model, read)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 500 == 0:
            say(f"  step {step + 1} of {settings.steps}: loss {float(loss.detach()):.3f}")
    return model.eval(), tokenizer


def base_folder(settings: BaseSettings, say: Callable[[str], None] = print) -> Path:
    """Folder of the base with these settings, pre-trained now unless it is in the cache."""
    sample = transcript(random.Random(0), Words(make_tokenizer()), len(NAMES), sampled=True)
    what = json.dumps([dataclasses.asdict(settings), sample])  # another format: another base
    folder = CACHE / f"relay-base-{hashlib.sha256(what.encode()).hexdigest()[:12]}"
    if not (folder / "config.json").exists():
        say(f"pre-training the base of the relay into {folder}")
        CACHE.mkdir(parents=True, exist_ok=True)
        model, tokenizer = pretrain(settings, say)
        staged = Path(tempfile.mkdtemp(dir=CACHE, prefix=f".{folder.name}-"))
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        try:
            staged.rename(folder)
        except OSError:  # somebody else was faster: the same settings give the same model
            shutil.rmtree(staged)
    return folder
