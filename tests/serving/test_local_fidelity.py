"""Ids and log-probabilities equal a plain transformers + PEFT pass, whatever shares the batch."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from marft_agents.serving.local.engine import LocalEngine
from marft_agents.serving.local.protocol import Settings
from marft_agents.serving.local.sampling import processed_logprobs
from tests.serving.local_setup import Reply, World, ask

CLOSE = 1e-4
NAMES = ("base", "router@v1", "writer@v1", "idle@v1")
PROMPT = [4, 31, 7, 99, 5, 12, 60]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def engine(world: World) -> Generator[LocalEngine]:
    with world.engine() as engine:
        yield engine


def _greedy(world: World, served: str, prompt: Sequence[int], tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(world.logits(served, ids)[-1].argmax()))
    return ids[len(prompt) :]


def _check(world: World, served: str, prompt: Sequence[int], reply: Reply, **kw: Any) -> None:
    whole = reply.wait()
    assert len(whole.logprobs) == len(whole.token_ids)
    expected = world.logprobs(served, prompt, whole.token_ids, **kw)
    assert whole.logprobs == pytest.approx(expected, abs=CLOSE)


@pytest.mark.parametrize("served", NAMES)
def test_greedy_ids_and_raw_logprobs(world: World, engine: LocalEngine, served: str) -> None:
    reply = ask(engine, served, PROMPT)
    _check(world, served, PROMPT, reply)
    assert reply.whole.token_ids == _greedy(world, served, PROMPT, 12)


def test_the_adapters_answer_differently_and_the_untrained_one_as_the_base(
    engine: LocalEngine,
) -> None:
    replies = {name: ask(engine, name, PROMPT).wait() for name in NAMES}
    assert replies["idle@v1"].token_ids == replies["base"].token_ids
    assert replies["idle@v1"].logprobs == pytest.approx(replies["base"].logprobs, abs=CLOSE)
    assert len({tuple(replies[name].token_ids) for name in NAMES}) == 3


@pytest.mark.parametrize("served", NAMES[:3])
def test_sampled_at_temperature(world: World, engine: LocalEngine, served: str) -> None:
    settings = Settings(20, temperature=0.7, ignore_eos=True, seed=3)
    reply = ask(engine, served, PROMPT, settings)
    _check(world, served, PROMPT, reply, temperature=0.7)
    raw = world.logprobs(served, PROMPT, reply.whole.token_ids)
    assert max(abs(a - b) for a, b in zip(raw, reply.whole.logprobs, strict=True)) > 0.05


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8, "top_k": 10},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 1.1, "top_k": 20, "top_p": 0.7, "min_p": 0.02},
    ],
)
def test_truncated_sampling_reports_the_truncated_distribution(
    world: World, engine: LocalEngine, options: dict[str, Any]
) -> None:
    settings = Settings(16, ignore_eos=True, seed=11, **options)
    whole = ask(engine, "router@v1", PROMPT, settings).wait()
    logits = world.logits("router@v1", PROMPT + whole.token_ids)[len(PROMPT) - 1 : -1]
    table = processed_logprobs(logits, [settings] * 16)
    expected = table.gather(-1, torch.tensor(whole.token_ids)[:, None])[:, 0].tolist()
    assert whole.logprobs == pytest.approx(expected, abs=CLOSE)


def test_a_mixed_batch_of_many_equals_each_alone(world: World, engine: LocalEngine) -> None:
    pick = random.Random(1)
    orders = [
        (pick.choice(NAMES), [pick.randrange(3, 300) for _ in range(pick.randrange(1, 40))])
        for _ in range(40)
    ]
    replies = [
        ask(engine, served, prompt, max_tokens=pick.randrange(1, 20)) for served, prompt in orders
    ]
    for (served, prompt), reply in zip(orders, replies, strict=True):
        _check(world, served, prompt, reply)
    for (served, prompt), reply in list(zip(orders, replies, strict=True))[::7]:
        alone = ask(engine, served, prompt, max_tokens=len(reply.whole.token_ids)).wait()
        assert alone.token_ids == reply.whole.token_ids


def test_a_seeded_reply_does_not_depend_on_its_batch(engine: LocalEngine) -> None:
    settings = Settings(24, temperature=1.0, ignore_eos=True, seed=5)
    alone = ask(engine, "writer@v1", PROMPT, settings).wait()
    crowd = [ask(engine, name, PROMPT[i:], max_tokens=30) for i in range(5) for name in NAMES]
    again = ask(engine, "writer@v1", PROMPT, settings).wait()
    for reply in crowd:
        reply.wait()
    assert again.token_ids == alone.token_ids
    other = ask(engine, "writer@v1", PROMPT, settings, seed=6).wait()
    assert other.token_ids != alone.token_ids


@pytest.mark.parametrize("served", NAMES[:3])
def test_prompt_logprobs_are_raw(world: World, engine: LocalEngine, served: str) -> None:
    prompt = [*PROMPT, 88, 41]
    settings = Settings(1, temperature=0.7, prompt_logprobs=2)
    scores = ask(engine, served, prompt, settings).wait().prompt_logprobs
    assert scores is not None
    assert [score.token_id for score in scores] == prompt[1:]
    expected = world.logprobs(served, prompt[:1], prompt[1:])
    assert [score.logprob for score in scores] == pytest.approx(expected, abs=CLOSE)
    table = torch.log_softmax(world.logits(served, prompt), -1)
    assert [s.top[0][0] for s in scores] == table.argmax(-1).tolist()[:-1]


def test_long_prompts_in_small_steps(world: World, tmp_path: Path) -> None:
    """Prompts computed in several steps, rows that join in between, and a growing cache."""
    pick = random.Random(2)
    with world.engine(prompt_tokens=32, max_batch=4) as engine:
        prompts = [[pick.randrange(3, 300) for _ in range(n)] for n in (300, 5, 90, 33, 700, 32)]
        replies = [
            ask(engine, NAMES[i % 3], prompt, prompt_logprobs=0 if i == 2 else None)
            for i, prompt in enumerate(prompts)
        ]
        for i, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
            _check(world, NAMES[i % 3], prompt, reply)
        scores = replies[2].whole.prompt_logprobs
        assert scores is not None
        expected = world.logprobs(NAMES[2], prompts[2][:1], prompts[2][1:])
        assert [score.logprob for score in scores] == pytest.approx(expected, abs=CLOSE)


def test_reused_beginnings_change_nothing(world: World) -> None:
    pick = random.Random(3)
    system = [pick.randrange(3, 300) for _ in range(60)]
    prompts = [system + [pick.randrange(3, 300) for _ in range(9)] for _ in range(6)]
    with world.engine() as engine:
        first = [ask(engine, "router@v1", prompt) for prompt in prompts]
        for prompt, reply in zip(prompts, first, strict=True):
            _check(world, "router@v1", prompt, reply)
        assert engine.reused_tokens >= 5 * 60, "rows that came together share one computation"
        seen = engine.reused_tokens
        longer = prompts[0] + first[0].whole.token_ids + [9, 8, 7]
        _check(world, "router@v1", longer, ask(engine, "router@v1", longer))
        assert engine.reused_tokens - seen == len(prompts[0]) + 11
        seen = engine.reused_tokens
        _check(world, "writer@v1", longer, ask(engine, "writer@v1", longer))
        assert engine.reused_tokens == seen, "another adapter's keys and values are not used"
    with world.engine(prefix_mib=0) as engine:
        replies = [ask(engine, "router@v1", prompt) for prompt in prompts]
        assert [r.wait().token_ids for r in replies] == [r.whole.token_ids for r in first]
        assert engine.reused_tokens == 0


def test_two_choices_share_their_prompt(world: World) -> None:
    prompt = PROMPT * 5
    with world.engine() as engine:
        twins = [
            Reply(prompt, Settings(8, temperature=1.0, ignore_eos=True, seed=seed))
            for seed in (1, 2)
        ]
        engine.submit("writer@v1", [twin.generation for twin in twins])
        for twin in twins:
            _check(world, "writer@v1", prompt, twin)
        assert twins[0].whole.token_ids != twins[1].whole.token_ids
        assert engine.reused_tokens == len(prompt) - 1
