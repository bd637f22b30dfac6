"""Real failures of real users on classic AutoGen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autogen import register_function

from tests.runtimes.cases import KEY, RuntimeCases, Tool
from tests.runtimes.classic.kit import OLD, STREAMS, assistant, config, said, user


class TestAssistant(RuntimeCases):
    streams = STREAMS
    at_once = False

    def make(
        self, url: str, *, stream: bool, tools: Sequence[Tool] = (), answer: type[Any] | None = None
    ) -> Any:
        entry: dict[str, Any] = {"api_key": KEY}
        if answer and not OLD:
            entry["response_format"] = answer
        llm_config = config("planner", url, stream=stream, entry=entry)
        planner, person = assistant("planner", url, llm_config=llm_config), user()
        for tool in tools:
            register_function(tool, caller=planner, executor=person, description=str(tool.__doc__))
        return planner, person

    def wrapped(self, recorder: Any, app: Any) -> Any:
        recorder.wrap(app[0])
        return app

    async def say(self, app: Any, message: Any, *, stream: bool) -> Any:
        planner, person = app
        turns = 2 if planner.llm_config.get("tools") else 1
        chat = person.a_initiate_chat(planner, message=message, max_turns=turns, silent=True)
        return said(await chat)

    def picture(self, text: str, url: str) -> Any:
        parts = [
            {"type": "text", "text": text},
            {"type": "image_url", "image_url": {"url": url}},
        ]
        return {"content": parts}
