"""Agents of AG2 on a scripted server, alone and on a hub, for the tests here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ag2.network as net
from ag2 import Agent
from ag2.config import OpenAIConfig
from ag2.knowledge import MemoryKnowledgeStore

SPOKEN = (net.EV_TEXT, net.EV_PACKET)


def config(model: str, url: str, **options: Any) -> OpenAIConfig:
    return OpenAIConfig(model=model, base_url=url, api_key="sk-test", max_retries=0, **options)


def agent(name: str, url: str, *, stream: bool = False, **options: Any) -> Agent[Any]:
    """An agent whose model has its name."""
    options = {
        "config": config(name, url, streaming=stream),
        "prompt": f"You are {name}.",
    } | options
    return Agent(name, **options)


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def relay(speakers: Sequence[Any], rounds: int) -> net.TransitionGraph:
    """A graph in which the speakers take turns."""
    steps = [
        net.Transition(
            when=net.FromSpeaker(one.agent_id),
            then=net.AgentTarget(speakers[(i + 1) % len(speakers)].agent_id),
        )
        for i, one in enumerate(speakers)
    ]
    return net.TransitionGraph(
        initial_speaker=speakers[0].agent_id,
        transitions=steps,
        default_target=net.TerminateTarget(reason="done"),
        max_turns=rounds,
    )


async def open_hub() -> net.Hub:
    return await net.Hub.open(MemoryKnowledgeStore(), ttl_sweep_interval=0)


class Ended:
    """Listens to a hub until a channel has ended or a turn in it has failed."""

    def __init__(self, hub: net.Hub) -> None:
        self._hub = hub
        self._done: dict[str, asyncio.Future[None]] = {}
        hub.register_listener(self)  # pyright: ignore[reportArgumentType] the methods it needs

    def _future(self, channel_id: str) -> asyncio.Future[None]:
        if channel_id not in self._done:
            self._done[channel_id] = asyncio.get_running_loop().create_future()
        return self._done[channel_id]

    async def on_channel_event(self, channel_id: str, kind: str, payload: Any) -> None:
        if kind in ("closed", "expired"):
            self._future(channel_id).set_result(None)

    async def on_turn_failed(
        self, channel_id: str, agent_id: str, envelope_id: str, exc: BaseException
    ) -> None:
        self._future(channel_id).set_exception(exc)

    async def wait(self, channel_id: str) -> None:
        try:
            await asyncio.wait_for(self._future(channel_id), 20)
        finally:
            self._hub.unregister_listener(self)  # pyright: ignore[reportArgumentType] as above


async def on_channel(
    hub: net.Hub, members: Sequence[Any], task: str, graph: net.TransitionGraph
) -> list[tuple[str, str]]:
    """Open a workflow channel, say ``task`` as its first member, and wait for its end."""
    names, ended = [m.agent.name for m in members[1:]], Ended(hub)
    channel = await members[0].open(type="workflow", target=names, knobs={"graph": graph.to_dict()})
    await channel.send(task, audience=[members[1].agent_id])
    await ended.wait(channel.channel_id)
    wal = await hub.read_wal(channel.channel_id)
    ids = {m.agent_id: m.agent.name for m in members}
    return [
        (ids[e.sender_id], str(e.event_data.get("text") or e.event_data.get("body")))
        for e in wal
        if e.event_type in SPOKEN
    ]
