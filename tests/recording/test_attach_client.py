"""Any openai SDK client as one agent: call styles, retries, borders, and what never happens."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from marft_agents.errors import ConfigError, IntegrationError
from marft_agents.recording import MarftRecorder
from marft_agents.testing import END, InMemoryLog, Reply, ScriptedServer, token_ids_of
from tests.recording.kit import HELLO, ask, async_sdk, recording, sdk


def _echo(body: dict[str, Any]) -> str:
    return str(body["messages"][0]["content"])


class Answer(BaseModel):
    x: int


def _create(client: openai.OpenAI) -> str | None:
    return ask(client).choices[0].message.content


def _stream(client: openai.OpenAI) -> str:
    chunks = ask(client, stream=True, stream_options={"include_usage": True})
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def _raw(client: openai.OpenAI) -> str | None:
    raw: Any = client.chat.completions.with_raw_response.create(model="planner", messages=HELLO)
    return raw.parse().choices[0].message.content


def _streamed_body(client: openai.OpenAI) -> str | None:
    create = client.chat.completions.with_streaming_response.create
    with create(model="planner", messages=HELLO) as response:
        parsed: Any = response.parse()
        return parsed.choices[0].message.content


def _stream_helper(client: openai.OpenAI) -> str | None:
    with client.chat.completions.stream(model="planner", messages=HELLO) as events:
        for _ in events:
            pass
        return events.get_final_completion().choices[0].message.content


def _with_options(client: openai.OpenAI) -> str | None:
    return _create(client.with_options(timeout=5))


STYLES = [_create, _stream, _raw, _streamed_body, _stream_helper, _with_options]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("legacy", [False, True], ids=["httpx2", "httpx"])
def test_every_style_of_calling_is_one_turn(style: Any, legacy: bool) -> None:
    with recording(["Hello you."]) as (server, recorder, log):
        options: dict[str, Any] = {"http_client": httpx.Client()} if legacy else {}
        with sdk(server, **options) as client:
            recorder.attach_client(client, "planner")
            with recorder.episode():
                assert style(client) == "Hello you."
    (turn,) = log.turns
    assert turn.token_ids == token_ids_of("Hello you.")
    assert len(turn.logprobs or ()) == len(turn.token_ids or ())
    assert turn.trainable and turn.agent == "planner" and turn.text == "Hello you."


@pytest.mark.parametrize("legacy", [False, True], ids=["httpx2", "httpx"])
async def test_async_clients(legacy: bool) -> None:
    options: dict[str, Any] = {"http_client": httpx.AsyncClient()} if legacy else {}
    with recording(["One.", "Two."]) as (server, recorder, log):
        async with async_sdk(server, **options) as client, recorder.episode():
            recorder.attach_client(client, "planner")
            reply = await client.chat.completions.create(model="planner", messages=HELLO)
            assert reply.choices[0].message.content == "One."
            stream = await client.chat.completions.create(
                model="planner", messages=HELLO, stream=True
            )
            assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "Two."
    assert [t.token_ids for t in log.turns] == [token_ids_of("One."), token_ids_of("Two.")]
    assert all(t.trainable for t in log.turns)


async def test_structured_output_that_does_not_parse_keeps_its_tokens() -> None:
    with recording(['{"x": 1}', Reply('{"x": ', finish_reason="length")]) as (s, recorder, log):
        async with async_sdk(s) as client, recorder.episode():
            recorder.attach_client(client, "planner")
            parse = client.chat.completions.parse
            good = await parse(model="planner", messages=HELLO, response_format=Answer)
            assert good.choices[0].message.parsed == Answer(x=1)
            with pytest.raises(openai.LengthFinishReasonError):
                await parse(model="planner", messages=HELLO, response_format=Answer)
    assert [t.token_ids for t in log.turns] == [token_ids_of('{"x": 1}'), [*b'{"x": ']]
    assert all(t.sampling.grammar for t in log.turns)


def test_several_choices_are_several_turns_of_one_reply() -> None:
    with recording(["Hi.", "Hi."]) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode():
            ask(client, n=3)
            list(ask(client, n=2, stream=True))
    one, two = log.turns[:3], log.turns[3:]
    assert [t.choice_index for t in one] == [0, 1, 2] and [t.choice_index for t in two] == [0, 1]
    assert len({t.response_id for t in one}) == 1 and len({t.turn_id for t in log.turns}) == 5
    assert all(t.token_ids == token_ids_of("Hi.") for t in log.turns)


def _at_once(*_: Any, **__: Any) -> float:
    return 0.0


def test_case_23_retries_are_attempts_of_one_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openai.OpenAI, "_calculate_retry_timeout", _at_once)
    script = [Reply(status=503), Reply(status=429), "done", Reply(status=500), Reply(status=500)]
    with recording(script) as (server, recorder, log):
        client = sdk(server, max_retries=2)
        recorder.attach_client(client, "planner")
        with recorder.episode():
            ask(client)
            with pytest.raises(openai.InternalServerError):
                ask(client.with_options(max_retries=1))
    first, second = log.turns
    assert (first.attempt, first.text, first.error) == (3, "done", None)
    assert (second.attempt, second.error) == (2, "HTTP 500: scripted error")
    assert second.token_ids is None


def test_a_failed_call_is_not_mistaken_for_a_retry_of_the_next() -> None:
    with recording([Reply(status=500), "done"]) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode():
            with pytest.raises(openai.InternalServerError):
                ask(client)
            ask(client)
    assert [(t.attempt, t.text, t.error is None) for t in log.turns] == [
        (1, None, False),
        (1, "done", True),
    ]


def test_a_server_that_is_gone_is_a_failed_turn() -> None:
    with recording([]) as (_, recorder, log):
        with ScriptedServer() as gone:  # after the other one, which might get its port
            pass
        recorder.attach_client(client := sdk(gone, timeout=2), "planner")
        with recorder.episode(), pytest.raises(openai.APIConnectionError):
            ask(client)
    (turn,) = log.turns
    assert turn.error is not None and "Connect" in turn.error


async def test_case_23_a_cancelled_call_has_failed() -> None:
    with recording([Reply("late", hang=True)]) as (server, recorder, log):
        async with async_sdk(server) as client, recorder.episode():
            recorder.attach_client(client, "planner")
            create = client.chat.completions.create
            task = asyncio.create_task(create(model="planner", messages=HELLO))
            while not server.requests:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    assert [(t.error, t.token_ids) for t in log.turns] == [("CancelledError", None)]


def test_a_stream_that_the_app_leaves_early_is_incomplete() -> None:
    with recording(["one two three", "one two three"]) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode():
            with ask(client, stream=True) as stream:
                for chunk in stream:
                    if chunk.choices[0].delta.content:
                        break
            left_open = ask(client, stream=True)
            next(iter(left_open))
        left_open.close()
    assert [(t.complete, t.error, t.finish_reason) for t in log.turns] == [(False, None, None)] * 2
    assert log.turns[0].token_ids and END not in log.turns[0].token_ids


def test_two_streams_read_in_turns_do_not_mix() -> None:
    with recording(["a b c", "x y z"]) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode():
            for _ in zip(ask(client, stream=True), ask(client, stream=True), strict=True):
                pass
    assert {t.text for t in log.turns} == {"a b c", "x y z"}
    assert all(t.complete for t in log.turns)


def test_outside_an_episode_the_call_passes_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with recording(["a", "b"]) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with caplog.at_level(logging.WARNING):
            assert _create(client) == "a"
            assert _create(client) == "b"
    assert log.events == []
    assert [r.body.keys() & {"return_token_ids", "logprobs"} for r in server.requests] == [
        set()
    ] * 2
    (record,) = caplog.records
    assert "outside an episode" in record.getMessage()


def test_threads_keep_their_own_episodes() -> None:
    with recording(_echo) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")

        def work(name: str) -> None:
            with recorder.episode(id=name):
                for _ in range(3):
                    ask(client, messages=[{"role": "user", "content": name}])

        threads = [threading.Thread(target=work, args=(f"e{i}",)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(log.turns) == 12
    assert all(t.text == t.episode_id for t in log.turns)
    for name in ("e0", "e3"):
        assert [t.index for t in log.turns if t.episode_id == name] == [0, 1, 2]


def test_an_episode_can_be_made_current_in_another_thread() -> None:
    with recording(["a"]) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode(id="mine") as episode:

            def work() -> None:
                with episode.active():
                    ask(client)

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    assert [t.episode_id for t in log.turns] == ["mine"]


async def test_tasks_keep_their_own_episodes() -> None:
    with recording(_echo) as (server, recorder, log):
        async with async_sdk(server) as client:
            recorder.attach_client(client, "planner")

            async def work(name: str) -> None:
                async with recorder.episode(id=name):
                    message: Any = {"role": "user", "content": name}
                    await client.chat.completions.create(model="planner", messages=[message])

            await asyncio.gather(*(work(f"e{i}") for i in range(5)))
    assert sorted(t.episode_id for t in log.turns) == [f"e{i}" for i in range(5)]
    assert all(t.text == t.episode_id for t in log.turns)


def test_one_client_is_one_agent() -> None:
    with recording([]) as (server, recorder, _):
        client = sdk(server)
        recorder.attach_client(client, "planner")
        recorder.attach_client(client, "planner")
        with pytest.raises(ConfigError, match=r"already records agent 'planner'"):
            recorder.attach_client(client, "coder")
        with (
            MarftRecorder(log=InMemoryLog()) as other,
            pytest.raises(ConfigError, match="'planner'"),
        ):
            other.attach_client(client, "planner")
    with MarftRecorder(log=InMemoryLog()) as later:
        later.attach_client(client, "coder")


def test_only_openai_clients_can_be_attached() -> None:
    with (
        recording([]) as (_, recorder, _),
        pytest.raises(IntegrationError, match=r"builtins\.dict"),
    ):
        recorder.attach_client({}, "planner")


def test_close_takes_the_hook_off() -> None:
    with ScriptedServer() as server:
        client = sdk(server)
        http = client._client  # pyright: ignore[reportPrivateUsage] the place of the hook
        with MarftRecorder(log=InMemoryLog()) as recorder:
            recorder.attach_client(client, "planner")
            assert "send" in vars(http)
        assert "send" not in vars(http)


def test_other_routes_and_odd_bodies_go_through() -> None:
    with recording([]) as (server, recorder, log):
        recorder.attach_client(client := sdk(server), "planner")
        with recorder.episode():
            assert client.models.list().data[0].id == "base"
    assert log.turns == []
