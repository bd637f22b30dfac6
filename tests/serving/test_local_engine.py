"""The engine's own life: rows that leave early, limits, failures, the end."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch

from marft_agents.errors import ConfigError, EngineError
from marft_agents.serving.local import model as model_module
from marft_agents.serving.local.batch import Batch
from marft_agents.serving.local.engine import LocalEngine
from marft_agents.serving.local.model import LocalModel
from marft_agents.serving.local.prefixes import PrefixStore
from marft_agents.serving.local.protocol import Settings
from marft_agents.serving.local.refusal import Refusal
from marft_agents.serving.local.rows import Row
from tests.serving.local_setup import Reply, World, ask, wait_until

PROMPT = [4, 31, 7, 99, 5, 12, 60]
LONG = Settings(900, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture
def engine(world: World) -> Generator[LocalEngine]:
    with world.engine() as engine:
        yield engine


def test_a_cancelled_row_is_freed_and_the_others_go_on(world: World, engine: LocalEngine) -> None:
    gone = [ask(engine, "router@v1", PROMPT, LONG) for _ in range(3)]
    kept = ask(engine, "writer@v1", PROMPT, max_tokens=40)
    for reply in gone:
        reply.next()
    engine.cancel([reply.generation for reply in gone])
    whole = kept.wait()
    wait_until(lambda: engine.in_flight == 0)
    assert all(reply.whole.finish_reason is None for reply in gone)
    expected = world.logprobs("writer@v1", PROMPT, whole.token_ids)
    assert whole.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_waiting_row_can_be_cancelled(world: World) -> None:
    with world.engine(max_batch=1) as engine:
        first = ask(engine, "base", PROMPT, LONG)
        second = ask(engine, "router@v1", PROMPT)
        first.next()
        engine.cancel([second.generation])
        engine.cancel([first.generation])
        wait_until(lambda: engine.in_flight == 0)
        engine.unload_adapter("router@v1")
        loaded: dict[str, Any] = engine.model.peft.peft_config
        wait_until(lambda: len(loaded) == 3)


def test_more_requests_than_room_wait_their_turn(world: World) -> None:
    with world.engine(max_batch=2) as engine:
        replies = [ask(engine, "router@v1", PROMPT, max_tokens=10 + i) for i in range(7)]
        assert [len(reply.wait().token_ids) for reply in replies] == list(range(10, 17))


def test_rows_fit_by_number_and_by_memory(world: World) -> None:
    model = LocalModel(world.model)

    def row(prompt: int, tokens: int) -> Row:
        generation = Reply([5] * prompt, Settings(tokens, ignore_eos=True)).generation
        return Row(generation, model_module.BASE, model.decoder, model.end_ids)

    token = 2 * 2 * 16 * 4  # layers, keys and values, width, float32
    batch = Batch(model, PrefixStore(0), max_rows=4, cache_bytes=100 * token, prompt_tokens=64)
    assert batch.fits(row(900, 100)), "alone, any row fits"
    batch.rows.append(row(20, 10))
    with torch.inference_mode():
        batch.step()
    assert batch.fits(row(40, 10))
    assert not batch.fits(row(40, 11)), "two rows as long as the longest must fit"
    batch.rows += [row(5, 5), row(5, 5)]
    assert not batch.fits(row(5, 5)), "four rows of 30 exceed 100 tokens"
    batch.rows = [row(1, 1) for _ in range(4)]
    assert not batch.fits(row(1, 1)), "max_rows"


def test_a_reader_that_raises_harms_nobody(engine: LocalEngine) -> None:
    reply = Reply(PROMPT, LONG)

    def closed(_piece: Any) -> None:
        raise RuntimeError("event loop is closed")

    reply.generation.sink = closed
    engine.submit("base", [reply.generation])
    assert ask(engine, "base", PROMPT).wait().finish_reason == "length"
    wait_until(lambda: engine.in_flight == 0)


def test_a_failing_step_ends_its_rows_and_the_engine_goes_on(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = ask(engine, "router@v1", PROMPT, LONG)
    reply.next()

    def explode(*_args: Any, **_kw: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward", explode)
        with pytest.raises(Refusal, match="MemoryError: no room") as failed:
            reply.wait()
        assert failed.value.status == 500
    assert ask(engine, "router@v1", PROMPT).wait().finish_reason == "length"


def test_numbers_that_are_not_end_their_row_only(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = engine.model.forward

    def poisoned(slots: Any, rows: Any, tokens: Any, starts: Any, adapters: Any, picks: Any) -> Any:
        logits = forward(slots, rows, tokens, starts, adapters, picks)
        for pick, (row, _) in enumerate(picks):
            if adapters[row] != model_module.BASE:
                logits[pick] = float("nan")
        return logits

    expected = ask(engine, "base", PROMPT).wait().token_ids
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward", poisoned)
        bad, good = ask(engine, "router@v1", PROMPT), ask(engine, "base", PROMPT)
        with pytest.raises(Refusal, match="not a number"):
            bad.wait()
        assert good.wait().token_ids == expected


def test_closing_ends_what_runs_with_an_error(world: World) -> None:
    with world.engine(max_batch=1) as engine:
        running, waiting = (ask(engine, "base", PROMPT, LONG) for _ in range(2))
        running.next()
        engine.close()
        for reply in (running, waiting):
            with pytest.raises(Refusal, match="shutting down"):
                reply.wait()
        with pytest.raises(Refusal, match="shutting down"):
            ask(engine, "base", PROMPT)
        with pytest.raises(Refusal, match="shutting down"):
            engine.load_adapter("new@v1", world.folders["router@v1"])


def test_the_end_token_ends_a_reply_and_is_among_its_ids(world: World, engine: LocalEngine) -> None:
    free = ask(engine, "router@v1", PROMPT).wait()
    engine.model.end_ids = frozenset({free.token_ids[4], 300})
    try:
        ended = ask(engine, "router@v1", PROMPT, ignore_eos=False).wait()
    finally:
        engine.model.end_ids = frozenset({2})
    assert ended.token_ids == free.token_ids[:5]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    stopped = ask(engine, "router@v1", PROMPT, stop_token_ids=frozenset({free.token_ids[4]})).wait()
    assert stopped.token_ids == ended.token_ids and stopped.text == ended.text
    assert stopped.stop_reason == free.token_ids[4]


def test_the_end_ids_are_the_models(world: World) -> None:
    assert LocalModel(world.model).end_ids == frozenset({2})


def test_a_window_larger_than_the_models_is_refused(world: World) -> None:
    with pytest.raises(ConfigError, match="--max-model-len 2048 is more than the 1024"):
        LocalModel(world.model, window=2048)


def test_a_folder_without_a_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ConfigError, match="no model can be loaded"):
        LocalModel(tmp_path_factory.mktemp("empty"))


def test_a_model_whose_numbers_come_out_differently_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "ATTENTION", "eager_that_forgets")
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def forgets(*args: Any, **kw: Any) -> Any:
        return args[1].transpose(1, 2).contiguous(), None

    AttentionInterface.register("eager_that_forgets", forgets)
    AttentionMaskInterface.register("eager_that_forgets", sdpa_mask)
    with pytest.raises(EngineError, match="differ by"):
        LocalModel(world.model)
