"""Real failures of real users on Agent Framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_framework import Content, Message
from agent_framework.openai import OpenAIChatCompletionClient

from tests.runtimes.agent_framework.kit import agent
from tests.runtimes.cases import KEY, RuntimeCases, Tool


class TestAgent(RuntimeCases):
    def make(
        self, url: str, *, stream: bool, tools: Sequence[Tool] = (), answer: type[Any] | None = None
    ) -> Any:
        client = OpenAIChatCompletionClient(model="planner", base_url=url, api_key=KEY)
        options: dict[str, Any] = {"response_format": answer} if answer else {}
        return agent("planner", url, client=client, tools=list(tools), default_options=options)

    async def say(self, app: Any, message: Any, *, stream: bool) -> Any:
        if stream:
            return [str(update.text) async for update in app.run(message, stream=True)]
        return (await app.run(message)).text

    def picture(self, text: str, url: str) -> Any:
        return Message("user", [text, Content.from_uri(url, media_type="image/png")])
