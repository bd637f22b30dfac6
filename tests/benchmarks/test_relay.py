"""The relay's rules, and that what is recorded of a play is what was sampled."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.learning.base import base_folder, call, transcript
from benchmarks.learning.relay import (
    NAMES,
    Task,
    apply,
    draw_task,
    messages,
    right_operation,
    said_value,
    verdict,
)
from benchmarks.learning.team import Relay, Reply, as_episode, play
from benchmarks.learning.words import Words, make_tokenizer
from marft_agents.training.dataset import read_training_set
from tests.benchmarks.conftest import QUICK

ADAPTERS = {"ann": "ann", "bob": "bob"}


@pytest.fixture(scope="module")
def model(relay_base: Path) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model: Any = get_peft_model(
        AutoModelForCausalLM.from_pretrained(relay_base), config, adapter_name="ann"
    )
    model.add_adapter("bob", config)
    return model.eval()


def test_the_values_follow_from_signs_that_alternate() -> None:
    assert Task(8, (4, 1, 3, 2)).values == [2, 1, 4, 2]


def test_the_verdict_looks_at_the_last_value_alone() -> None:
    task = Task(3, (2, 4))  # 3 + 2 - 4 = 1
    assert verdict(task, ["add 5", "sub 1"]) == 1.0
    assert verdict(task, ["sub 9", "add 1"]) == 1.0
    assert verdict(task, ["add 5", "sub 2"]) == 0.0
    assert verdict(task, ["add 5", "1"]) == 0.0
    assert verdict(task, ["add 5", "sub 1 1"]) == 0.0


def test_words_without_one_operation_and_one_value_have_no_value() -> None:
    assert [said_value(t) for t in ("add 5", "add", "", "5 add", "start 3")] == [
        5, None, None, None, None,
    ]  # fmt: skip


def test_the_wrong_operation_never_gives_the_right_value() -> None:
    draw = random.Random(0)
    for _ in range(200):
        task = draw_task(draw, 4)
        for agent, digit in enumerate(task.digits):
            right = right_operation(agent)
            wrong = "sub" if right == "add" else "add"
            assert apply(right, task.start, digit) != apply(wrong, task.start, digit)


def test_an_agent_is_sent_its_own_digit_and_the_words_before_it_only() -> None:
    sent = messages(Task(7, (1, 2, 3)), 1, "add 8")
    assert [m["content"] for m in sent] == ["you are bob", "ann : add 8 your digit 2"]


def test_everything_is_in_the_vocabulary() -> None:
    words, draw = Words(make_tokenizer()), random.Random(0)
    unknown = words.tokenizer.unk_token_id
    texts = [transcript(draw, words, 4, sampled=s) for s in (False, True) for _ in range(50)]
    calls = [call(draw, words) for _ in range(200)]
    assert not any(unknown in ids for ids in texts)
    assert not any(unknown in [*prompt, *reply] for prompt, reply in calls)
    assert {len(prompt) for prompt, _ in calls} == {len(calls[0][0])}


def test_recorded_log_probabilities_are_those_of_a_plain_forward_pass(model: Any) -> None:
    words, draw = Words(make_tokenizer()), random.Random(1)
    tasks = [draw_task(draw, 2) for _ in range(24)]
    relays = play(model, words, tasks, ADAPTERS, torch.Generator().manual_seed(0))
    lengths: set[int] = set()
    for agent, name in enumerate(("ann", "bob")):
        model.set_adapter(name)
        for relay in relays:
            prompt, reply = relay.prompts[agent], relay.replies[agent]
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *reply.token_ids]])).logits[0]
            table = torch.log_softmax(logits.double(), dim=-1)
            plain = [float(table[len(prompt) + j - 1, w]) for j, w in enumerate(reply.token_ids)]
            assert reply.logprobs == pytest.approx(plain, abs=1e-4)
            lengths.add(len(prompt))
    assert len(lengths) > 1  # an odd reply makes the next prompt longer or shorter


def test_the_same_seed_plays_the_same_relays(model: Any) -> None:
    words, draw = Words(make_tokenizer()), random.Random(1)
    tasks = [draw_task(draw, 2) for _ in range(8)]

    def said(seed: int) -> list[list[str]]:
        generator = torch.Generator().manual_seed(seed)
        return [r.said for r in play(model, words, tasks, ADAPTERS, generator)]

    assert said(0) == said(0)
    assert said(0) != said(1)


def test_a_relay_becomes_an_episode_with_hand_offs_and_one_reward() -> None:
    task = Task(3, (2, 4, 1))
    relay = Relay(
        task,
        prompts=[[1, 2], [1, 3], [1, 4]],
        replies=[Reply([5, 0], [-0.1, -0.2])] * 3,
        said=["add 5", "sub 1", "add 2"],
    )
    names = task.names
    data = read_training_set([as_episode(relay, "e", {n: n for n in names}, version=4)])
    episode = data.episodes[0]
    assert episode.agents_K == list(NAMES[:3])
    assert episode.steps_K == [0, 0, 0]
    assert episode.depends_K == [[], [0], [1]]
    assert episode.team_reward_K == [0.0, 0.0, 1.0]
    assert [row.adapter for row in data.rows] == ["ann@v4", "bob@v4", "cy@v4"]
    assert not data.left_out_turns


def test_a_base_is_made_once(relay_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.learning.base.CACHE", relay_base.parent)
    said: list[str] = []
    assert base_folder(QUICK, said.append) == relay_base
    assert said == []
