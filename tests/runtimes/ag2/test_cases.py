"""Real failures of real users on AG2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ag2.config import OpenAIConfig
from ag2.events.input_events import ImageInput

from tests.runtimes.ag2.kit import agent
from tests.runtimes.cases import KEY, RuntimeCases, Tool


class TestAgent(RuntimeCases):
    def make(
        self, url: str, *, stream: bool, tools: Sequence[Tool] = (), answer: type[Any] | None = None
    ) -> Any:
        config = OpenAIConfig(model="planner", base_url=url, api_key=KEY, streaming=stream)
        options: dict[str, Any] = {"response_schema": answer} if answer else {}
        return agent("planner", url, config=config, tools=list(tools), **options)

    async def say(self, app: Any, message: Any, *, stream: bool) -> Any:
        parts = message if isinstance(message, list) else [message]
        return str((await app.ask(*parts)).body)

    def picture(self, text: str, url: str) -> Any:
        return [text, ImageInput(url)]
