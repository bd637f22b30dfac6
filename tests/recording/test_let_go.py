"""What is over is let go at once: nothing of it waits for the garbage collector.

A full collection takes an application tens of milliseconds; what is left to it makes it come, and
whole replies are held until then.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.recording.kit import HELLO, ask, async_sdk, recording, sdk

KINDS = ("Exchange", "TurnDraft", "Answer", "Choice", "Restorer", "Lines")


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _held() -> dict[str, int]:
    """Objects of calls that are alive."""
    ours = (type(o) for o in gc.get_objects())
    kinds = Counter(
        kind.__name__ for kind in ours if str(kind.__module__).startswith("marft_agents.")
    )
    return {name: kinds[name] for name in KINDS if kinds[name]}


def _read(answer: Any, stream: bool) -> None:
    assert list(answer) if stream else answer.choices


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_are_logged_are_gone(stream: bool) -> None:
    with recording() as (server, recorder, log):
        client = sdk(server)
        recorder.capture(client, "planner")
        with recorder.episode():
            for _ in range(4):
                _read(ask(client, stream=stream), stream)
        assert recorder.flush()
        assert len(log.turns) == 4 and all(turn.trainable for turn in log.turns)
        assert _held() == {}


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("stream", [False, True])
def test_and_so_are_those_of_tasks(stream: bool) -> None:
    async def ask_once(completions: Any) -> None:
        answer = await completions.create(model="planner", messages=HELLO, stream=stream)
        assert [chunk async for chunk in answer] if stream else answer.choices

    async def talk() -> None:
        client = async_sdk(server)
        recorder.capture(client, "planner")
        async with recorder.episode():
            for _ in range(4):
                await ask_once(client.chat.completions)
        assert recorder.flush()
        await asyncio.sleep(0.05)
        assert _held() == {}

    with recording() as (server, recorder, log):
        asyncio.run(talk())
        assert len(log.turns) == 4 and all(turn.trainable for turn in log.turns)
