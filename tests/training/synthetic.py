"""Logs of a two-agent team on the tiny model: real token ids, real log-probabilities.

The router answers with one of two words, the writer with one of two endings; the reward says which
was right. Log-probabilities come from a plain forward pass over the whole sequence, written without
the package's own scoring.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from marft_agents.log import LogWriter
from marft_agents.registry import Registry, describe_base, write_untrained_adapter
from marft_agents.schema import EpisodeEnded, EpisodeStarted, RewardEvent, Sampling, Turn

GOOD, BAD = " billing", " shipping"
AGENTS = ("router", "writer")
SYSTEM = {
    "router": "you route customer messages: billing or shipping",
    "writer": "you answer the customer in one short line",
}


class TinyModel:
    """The tiny model in its folder, with what writing logs needs of it."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.folder = folder
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def prompt_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    def reply_ids(self, text: str) -> list[int]:
        return [*self.tokenizer.encode(text, add_special_tokens=False), 2]

    @torch.no_grad()
    def logprobs(
        self, prompt: Sequence[int], reply: Sequence[int], temperature: float = 1.0
    ) -> list[float]:
        logits = self.model(torch.tensor([[*prompt, *reply]])).logits[0]
        table = torch.log_softmax(logits.double() / temperature, dim=-1)
        return [float(table[len(prompt) + j - 1, token]) for j, token in enumerate(reply)]


@dataclass
class Team:
    """Writes episodes of the team into a log folder."""

    tiny: TinyModel
    logs: Path
    temperature: float = 1.0
    adapters: dict[str, str | None] = field(
        default_factory=lambda: {a: f"{a}@v1" for a in AGENTS}  # pyright: ignore[reportUnknownLambdaType] a dict of literals
    )
    shift: float = 0.0
    """Added to every recorded log-probability, to make a log that is not the model's."""
    chained: bool = False
    """Whether each turn has read the ones before it."""

    def turn(
        self, episode_id: str, agent: str, index: int, said: str, reply: str, **fields: Any
    ) -> Turn:
        messages = [
            {"role": "system", "content": SYSTEM.get(agent, "you help")},
            {"role": "user", "content": said},
        ]
        prompt, ids = self.tiny.prompt_ids(messages), self.tiny.reply_ids(reply)
        logprobs = [x + self.shift for x in self.tiny.logprobs(prompt, ids, self.temperature)]
        standard: dict[str, Any] = {
            "messages": messages,
            "text": reply,
            "sampling": Sampling(temperature=self.temperature),
            "prompt_token_ids": prompt,
            "token_ids": ids,
            "logprobs": logprobs,
            "logprob_mode": "processed",
            "finish_reason": "stop",
            "adapter_start": self.adapters.get(agent),
            "adapter_end": self.adapters.get(agent),
            "response_id": f"{episode_id}-{index}",
            "depends_on": [f"{episode_id}.{k}" for k in range(index if self.chained else 0)],
        }
        return Turn(
            episode_id=episode_id,
            turn_id=f"{episode_id}.{index}",
            agent=agent,
            index=index,
            **(standard | fields),
        )

    def write(
        self,
        count: int,
        *,
        seed: int = 0,
        reward: Callable[[bool, bool], Any] = lambda router, writer: 0.5 * router + 0.5 * writer,
        agents: Sequence[str] = AGENTS,
        end: str = "terminated",
        prefix: str = "e",
        task: str | None = None,
        **fields: Any,
    ) -> None:
        draw = random.Random(seed)
        with LogWriter(self.logs) as log:
            for n in range(count):
                name = f"{prefix}{n}"
                ticket = f"ticket {n % 10}: the quick brown fox {draw.randrange(10)}"
                said = ticket if task is None else task
                log.write(EpisodeStarted(episode_id=name, task=said))
                good = [draw.random() < 0.5 for _ in agents]
                for index, agent in enumerate(agents):
                    reply = GOOD if good[index] else BAD
                    log.write(self.turn(name, agent, index, said, reply, **fields))
                value = reward(good[0], good[-1])
                if value is not None:
                    log.write(RewardEvent(episode_id=name, value=value))
                log.write(EpisodeEnded.model_validate({"episode_id": name, "reason": end}))


def publish_untrained(root: Path, model_dir: Path, agents: Sequence[str] = AGENTS) -> Registry:
    """A registry with version 1 (B = 0) of every agent."""
    registry, base = Registry(root), describe_base(model_dir)
    for seed, agent in enumerate(agents):
        staged = root.parent / f"staged-{agent}"
        write_untrained_adapter(staged, model_dir, rank=4, seed=seed)
        registry.publish(agent, staged, base=base, parent=None, untrained=True)
        shutil.rmtree(staged)
    return registry


def snapshot(root: Path) -> dict[str, bytes]:
    """Every file under a folder with its content."""
    if not root.exists():
        return {}
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def publish_trained(registry: Registry, model_dir: Path, agent: str, *, seed: int = 7) -> int:
    """One more version of an agent, with a B that is not zero; returns its number."""
    from safetensors.torch import load_file, save_file

    staged = registry.root.parent / f"staged-{agent}"
    write_untrained_adapter(staged, model_dir, rank=4, seed=seed)
    weights = staged / "adapter_model.safetensors"
    draw = torch.Generator().manual_seed(seed)
    state = {
        name: tensor if ".lora_A." in name else torch.randn(tensor.shape, generator=draw) * 0.3
        for name, tensor in load_file(weights).items()
    }
    save_file(state, weights, {"format": "pt"})
    manifest = registry.publish(
        agent, staged, base=describe_base(model_dir), parent=registry.current(agent)
    )
    shutil.rmtree(staged)
    return manifest.version
