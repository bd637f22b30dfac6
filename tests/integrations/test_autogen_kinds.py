"""What an object is to AutoGen, asked once a class: as ``isinstance`` says."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
from autogen_agentchat.agents import AssistantAgent, SocietyOfMindAgent
from autogen_agentchat.base import ChatAgent, Team
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import ChatCompletionClient
from autogen_ext.models.replay import ReplayChatCompletionClient

from marft_agents_autogen.kinds import is_client, is_member

CLIENT = ReplayChatCompletionClient(["hi"])
AGENT = AssistantAgent("planner", CLIENT)
TEAM = RoundRobinGroupChat([AGENT])


class Mine:
    """Neither."""


class Registered:
    """A client, as somebody said."""


ChatCompletionClient.register(Registered)


class Proxy:
    """Says that it is what it stands for, as wrappers of objects do."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @property
    def __class__(self) -> type[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self.inner)


OBJECTS: list[Any] = [
    CLIENT, AGENT, TEAM, SocietyOfMindAgent("mind", TEAM, CLIENT), Mine(), Registered(), Mine,
    AssistantAgent, Proxy(CLIENT), Proxy(AGENT), Proxy(TEAM), Proxy(Mine()), Proxy(Proxy(TEAM)),
    MagicMock(spec=ChatCompletionClient), MagicMock(spec=ChatAgent), MagicMock(spec=Team),
    MagicMock(), None, "text", 3, True, len, lambda: None, [AGENT], {"agent": AGENT}, property(),
]  # fmt: skip


@pytest.mark.parametrize("obj", OBJECTS, ids=lambda o: object.__repr__(o)[:40])
def test_the_answer_is_that_of_isinstance(obj: Any) -> None:
    for _ in range(2):  # also when the class was asked before
        assert is_client(obj) is isinstance(obj, ChatCompletionClient)
        assert is_member(obj) is isinstance(obj, ChatAgent | Team)
