"""An engine that hangs in generation alone is noticed; one that is slow or busy is left alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from starlette.requests import Request
from starlette.types import Message

from marft_agents.errors import ServerError
from marft_agents.serving.calls import AnswerError, NoAnswerError
from marft_agents.serving.client import EngineClient
from marft_agents.serving.pulse import Pulse
from marft_agents.serving.refusals import Refusal
from tests.serving.fake_engine import FakeEngine
from tests.serving.recording_kit import Clock
from tests.serving.stage import House
from tests.serving.test_supervisor import PACE, Watched, watched
from tests.serving.test_wire import OK, REQUEST, pool_of

LATE = NoAnswerError("too late", timed_out=True)


@dataclass
class Engine:
    """Both sides of a scripted engine: what requests wait for, and where it is asked."""

    clock: Clock
    silent_s: float = 200.0
    answer: Exception | None = None
    counts: list[float | None] = field(default_factory=list[float | None])
    asked: int = 0
    meanwhile: Callable[[], object] = lambda: None

    def one_token(self, model: str, timeout_s: float) -> None:
        assert (model, timeout_s) == ("router@v1", 20.0)
        self.asked += 1
        self.meanwhile()
        if self.answer is not None:
            raise self.answer

    def tokens_counted(self) -> float | None:
        return self.counts.pop(0) if self.counts else None


@dataclass
class Patient:
    engine: Engine
    pulse: Pulse

    async def feel(self) -> str | None:
        return await self.pulse.feel(self.engine, self.engine, "router@v1")


@pytest.fixture
def patient() -> Patient:
    clock = Clock()
    clock.now = 1000.0
    return Patient(Engine(clock), Pulse("engine-0", 120.0, 20.0, clock))


async def test_nothing_is_asked_while_something_has_a_byte_or_nobody_waits(
    patient: Patient,
) -> None:
    for silent in (0.0, 119.9):
        patient.engine.silent_s = silent
        assert await patient.feel() is None
    assert patient.engine.asked == 0 and not patient.pulse.found


async def test_a_long_prefill_is_asked_about_once_in_a_while(patient: Patient) -> None:
    assert await patient.feel() is None
    patient.engine.silent_s, patient.engine.clock.now = 319.0, 1119.0
    assert await patient.feel() is None
    assert patient.engine.asked == 1
    patient.engine.clock.now = 1120.0
    assert await patient.feel() is None
    assert patient.engine.asked == 2 and patient.pulse.found == {"answered": 2}


async def test_no_token_in_time_is_a_hang_and_asked_about_again_at_once(patient: Patient) -> None:
    patient.engine.answer = LATE
    for _ in range(2):
        said = await patient.feel()
        assert said is not None
        assert "no request has had a byte for 200 s" in said and "within" not in said
    assert patient.engine.asked == 2 and patient.pulse.found == {"hangs": 2}


@pytest.mark.parametrize("counts", [[5.0, 5.0], [None], [5.0, None, 5.0]])
async def test_what_is_counted_must_have_grown(
    patient: Patient, counts: list[float | None]
) -> None:
    patient.engine.answer, patient.engine.counts = LATE, counts
    found = {"busy": 1} if counts[1:2] == [None] else {"hangs": 1}
    await patient.feel()
    assert patient.pulse.found == found


async def test_an_engine_that_computes_or_sends_meanwhile_is_busy(patient: Patient) -> None:
    engine = patient.engine
    engine.answer, engine.counts = LATE, [5.0, 6.0]
    assert await patient.feel() is None
    engine.clock.now += 120
    engine.meanwhile = lambda: setattr(engine, "silent_s", 0.5)
    assert await patient.feel() is None
    assert patient.pulse.found == {"busy": 2}


async def test_an_answer_that_is_no_token_is_one_all_the_same(patient: Patient) -> None:
    patient.engine.answer = AnswerError("gone", status=404, detail="")
    assert await patient.feel() is None
    assert patient.pulse.found == {"answered": 1}


@pytest.mark.parametrize("error", [AnswerError("x", status=500, detail=""), NoAnswerError("x")])
async def test_other_failures_are_the_supervisors(patient: Patient, error: ServerError) -> None:
    patient.engine.answer = error
    with pytest.raises(ServerError):
        await patient.feel()


async def test_zero_asks_never() -> None:
    engine = Engine(Clock(), answer=LATE)
    assert await Pulse("engine-0", 0.0, 20.0).feel(engine, engine, "router@v1") is None
    assert engine.asked == 0


# -- on the wire -------------------------------------------------------------------------------


async def test_silence_is_since_the_last_byte_of_any_answer_or_the_oldest_request() -> None:
    loop, ahead = asyncio.get_running_loop(), 0.0
    real = loop.time
    go_on, late = asyncio.Event(), asyncio.Event()
    head = OK + b"content-length: 4\r\n\r\na"
    async with pool_of([head, go_on, b"b", late, b"cd"], [late, OK], read_s=9e9) as (pool, engine):
        assert pool.silent_s == 0.0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "time", lambda: real() + ahead)
            answer = await pool.ask(REQUEST)
            ahead = 100.0
            assert 100 <= pool.silent_s < 150
            other = asyncio.ensure_future(pool.ask(REQUEST))
            while engine.scripts:  # until it has been asked
                await asyncio.sleep(0)
            ahead = 200.0
            assert 200 <= pool.silent_s < 250  # a new request is no sign of life
            came = asyncio.Event()
            answer.flow(lambda data, over, error: came.set())
            came.clear()
            go_on.set()
            await came.wait()
            assert pool.silent_s < 50
            ahead = 300.0
            assert 100 <= pool.silent_s < 150
            answer.pause()  # its client is slow; only the other one waits for the engine
            assert 100 <= pool.silent_s < 150
            other.cancel()
            await asyncio.wait([other])
            assert pool.silent_s == 0.0
            answer.resume()
            ahead = 350.0
            assert 50 <= pool.silent_s < 100
            answer.close()
            assert pool.silent_s == 0.0


def test_what_the_engine_counts() -> None:
    with FakeEngine() as engine, EngineClient(engine.url) as client:
        assert client.tokens_counted() is None
        engine.counted = 7
        assert client.tokens_counted() == 107.0


# -- the whole watch ---------------------------------------------------------------------------


async def _ask(it: Watched, *, stream: bool = False) -> None:
    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    request = Request({"type": "http", "headers": []}, receive)
    body = b'{"model": "router@v1", "messages": [], "stream": %s}' % str(stream).lower().encode()
    with contextlib.suppress(Refusal):
        answer = await it.fleet.replicas[0].upstream.post("/v1/chat/completions", body, request)
        await answer.read()


async def test_an_engine_that_hangs_in_generation_alone_is_started_again(house: House) -> None:
    pace = replace(PACE, silence_s=0.05, token_s=0.1, patience_s=0.2)
    async with watched(house, pace) as it:
        engine = it.engine.now
        engine.faults.hang_generation = True
        waiting = [asyncio.ensure_future(_ask(it, stream=stream)) for stream in (False, True)]
        await it.wait_ready(restarts=1)
        await asyncio.gather(*waiting)
        asked = [s.body for s in engine.seen if s.path == "/v1/completions"]
        ours = {"model": "router@v1", "prompt": [1], "max_tokens": 1, "temperature": 0.0}
        assert ours in asked
        assert it.said[0].startswith("engine-0 takes no requests: it generates nothing: no request")
        assert it.supervisor.silences()["engine-0", "hangs"] >= 2


async def test_an_idle_engine_is_not_asked(house: House) -> None:
    async with watched(house, replace(PACE, silence_s=0.01)) as it:
        engine = it.engine.now
        before = len(engine.bodies("/v1/completions"))
        lists = len([s for s in engine.seen if s.path == "/v1/models"])
        async with asyncio.timeout(10):
            while len([s for s in engine.seen if s.path == "/v1/models"]) < lists + 3:
                await asyncio.sleep(0.01)
        assert len(engine.bodies("/v1/completions")) == before
        assert it.supervisor.silences() == {}
