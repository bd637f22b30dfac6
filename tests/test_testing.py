"""The test kit is itself tested: users build on it."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import pytest

from marft_agents.schema import EpisodeEnded, EpisodeStarted
from marft_agents.testing import (
    END,
    BrokenLog,
    FakeClock,
    FakeIds,
    InMemoryLog,
    Reply,
    Script,
    ScriptedServer,
    default_reply,
    token_ids_of,
)

ASK: dict[str, Any] = {"model": "planner", "messages": [{"role": "user", "content": "Hi"}]}
FULL = ASK | {"return_token_ids": True, "logprobs": True}


def _post(server: ScriptedServer, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    request = urllib.request.Request(
        f"{server.url}/chat/completions", data, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=5) as response:
        return response.read()


def _ask(server: ScriptedServer, **more: Any) -> dict[str, Any]:
    return json.loads(_post(server, FULL | more))


def _events(raw: bytes) -> list[Any]:
    lines = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_tokens_come_when_asked_for() -> None:
    with ScriptedServer(["Grüße", "Grüße"]) as server:
        bare = json.loads(_post(server, ASK))
        full = _ask(server)
    assert bare["prompt_token_ids"] is None
    assert bare["choices"][0]["token_ids"] is None and bare["choices"][0]["logprobs"] is None
    ids = full["choices"][0]["token_ids"]
    assert ids == token_ids_of("Grüße") and ids[-1] == END
    assert bytes(ids[:-1]).decode() == "Grüße"
    assert len(full["choices"][0]["logprobs"]["content"]) == len(ids)
    assert full["usage"]["completion_tokens"] == len(ids)


def test_a_stream_adds_up_to_the_reply() -> None:
    with ScriptedServer(["one two three"]) as server:
        events = _events(_post(server, FULL | {"stream": True, "stream_options": USAGE}))
    first, *middle, usage = events
    assert first["prompt_token_ids"] and usage["choices"] == []
    choices = [e["choices"][0] for e in middle]
    assert "".join(c["delta"]["content"] for c in choices) == "one two three"
    ids = [i for c in choices for i in c["token_ids"]]
    assert ids == token_ids_of("one two three")
    assert usage["usage"]["completion_tokens"] == len(ids)


USAGE = {"include_usage": True}


def test_a_length_cut_reply_has_no_end_token() -> None:
    with ScriptedServer([Reply("ab", finish_reason="length")]) as server:
        choice = _ask(server)["choices"][0]
    assert (choice["token_ids"], choice["finish_reason"]) == ([97, 98], "length")


def _by_content(body: dict[str, Any]) -> str:
    return str(body["messages"][0]["content"]) + "!"


@pytest.mark.parametrize(
    ("script", "want"),
    [
        (["a", Reply("b")], ["a", "b"]),
        ({"planner": ["a", "b"]}, ["a", "b"]),
        ({"planner": "same"}, ["same", "same"]),
        (_by_content, ["Hi!", "Hi!"]),
        (None, [default_reply(ASK)] * 2),
    ],
)
def test_scripts_of_every_kind(script: Script, want: list[str]) -> None:
    with ScriptedServer(script) as server:
        replies = [_ask(server)["choices"][0]["message"]["content"] for _ in range(2)]
    assert replies == want
    assert [r.body["model"] for r in server.requests] == ["planner"] * 2
    assert server.requests[0].path == "/v1/chat/completions"


@pytest.mark.parametrize(
    ("script", "code", "message"),
    [
        ([Reply(status=503, error="busy")], 503, "busy"),
        ([], 400, "the script has no reply left"),
        ({"other": "a"}, 404, "no model 'planner' in the script"),
    ],
)
def test_errors(script: Script, code: int, message: str) -> None:
    with ScriptedServer(script) as server, pytest.raises(urllib.error.HTTPError) as caught:
        _ask(server)
    with caught.value as error:
        assert error.code == code
        assert json.loads(error.read())["error"]["message"] == message


def test_a_cut_stream_breaks_the_connection() -> None:
    with (
        ScriptedServer([Reply("one two three", cut_after=2)]) as server,
        pytest.raises(OSError) as caught,
    ):
        try:
            _post(server, FULL | {"stream": True})
        except Exception as error:
            raise OSError(type(error).__name__) from error
    assert "IncompleteRead" in str(caught.value)


def test_a_hanging_reply_ends_with_the_server() -> None:
    with ScriptedServer([Reply("never", hang=True)]) as server:
        address = urlsplit(server.url)
        client = http.client.HTTPConnection(str(address.hostname), address.port, timeout=5)
        client.request("POST", "/v1/chat/completions", json.dumps(ASK))  # and keeps the connection
        while not server.requests:
            time.sleep(0.01)
    with pytest.raises(http.client.RemoteDisconnected):  # and no time-out
        client.getresponse()
    client.close()


def test_speakers_are_chosen_among_those_offered() -> None:
    prompt = "Then select the next role from ['planner', 'coder'] to play."
    chosen = default_reply({"messages": [{"role": "user", "content": prompt}]})
    assert chosen in ("planner", "coder")


def test_models_are_listed_with_their_owner() -> None:
    with (
        ScriptedServer(owned_by="someone") as server,
        urllib.request.urlopen(f"{server.url}/models", timeout=5) as response,
    ):
        assert json.loads(response.read())["data"][0]["owned_by"] == "someone"
    assert server.listings == 1


def test_fakes() -> None:
    clock = FakeClock(datetime(2026, 1, 1, tzinfo=UTC))
    assert (clock().second, clock().second) == (1, 2)
    ids = FakeIds("e")
    assert (ids(), ids()) == ("e-1", "e-2")
    log = InMemoryLog()
    log.write(EpisodeStarted(episode_id="e"))
    log.close()
    assert log.closed and len(log.of(EpisodeStarted)) == 1 and log.of(EpisodeEnded) == []
    with pytest.raises(OSError, match="No space left"):
        BrokenLog().write(EpisodeStarted(episode_id="e"))
