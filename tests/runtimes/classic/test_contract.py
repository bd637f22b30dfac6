"""Classic AutoGen keeps the contract of every integration, in each kind of chat."""

from __future__ import annotations

from typing import Any

from marft_agents.testing import IntegrationContract
from tests.runtimes.classic.kit import assistant, config, group, needs, said, user


class TestTwoAgents(IntegrationContract):
    """Both agents have a model."""

    def make_team(self, server_url: str, *, stream: bool) -> Any:
        return [assistant(name, server_url, stream=stream) for name in ("planner", "coder")]

    def run(self, team: Any, task: str) -> Any:
        planner, coder = team
        return said(coder.initiate_chat(planner, message=task, max_turns=2, silent=True))


class TestGroupChat(IntegrationContract):
    """A selection before each turn; the manager alone is wrapped."""

    def make_team(self, server_url: str, *, stream: bool) -> Any:
        names = ("planner", "coder", "critic")
        members = [assistant(n, server_url, stream=stream) for n in names]
        return group([user(), *members], server_url, rounds=5, stream=stream)

    def run(self, team: Any, task: str) -> Any:
        starter = team.groupchat.agents[0]
        return said(starter.initiate_chat(team, message=task, silent=True))


class TestAsyncGroupChat(TestGroupChat):
    """The model is called from worker threads without context."""

    async def run(self, team: Any, task: str) -> Any:
        starter = team.groupchat.agents[0]
        return said(await starter.a_initiate_chat(team, message=task, silent=True))


class TestNestedChats(IntegrationContract):
    """The planner answers with the summary of a chat of its own; nobody wrapped the inner agent."""

    def make_team(self, server_url: str, *, stream: bool) -> Any:
        planner = assistant("planner", server_url, stream=stream)
        coder = assistant("coder", server_url, stream=stream)
        writer = assistant("writer", server_url, stream=stream)
        queue = [{"recipient": writer, "max_turns": 2, "clear_history": False}]
        planner.register_nested_chats(queue, trigger=coder)
        return [coder, planner]

    def run(self, team: Any, task: str) -> Any:
        coder, planner = team
        return said(coder.initiate_chat(planner, message=task, max_turns=2, silent=True))


@needs("autogen.agentchat.group.patterns")
class TestAutoPattern(IntegrationContract):
    """AutoGen makes the manager, the group and the tool executor when the run begins."""

    def make_team(self, server_url: str, *, stream: bool) -> Any:
        from autogen.agentchat.group.patterns import AutoPattern

        planner, coder = (assistant(n, server_url, stream=stream) for n in ("planner", "coder"))
        return AutoPattern(
            initial_agent=planner,
            agents=[planner, coder],
            user_agent=user(),
            group_manager_args={"llm_config": config("selector", server_url, stream=stream)},
        )

    def run(self, team: Any, task: str) -> Any:
        from autogen.agentchat import initiate_group_chat

        result, _, _ = initiate_group_chat(pattern=team, messages=task, max_rounds=5)
        return said(result)


@needs("autogen.agentchat.group.patterns")
class TestAsyncPattern(TestAutoPattern):
    async def run(self, team: Any, task: str) -> Any:
        from autogen.agentchat import a_initiate_group_chat

        result, _, _ = await a_initiate_group_chat(pattern=team, messages=task, max_rounds=5)
        return said(result)
