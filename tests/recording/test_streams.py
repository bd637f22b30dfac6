"""Streams that end early, in every way that an end can come."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest

from marft_agents.recording import Call, MarftRecorder
from marft_agents.schema import Turn
from marft_agents.testing import InMemoryLog
from tests.recording.kit import HELLO
from tests.recording.wire_kit import EVENTS, HTTP, Answer, Wire, events_of, stream, streamed

TEXT = "one two three"


def _ask(client: openai.OpenAI) -> Any:
    return client.chat.completions.create(model="planner", messages=HELLO, stream=True)


def _until(stream_: Any, text: str) -> Any:
    for chunk in stream_:
        if chunk.choices and (chunk.choices[0].delta.content or "").strip() == text:
            return chunk
    raise AssertionError(text)


def _break(client: openai.OpenAI) -> None:
    for chunk in _ask(client):
        if chunk.choices[0].delta.content:
            break


def _close(client: openai.OpenAI) -> None:
    answer = _ask(client)
    _until(answer, "one")
    answer.close()


def _leave_with(client: openai.OpenAI) -> None:
    with _ask(client) as answer:
        _until(answer, "one")


def _raise(client: openai.OpenAI) -> None:
    with pytest.raises(KeyError), _ask(client) as answer:
        _until(answer, "one")
        raise KeyError("of the app")


def _drop(client: openai.OpenAI) -> None:
    answer = _ask(client)
    _until(answer, "one")
    del answer
    gc.collect()


def _never_read(client: openai.OpenAI) -> None:
    _ask(client)
    gc.collect()


EARLY: list[Callable[[Any], None]] = [_break, _close, _leave_with, _raise, _drop, _never_read]


@pytest.mark.parametrize("leave", EARLY)
def test_a_stream_left_early_is_no_sample(leave: Callable[[Any], None]) -> None:
    with Wire(streamed(TEXT)).recorded() as (client, log):
        leave(client)
    (turn,) = log.turns
    assert turn.untrainable_reason == "not all of its tokens arrived"
    assert turn.finish_reason is None and turn.error is None
    first = events_of(TEXT)[1]["choices"][0]["token_ids"]
    assert turn.token_ids == (None if leave is _never_read else first)


@pytest.mark.parametrize("leave", ["break", "with", "raise"])
def test_a_stream_left_at_its_last_token_is_whole(leave: str) -> None:
    with Wire(streamed(TEXT)).recorded() as (client, log):
        answer = _ask(client)
        if leave == "raise":
            with pytest.raises(KeyError), answer:
                _until(answer, "three")
                raise KeyError
        else:
            _until(answer, "three")
        answer.close()
    assert log.turns[0].trainable and log.turns[0].text == TEXT


def test_streaming_inside_an_except_block_is_no_failure() -> None:
    with Wire(Answer(status=500), streamed(TEXT)).recorded() as (client, log):
        try:
            _ask(client)
        except openai.InternalServerError:
            assert list(_ask(client))
    assert [(t.error, t.trainable) for t in log.turns] == [("HTTP 500: ", False), (None, True)]


BREAKS: dict[str, Callable[[Any], BaseException]] = {
    "read error": lambda request: HTTP.ReadError("reset", request=request),
    "time-out": lambda request: HTTP.ReadTimeout("slow", request=request),
    "protocol": lambda request: HTTP.RemoteProtocolError("peer closed", request=request),
}


def _broken(kind: str, keep: int, **changes: Any) -> Answer:
    data = stream(events_of(TEXT)[:keep], done=False)
    return Answer([data], kind=EVENTS, error=BREAKS[kind], **changes)


@pytest.mark.parametrize("kind", BREAKS)
@pytest.mark.parametrize("keep", [0, 2, 4])
def test_a_broken_stream_has_failed_even_after_its_last_token(kind: str, keep: int) -> None:
    """The app got an exception and no reply, so nobody acted on this one."""
    with Wire(_broken(kind, keep)).recorded() as (client, log), pytest.raises(Exception):  # noqa: B017
        list(_ask(client))
    (turn,) = log.turns
    assert turn.untrainable_reason == "the call failed"
    assert turn.error is not None and type(BREAKS[kind](None)).__name__ in turn.error
    assert (turn.text or "").strip() == {0: "", 2: "one", 4: TEXT}[keep]


def test_a_chunk_cut_inside_a_character_keeps_what_came_before() -> None:
    data = stream(events_of("ü 🙂 end"), done=False)
    cut = data.index("🙂".encode()) + 2
    answer = Answer([data[:cut]], kind=EVENTS, error=BREAKS["read error"])
    with Wire(answer).recorded() as (client, log), pytest.raises(Exception):  # noqa: B017
        list(_ask(client))
    assert log.turns[0].text == "ü"
    assert log.turns[0].token_ids == events_of("ü 🙂 end")[1]["choices"][0]["token_ids"]


class _Stuck(HTTP.AsyncByteStream):
    """The first pieces of a stream, and then nothing until somebody gives up."""

    def __init__(self, pieces: list[bytes], reached: asyncio.Event) -> None:
        self._pieces = pieces
        self._reached = reached

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece
        self._reached.set()
        await asyncio.Event().wait()


async def _cancelled(pieces: list[bytes], *, announced: bool = False) -> Turn:
    """The turn of a call that is cancelled once ``pieces`` have come."""
    reached, log = asyncio.Event(), InMemoryLog()

    async def answer(request: Any) -> Any:
        if request.method == "GET":
            return Wire()(request)
        if not pieces:
            reached.set()
            await asyncio.Event().wait()
        return HTTP.Response(200, headers={"content-type": EVENTS}, stream=_Stuck(pieces, reached))

    http = HTTP.AsyncClient(transport=HTTP.MockTransport(answer))
    client = openai.AsyncOpenAI(base_url="http://x/v1", api_key="k", http_client=http)

    async def read() -> None:
        request: Any = {"model": "planner", "messages": HELLO, "stream": True}
        async for _ in await client.chat.completions.create(**request):
            pass

    with MarftRecorder(log=log) as recorder, recorder.episode():
        live = recorder.current()
        assert live is not None
        call = Call(live, "planner") if announced else None
        recorder.capture(client, None if announced else "planner")
        with call.current() if call else live.active():
            task = asyncio.create_task(read())
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as stopped:
            await task
        if call is not None:
            call.finish(stopped.value)
    (turn,) = log.turns
    return turn


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("keep", [None, 0, 1, 4])
async def test_case_23_a_cancelled_call_is_no_sample(keep: int | None, announced: bool) -> None:
    pieces = [] if keep is None else [stream(events_of(TEXT)[:keep], done=False) or b": hi\n\n"]
    turn = await _cancelled(pieces, announced=announced)
    assert turn.error == "CancelledError" and not turn.trainable


def test_latency_ends_with_the_last_byte_and_begins_with_the_first_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    data = stream(events_of(TEXT), done=False)
    third = len(data) // 3

    class Slow(Wire):
        def __call__(self, request: Any) -> Any:
            now[0] += 1.0 if request.method == "POST" else 50.0
            return super().__call__(request)

    wire = Slow(Answer([data[:third], data[third:]], kind=EVENTS))
    with wire.recorded() as (client, log):
        answer = _ask(client)
        next(iter(answer))
        now[0] += 7.0
        _until(answer, "three")
        now[0] += 90.0
        answer.close()
    assert log.turns[0].latency_s == 8.0
