"""Real sockets: the official client against it, many at once, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Generator
from typing import Any, cast

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from marft_agents.serving.local.engine import LocalEngine
from tests.serving.local_setup import World, listening, wait_until

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "ship on friday?"}]
EXTRA: dict[str, Any] = {"return_token_ids": True, "ignore_eos": True}
NAMES = ("router@v1", "writer@v1", "idle@v1")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def served(world: World) -> Generator[tuple[LocalEngine, str]]:
    with world.engine() as engine, listening(engine) as url:
        yield engine, url


def _extra(model: Any, name: str) -> Any:
    """A field that the client's types do not know."""
    return cast("dict[str, Any]", model.model_extra)[name]


def test_the_official_client(served: tuple[LocalEngine, str], world: World) -> None:
    with openai.OpenAI(base_url=f"{served[1]}/v1", api_key="none") as client:
        reply = client.chat.completions.create(
            model="router@v1",
            messages=MESSAGES,
            max_tokens=8,
            temperature=0.7,
            seed=2,
            logprobs=True,
            extra_body=EXTRA,
        )
        choice = reply.choices[0]
        ids: list[int] = _extra(choice, "token_ids")
        assert choice.logprobs is not None and choice.logprobs.content is not None
        expected = world.logprobs("router@v1", _extra(reply, "prompt_token_ids"), ids, 0.7)
        got = [entry.logprob for entry in choice.logprobs.content]
        assert got == pytest.approx(expected, abs=1e-4)
        stream = client.chat.completions.create(
            model="router@v1",
            messages=MESSAGES,
            max_tokens=8,
            temperature=0.7,
            seed=2,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=EXTRA,
        )
        chunks = list(stream)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == choice.message.content
        assert chunks[-1].usage == reply.usage
        assert {model.id for model in client.models.list()} >= {"base", "router@v1"}
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.chat.completions.create(model="nobody", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            client.completions.create(model="base", prompt="a " * 2000)


async def test_the_official_async_client_in_a_crowd(
    served: tuple[LocalEngine, str], world: World
) -> None:
    pick = random.Random(4)
    async with openai.AsyncOpenAI(base_url=f"{served[1]}/v1", api_key="none") as client:

        async def one(number: int) -> None:
            name, temperature = pick.choice(NAMES), pick.choice([0.0, 0.7, 1.0])
            reply = await client.chat.completions.create(
                model=name,
                messages=[{"role": "user", "content": f"plan {number} " * (number % 7)}],
                max_tokens=pick.randrange(1, 24),
                temperature=temperature,
                logprobs=True,
                extra_body=EXTRA,
            )
            logprobs = reply.choices[0].logprobs
            assert logprobs is not None and logprobs.content is not None
            ids = _extra(reply.choices[0], "token_ids")
            prompt = _extra(reply, "prompt_token_ids")
            expected = world.logprobs(name, prompt, ids, temperature or 1.0)
            got = [entry.logprob for entry in logprobs.content]
            assert got == pytest.approx(expected, abs=1e-4)

        await asyncio.gather(*(one(number) for number in range(48)))


async def test_a_swap_while_a_stream_runs(served: tuple[LocalEngine, str], world: World) -> None:
    async with httpx.AsyncClient(base_url=served[1]) as client:
        body: dict[str, Any] = {
            "model": "router@v1",
            "messages": MESSAGES,
            "max_tokens": 400,
            "temperature": 0,
            "stream": True,
            "logprobs": True,
            **EXTRA,
        }
        prompt: list[int] = []
        ids: list[int] = []
        logprobs: list[float] = []
        async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                prompt = chunk.get("prompt_token_ids") or prompt
                choice = chunk["choices"][0]
                ids += choice.get("token_ids") or []
                content = (choice["logprobs"] or {"content": []})["content"]
                logprobs += [entry["logprob"] for entry in content]
                if len(ids) == 5:
                    order = {"lora_name": "router@v1"}
                    assert (await client.post("/v1/unload_lora_adapter", json=order)).is_success
                    order["lora_path"] = str(world.folders["writer@v1"])
                    assert (await client.post("/v1/load_lora_adapter", json=order)).is_success
        try:
            assert len(ids) == 400
            expected = world.logprobs("router@v1", prompt, ids)
            assert logprobs == pytest.approx(expected, abs=1e-4)
        finally:
            served[0].load_adapter("router@v1", world.folders["router@v1"], replace=True)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_row(
    served: tuple[LocalEngine, str], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, url = served
    forward, steps = engine.model.forward, [0]

    def counted(*args: Any) -> Any:
        steps[0] += 1
        return forward(*args)

    monkeypatch.setattr(engine.model, "forward", counted)
    body = {"model": "router@v1", "prompt": "plan", "max_tokens": 900, "stream": stream, **EXTRA}
    async with httpx.AsyncClient(base_url=url) as client:
        request = client.build_request("POST", "/v1/completions", json=body)
        if stream:
            reply = await client.send(request, stream=True)
            async for _ in reply.aiter_lines():
                break
            await reply.aclose()
        else:
            task = asyncio.create_task(client.send(request))
            while not engine.in_flight:
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    wait_until(lambda: engine.in_flight == 0)
    assert 0 < steps[0] < 800, "the row ran to its end for nobody"
