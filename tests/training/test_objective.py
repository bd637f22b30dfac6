"""One agent is plain PPO: the same steps computed a second time, with padding and torch alone.

The second implementation shares nothing with the package but the order of the rows: it loads the
starting adapter with PEFT, pads each block to a rectangle, and writes the textbook's loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from marft_agents.training._quiet import quiet
from marft_agents.training.batch import TrainRow
from marft_agents.training.loop import Learner
from tests.training.learning import learn, make_learner, make_rows, make_work, recorded, states

PAD = 2


@dataclass
class Setting:
    level: str = "action"
    action_norm: str = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    entropy_coef: float = 0.0
    beta: float = 0.0
    weight_decay: float = 0.0
    importance_sampling_mode: str = "token_truncate"
    importance_sampling_clip_max: float = 2.0
    max_grad_norm: float = 1.0


def changed(s: Setting) -> str:
    usual = vars(Setting())
    return ",".join(f"{k}={v}" for k, v in vars(s).items() if v != usual[k]) or "plain"


@dataclass
class Padded:
    """A block as a rectangle; (B, L) beside its sampled tokens, padded at the end."""

    ids: Tensor
    mask: Tensor
    where: Tensor
    """(B, L) place of each sampled token in ``ids``."""
    real: Tensor
    """(B, L) 1 for a token, 0 for padding."""


def pad(rows: Sequence[TrainRow]) -> Padded:
    whole = [[*r.prompt_ids, *r.token_ids] for r in rows]
    width, longest = max(map(len, whole)), max(len(r.token_ids) for r in rows)
    ids = torch.tensor([w + [PAD] * (width - len(w)) for w in whole])
    mask = torch.tensor([[1] * len(w) + [0] * (width - len(w)) for w in whole])
    where, real = torch.ones(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest)
    for b, row in enumerate(rows):
        for j in range(len(row.token_ids)):
            where[b, j], real[b, j] = len(row.prompt_ids) + j, 1
    return Padded(ids, mask, where, real)


def spread(rows: Sequence[TrainRow], like: Tensor, name: str) -> Tensor:
    """A row's number beside each token, or its numbers; (B, L) with zeros behind."""
    out = torch.zeros_like(like)
    for b, row in enumerate(rows):
        values = getattr(row, name)
        for j in range(len(row.token_ids)):
            out[b, j] = values[0] if len(values) == 1 else values[j]
    return out


class PlainPPO:
    """PPO of one LoRA policy on a fixed batch."""

    def __init__(self, folder: Path, model_dir: Path, rows: Sequence[TrainRow], s: Setting):
        with quiet():
            base: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
            self.model: Any = PeftModel.from_pretrained(base, str(folder), is_trainable=True)
        self.model.eval()
        self.rows, self.s = rows, s
        self.parameters = [p for n, p in self.model.named_parameters() if "lora_" in n]
        self.adam = torch.optim.AdamW(self.parameters, lr=1e-2, weight_decay=s.weight_decay)
        self.mean_length = sum(len(r.token_ids) for r in rows) / len(rows)
        with torch.no_grad():
            self.old = [self.look([row])[0][0] for row in rows]

    def look(self, rows: Sequence[TrainRow]) -> tuple[Tensor, Tensor]:
        """log π (B, L) and entropy (B, L) at the rows' temperatures."""
        p = pad(rows)
        logits = self.model(input_ids=p.ids, attention_mask=p.mask).logits
        tempered = logits / torch.tensor([r.temperature for r in rows])[:, None, None]
        table = torch.log_softmax(tempered, -1)
        before = torch.gather(table, 1, (p.where - 1)[:, :, None].expand(-1, -1, table.shape[-1]))
        tokens = torch.gather(p.ids, 1, p.where)
        logp = torch.gather(before, 2, tokens[:, :, None])[:, :, 0]
        return logp * p.real, -(before.exp() * before).sum(-1) * p.real

    def step(self, numbers: Sequence[int], block: int, factor: Sequence[float]) -> None:
        s, rows = self.s, [self.rows[i] for i in numbers]
        logp, entropy = self.look(rows)
        real = pad(rows).real
        old, mu = torch.zeros_like(real), torch.zeros_like(real)
        for b, (i, row) in enumerate(zip(numbers, rows, strict=True)):
            n = len(row.token_ids)
            old[b, :n], mu[b, :n] = self.old[i][:n], torch.tensor(row.behaviour_L)
        advantage = spread(rows, real, "advantage_L") * torch.tensor(factor)[:, None]
        length = real.sum(1)
        omega = torch.exp(old - mu).clamp(max=s.importance_sampling_clip_max)
        against = old
        if s.importance_sampling_mode == "none":
            omega, against = torch.ones_like(real), mu
        low, high = 1 - s.epsilon, 1 + (s.epsilon if s.epsilon_high is None else s.epsilon_high)
        if s.level == "token":
            ratio = torch.exp(logp - against)
            gain = torch.min(ratio * advantage, ratio.clamp(low, high) * advantage) * omega * real
            objective = gain.sum() / (block * self.mean_length)
        else:
            words = torch.tensor([float(r.words) for r in rows])
            n = {"token": length, "word": words, "sum": torch.ones_like(length)}[s.action_norm]
            ratio = torch.exp(((logp - against) * real).sum(1) / n)
            a = (advantage * real).sum(1) / length
            weight = (omega * real).sum(1) / length
            objective = (torch.min(ratio * a, ratio.clamp(low, high) * a) * weight).sum() / block
        difference = (old - logp) * real  # the start of this one update is the start of the run
        k3 = torch.exp(difference) - difference - 1
        tokens = block * self.mean_length
        loss = -objective - s.entropy_coef * entropy.sum() / tokens + s.beta * k3.sum() / tokens
        self.adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, s.max_grad_norm)
        self.adam.step()

    def state(self) -> dict[str, Tensor]:
        return {
            name.replace(".default.", "."): tensor.detach()
            for name, tensor in self.model.named_parameters()
            if "lora_" in name
        }


def blocks_of(learner: Learner) -> list[list[int]]:
    """Rows of every step, as the learner takes it."""
    taken: list[list[int]] = []
    learner.after_step = lambda: taken.append(list(learner.trainer.block.rows))
    return taken


@pytest.mark.parametrize(
    "s",
    [
        Setting(),
        Setting(action_norm="word"),
        Setting(action_norm="sum"),
        Setting(level="token"),
        Setting(level="token", epsilon=0.1, epsilon_high=0.3),
        Setting(entropy_coef=0.05, beta=0.2, weight_decay=0.1),
        Setting(level="token", entropy_coef=0.05, beta=0.2, weight_decay=0.1, max_grad_norm=0.1),
        Setting(importance_sampling_mode="none"),
        Setting(level="token", importance_sampling_clip_max=1.2),
    ],
    ids=changed,
)
def test_one_agent_is_plain_ppo(s: Setting, model_dir: Path, tmp_path: Path) -> None:
    learner = make_learner(model_dir, tmp_path, adapters=("solo",), **vars(s))
    rows = recorded(learner, make_rows(("solo",), level=s.level, episodes=4), noise=0.8)
    before, taken = states(learner)["solo"], blocks_of(learner)
    plain = PlainPPO(tmp_path / "start" / "solo", model_dir, rows, s)
    (report,) = learn(learner, [make_work(learner, rows)])
    assert [len(numbers) for numbers in taken] == [4, 4, 4, 4]
    for numbers in taken:
        plain.step(numbers, 4, [1.0] * len(numbers))
    ours = states(learner)["solo"]
    assert max(float((ours[n] - before[n]).abs().max()) for n in ours) > 0.01
    assert_close(ours, plain.state())
    clipped = [report.metrics[f"solo/clip_ratio/{side}_mean"] for side in ("low", "high")]
    assert sum(clipped) > 0, "some of it is clipped"


@pytest.mark.parametrize("s", [Setting(), Setting(level="token")], ids=changed)
def test_a_later_agent_is_plain_ppo_on_scaled_advantages(
    s: Setting, model_dir: Path, tmp_path: Path
) -> None:
    learner = make_learner(model_dir, tmp_path, **vars(s))
    rows = recorded(learner, make_rows(level=s.level, episodes=7), noise=0.3)
    mine = [i for i, row in enumerate(rows) if row.adapter == "writer"]
    plain = PlainPPO(tmp_path / "start" / "writer", model_dir, [rows[i] for i in mine], s)
    taken, work = blocks_of(learner), make_work(learner, rows)
    learn(learner, [work])
    factor = [work.batch.factor[i] for i in mine]
    assert max(factor) - min(factor) > 0.1
    for numbers in [block for block in taken if block[0] in mine]:
        places = [mine.index(i) for i in numbers]
        plain.step(places, 4, [factor[n] for n in places])  # the last one of a pass has 3 rows
    assert_close(states(learner)["writer"], plain.state())


def assert_close(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert set(ours) == set(plain)
    for name, tensor in ours.items():
        assert torch.allclose(tensor, plain[name], rtol=0, atol=1e-5), name
