"""Agents and workflows of Agent Framework on a scripted server, for the tests here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_framework import Agent, Workflow
from agent_framework.openai import OpenAIChatCompletionClient
from agent_framework.orchestrations import GroupChatBuilder, HandoffBuilder, SequentialBuilder

from marft_agents.schema import JsonDict
from marft_agents.testing import Reply, default_reply


def client(model: str, url: str, **options: Any) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(model=model, base_url=url, api_key="sk-test", **options)


def agent(name: str, url: str, **options: Any) -> Agent:
    chat: Any = options.pop("client", None) or client(name, url)
    options.setdefault("description", f"the {name}")
    return Agent(chat, f"You are the {name}.", name=name, **options)


def agents(url: str, *names: str, **options: Any) -> list[Agent]:
    return [agent(name, url, **options) for name in names]


def by_turns(state: Any) -> str:
    names = list(state.participants)
    return str(names[state.current_round % len(names)])


def group_chat(url: str, *, rounds: int = 4, **options: Any) -> Workflow:
    members = agents(url, "planner", "coder")
    return GroupChatBuilder(
        participants=members, selection_func=by_turns, max_rounds=rounds, **options
    ).build()


def sequential(url: str, *names: str, **options: Any) -> Workflow:
    return SequentialBuilder(participants=agents(url, *(names or ("planner", "coder")))).build()


def handing_off(body: JsonDict) -> Reply | str:
    """The planner hands off at once; the coder hands back once and the planner then answers."""
    said = default_reply(body)
    tools = {tool["function"]["name"] for tool in body.get("tools") or ()}
    heard = sum(1 for m in body["messages"] if m["role"] == "assistant" and m.get("content"))
    who = str(body["model"]).split("-")[0]
    if who == "planner" and heard < 2 and "handoff_to_coder" in tools:
        return Reply(f"over to you {said}", [("handoff_to_coder", {})])
    if who == "coder" and heard < 3 and "handoff_to_planner" in tools:
        return Reply(f"done with it {said}", [("handoff_to_planner", {})])
    return said


def handoff(url: str, **options: Any) -> Workflow:
    planner, coder = agents(
        url, "planner", "coder", require_per_service_call_history_persistence=True
    )
    builder = HandoffBuilder(participants=[planner, coder], **options)
    return builder.with_start_agent(planner).build()


async def events(workflow: Any, task: Any, *, stream: bool, **options: Any) -> list[Any]:
    if not stream:
        return list(await workflow.run(task, **options))
    return [event async for event in workflow.run(task, stream=True, **options)]


def heard(items: Sequence[Any]) -> list[tuple[str, str, str]]:
    """What the app sees of events, without the ids that are random."""
    return [
        (event.type, str(event.executor_id or ""), said(event.data))
        for event in items
        if event.type not in ("started", "status")
    ]


def said(data: Any) -> str:
    if isinstance(data, list):
        items: list[Any] = data
        return "|".join(said(item) for item in items)
    if hasattr(data, "messages"):
        return "|".join(f"{m.author_name}: {m.text}" for m in data.messages)
    if hasattr(data, "text"):
        return f"{data.author_name}: {data.text}"
    return str(data) if isinstance(data, str | int | None) else type(data).__name__
