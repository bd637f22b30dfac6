"""Real failures of real users on the OpenAI Agents SDK."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from agents import Model, ModelResponse, OpenAIChatCompletionsModel, function_tool
from openai import AsyncOpenAI

from marft_agents import MarftRecorder
from marft_agents.testing import InMemoryLog, ScriptedServer
from tests.runtimes.cases import KEY, RuntimeCases, Tool
from tests.runtimes.openai_agents.kit import CLIENTS, agent, play


class TestAgent(RuntimeCases):
    def make(
        self, url: str, *, stream: bool, tools: Sequence[Tool] = (), answer: type[Any] | None = None
    ) -> Any:
        client = AsyncOpenAI(base_url=url, api_key=KEY)
        CLIENTS.append(client)
        options: dict[str, Any] = {"output_type": answer} if answer else {}
        return agent(
            "planner",
            url,
            model=OpenAIChatCompletionsModel("planner", client),
            tools=[function_tool(tool, strict_mode=False) for tool in tools],
            **options,
        )

    async def say(self, app: Any, message: Any, *, stream: bool) -> Any:
        return await play(app, message, stream=stream)

    def picture(self, text: str, url: str) -> Any:
        parts = [
            {"type": "input_text", "text": text},
            {"type": "input_image", "image_url": url, "detail": "auto"},
        ]
        return [{"role": "user", "content": parts}]


class Kept(Model):
    """The app's own model: what another one said to the first question, for ever."""

    def __init__(self, inner: Model) -> None:
        self._inner = inner
        self._kept: ModelResponse | None = None

    async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
        if self._kept is None:
            self._kept = await self._inner.get_response(*args, **kwargs)
        return self._kept

    def stream_response(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.stream_response(*args, **kwargs)


async def test_case_04_a_kept_reply_is_marked_and_is_one_sample(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = InMemoryLog()
    with ScriptedServer() as server, MarftRecorder(log=log) as recorder:
        client = AsyncOpenAI(base_url=server.url, api_key=KEY)
        CLIENTS.append(client)
        model = Kept(OpenAIChatCompletionsModel("planner", client))
        app = recorder.wrap(agent("planner", server.url, model=model))
        for _ in range(3):
            await play(app, "the same question", stream=False)
    assert len(server.requests) == 1
    assert [(t.cached, t.trainable) for t in log.turns] == [(False, True)] + [(True, False)] * 2
    assert len({t.text for t in log.turns}) == 1
    assert caplog.text.count("was answered without a request to its server") == 1
