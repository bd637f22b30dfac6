"""Any client, in front of a real model: the log holds the tokens that were read and sampled."""

# pyright: reportUnknownMemberType=false
# reason: transformers' tokenizers have no complete types
from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest

from marft_agents import MarftRecorder
from marft_agents.log import LogReader
from marft_agents.registry import Registry
from marft_agents.schema import Episode, Turn
from marft_agents.serving import ServerProcess
from tests.end_to_end.loop import finetune
from tests.serving import plain_app
from tests.tiny_model import CHAT_TEMPLATE, make_tiny_model

MESSAGES: list[Any] = [{"role": "user", "content": "ship on friday? naïve café 🚢"}]
SAMPLING: dict[str, Any] = {"max_tokens": 10, "temperature": 0.8, "seed": 7}
AGENTS = ("router", "writer")
assert "<|im_start|>" in CHAT_TEMPLATE
PROMPT = f"<|im_start|>user\n{MESSAGES[0]['content']}<|im_end|>\n<|im_start|>assistant\n"


class Served:
    """A running ``serve --record`` on a tiny model."""

    def __init__(self, folder: Path, server: ServerProcess, tokenizer: Any) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.server = server
        self._tokenizer = tokenizer

    def decode(self, ids: list[int] | None) -> str:
        return cast(str, self._tokenizer.decode(ids or [], skip_special_tokens=False))

    def url(self, episode: str, agent: str = "router") -> str:
        return f"{self.server.url}/episodes/{episode}/agents/{agent}/v1"

    def episode(self, name: str) -> Episode:
        # Ending an episode comes after its turns in the log's queue.
        httpx.post(f"{self.server.url}/episodes/{name}/end", json={}).raise_for_status()
        while True:
            episode = LogReader(self.logs).episode(name)
            if episode.ended is not None:
                return episode


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("any-client")
    model = make_tiny_model(folder / "model")
    extra = ["--engine", "local", "--record", str(folder / "logs")]
    with ServerProcess(folder / "adapters", model=model, agents=AGENTS, extra=extra) as server:
        yield Served(folder, server, AutoTokenizer.from_pretrained(model))


# -- clients: each makes one call and returns the text it got ------------------------------------


def _text(body: dict[str, Any]) -> str:
    choice = body["choices"][0]
    assert (choice["logprobs"], choice["token_ids"], body["prompt_token_ids"]) == (None, None, None)
    return cast(str, choice["message"]["content"])


def _streamed(text: str) -> str:
    assert text.endswith("data: [DONE]\n\n")
    out = ""
    for line in text.splitlines():
        if line.startswith("data: {"):
            chunk = json.loads(line.removeprefix("data: "))
            for choice in chunk["choices"]:
                assert (choice["logprobs"], choice.get("token_ids")) == (None, None)
                out += choice["delta"].get("content") or ""
    return out


def with_httpx(url: str, stream: bool) -> str:
    body = {"model": "router", "messages": MESSAGES, "stream": stream} | SAMPLING
    answer = httpx.post(f"{url}/chat/completions", json=body, timeout=60)
    return _streamed(answer.text) if stream else _text(answer.json())


def with_openai(url: str, stream: bool) -> str:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        create = client.chat.completions.create
        if stream:
            chunks = create(model="router", messages=MESSAGES, stream=True, **SAMPLING)
            return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        reply = create(model="router", messages=MESSAGES, **SAMPLING)
        return reply.choices[0].message.content or ""


def with_async_openai(url: str, stream: bool) -> str:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            create = client.chat.completions.create
            if stream:
                chunks = await create(model="router", messages=MESSAGES, stream=True, **SAMPLING)
                return "".join(
                    [c.choices[0].delta.content or "" async for c in chunks if c.choices]
                )
            reply = await create(model="router", messages=MESSAGES, **SAMPLING)
            return reply.choices[0].message.content or ""

    return asyncio.run(ask())


def with_a_socket(url: str, stream: bool) -> str:
    """As curl sends it, by hand."""
    where = httpx.URL(url)
    body = {"model": "router", "messages": MESSAGES, "stream": stream} | SAMPLING
    data = json.dumps(body).encode()
    head = f"POST {where.path}/chat/completions HTTP/1.1\r\nHost: {where.host}\r\n"
    head += "Connection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((where.host, where.port or 80), timeout=60) as connection:
        connection.sendall(head.encode() + data)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    head_bytes, _, content = answer.partition(b"\r\n\r\n")
    assert head_bytes.startswith(b"HTTP/1.1 200 OK")
    if not stream:
        return _text(json.loads(content))
    whole = b""
    while content:  # chunked
        size, _, content = content.partition(b"\r\n")
        whole, content = whole + content[: int(size, 16)], content[int(size, 16) + 2 :]
    return _streamed(whole.decode())


CLIENTS: list[Callable[[str, bool], str]] = [
    with_httpx,
    with_openai,
    with_async_openai,
    with_a_socket,
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("client", CLIENTS, ids=lambda c: cast(str, c.__name__))
def test_the_ids_are_those_of_the_text(
    served: Served, client: Callable[[str, bool], str], stream: bool
) -> None:
    name = f"{client.__name__}-{stream}"
    text = client(served.url(name), stream)
    (turn,) = served.episode(name).turns
    assert turn.untrainable_reason is None
    assert turn.text == text
    assert served.decode(turn.token_ids).removesuffix("<|im_end|>") == text
    assert served.decode(turn.prompt_token_ids) == PROMPT
    assert turn.messages == MESSAGES
    assert (turn.sampling.temperature, turn.sampling.seed) == (0.8, 7)
    assert turn.adapter_end == "router@v1"
    assert turn.logprobs is not None and len(turn.logprobs) == len(turn.token_ids or ())


def _comparable(turn: Turn) -> dict[str, Any]:
    own = {"time", "turn_id", "episode_id", "latency_s", "response_id"}
    fields = {k: v for k, v in turn.model_dump().items() if k not in own}
    # Two runs of one prompt differ in the last digits, by how the batch of each was made up.
    return fields | {"logprobs": pytest.approx(turn.logprobs, abs=1e-4)}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_turn_is_the_one_that_the_recorder_in_the_app_writes(
    served: Served, tmp_path: Path, stream: bool
) -> None:
    name = f"same-{stream}"
    with_openai(served.url(name), stream)
    with (
        MarftRecorder(tmp_path) as recorder,
        openai.OpenAI(base_url=served.server.base_url, api_key="none") as client,
    ):
        recorder.attach_client(client, "router")
        with recorder.episode():
            reply = client.chat.completions.create(
                model="router", messages=MESSAGES, stream=stream, **SAMPLING
            )
            if isinstance(reply, openai.Stream):
                list(reply)
    (in_app,) = next(LogReader(tmp_path).episodes()).turns
    (by_url,) = served.episode(name).turns
    assert by_url.model_dump() == by_url.model_dump() | _comparable(in_app)


def test_an_app_that_records_itself_is_not_recorded_again(served: Served, tmp_path: Path) -> None:
    url = served.url("mine")
    with (
        MarftRecorder(tmp_path) as recorder,
        openai.OpenAI(base_url=url, api_key="none") as client,
    ):
        recorder.attach_client(client, "router")
        with recorder.episode():
            client.chat.completions.create(model="router", messages=MESSAGES, **SAMPLING)
    assert len(next(LogReader(tmp_path).episodes()).turns) == 1
    known = httpx.get(f"{served.server.url}/episodes/mine")
    assert known.status_code == 404


def test_a_plain_app_is_recorded_and_its_log_trains(served: Served) -> None:
    command = [sys.executable, "-I", plain_app.__file__, served.server.url, "8"]
    subprocess.run(command, check=True, timeout=120)
    episodes = [e for e in LogReader(served.logs).episodes() if e.task is not None]
    assert len(episodes) == 8
    for episode in episodes:
        router, writer = episode.turns
        assert (router.agent, writer.agent) == AGENTS
        assert all(turn.trainable for turn in episode.turns)
        assert episode.untrainable_reason is None
        assert episode.team_reward is not None
        assert episode.turn_rewards == {writer.turn_id: 0.0}
        if len(router.text or "") > 8:
            assert writer.depends_on == [router.turn_id]
    model, adapters = str(served.folder / "model"), str(served.folder / "adapters")
    done = finetune(
        str(served.logs), "--model", model, "--output", adapters, "--learning-rate", "1e-2"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "episodes: 8 of" in done.stdout
    registry = Registry(served.folder / "adapters")
    assert [registry.versions(agent) for agent in AGENTS] == [[1, 2], [1, 2]]
