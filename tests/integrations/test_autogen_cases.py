"""Real failures of real users on AutoGen AgentChat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import MultiModalMessage
from autogen_core import Image
from autogen_ext.models.openai import OpenAIChatCompletionClient
from PIL.Image import new as blank

from tests.integrations.autogen_kit import INFO, agent, known, said, streamed
from tests.runtimes.cases import KEY, RuntimeCases, Tool


class TestAssistant(RuntimeCases):
    def make(
        self, url: str, *, stream: bool, tools: Sequence[Tool] = (), answer: type[Any] | None = None
    ) -> Any:
        client = OpenAIChatCompletionClient(
            model="planner", base_url=url, api_key=KEY, model_info={**INFO, "vision": True}
        )
        options = known(AssistantAgent, output_content_type=answer) if answer else {}
        if tools:
            options |= {"tools": list(tools), "reflect_on_tool_use": True}
        return agent("planner", url, client=client, stream=stream, **options)

    async def say(self, app: Any, message: Any, *, stream: bool) -> Any:
        if stream:
            return await streamed(app.run_stream(task=message))
        return said(await app.run(task=message))

    def picture(self, text: str, url: str) -> Any:
        image = Image(blank("RGB", (1, 1)))  # what is no picture cannot be sent
        return MultiModalMessage(content=[text, image], source="user")
