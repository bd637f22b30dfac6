"""Real failures of real users on the OpenAI Agents SDK."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agents import OpenAIChatCompletionsModel, function_tool
from openai import AsyncOpenAI

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
