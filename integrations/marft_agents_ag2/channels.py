"""Channels of the agent network as episodes.

Invariant: a channel belongs to the episode that its opener was in, if any; else it is an episode
itself, from its first turn to its end. Turns on a channel run in foreign contexts, so the channel's
id says whose they are.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from marft_agents.recording import EndReason, LiveEpisode, MarftRecorder
from marft_agents_ag2.binding import Binding

CHANNEL = "ag2.network.channel"
CLIENT = "ag2.network.agent_client"
HUB = "ag2.network.hub"
_LIMITS = frozenset({"max_turns"})
ParentOfNew = Callable[[], tuple[str | None, str | None]]


class Channel:
    """One channel, for one recorder."""

    def __init__(
        self, binding: Binding, parent: tuple[str | None, str | None] = (None, None)
    ) -> None:
        self.binding, self.parent = binding, parent
        self.episode = binding.recorder.current()
        self.said: list[tuple[str, str]] = []
        """(text as the other participants are shown it, turn id)."""
        self._own = False
        self._lock = threading.Lock()
        self._speakers: dict[str, tuple[str, dict[str, str]]] = {}
        """Agent id → its last turn, and the turns that called its tools."""

    def join(self, task: str | None) -> LiveEpisode:
        """The episode of a turn; the first turn opens it where nobody else has."""
        with self._lock:
            if self.episode is None or self.episode.closed:
                self._own = True
                self.episode = self.binding.recorder.open_episode(task, self.binding.runtime)
            return self.episode

    def chosen_by(self, dependencies: Mapping[Any, Any]) -> str | None:
        """The turn whose tool call sent the conversation to the agent that now begins."""
        handled: Any = getattr(dependencies.get(CLIENT), "_handling_envelope_stack", None)
        data = getattr(handled[-1], "event_data", None) if handled else None
        routing: Any = data.get("routing") if isinstance(data, dict) else None
        if not isinstance(routing, dict) or routing.get("kind", "text") == "text":
            return None
        last, tools = self._speakers.get(str(handled[-1].sender_id), (None, {}))
        return tools.get(str(routing.get("tool")), last)

    def spoke(
        self, dependencies: Mapping[Any, Any], turn_id: str, tools: dict[str, str], text: Any
    ) -> None:
        """An agent's turn is over; what it said goes to the others."""
        client: Any = dependencies.get(CLIENT)
        self._speakers[str(getattr(client, "agent_id", None))] = (turn_id, tools)
        if isinstance(text, str) and text:
            name = getattr(getattr(client, "passport", None), "name", None)
            self.said.append((f"[{name}]: {text}" if name else text, turn_id))

    def end(self, reason: EndReason, detail: str | None, result: Any = None) -> None:
        """The channel is over."""
        episode = self.episode
        if episode is None or episode.closed:
            return
        if self._own:
            self.binding.end_episode(episode, reason, detail, result)
        else:
            self.binding.report(episode, reason, detail)


class Channels:
    """The channels that one recorder knows, and the hubs that it listens to."""

    def __init__(self) -> None:
        self._known: dict[str, Channel] = {}
        self._listeners: list[Listener] = []
        self._lock = threading.Lock()

    def opened(self, channel_id: str, channel: Channel) -> None:
        with self._lock:
            self._known.setdefault(channel_id, channel)

    def get(self, channel_id: str) -> Channel | None:
        return self._known.get(channel_id)

    def ended(
        self, channel_id: str, reason: EndReason, detail: str | None, result: Any = None
    ) -> None:
        with self._lock:
            channel = self._known.pop(channel_id, None)
        if channel is not None:
            channel.end(reason, detail, result)

    def listen(self, hub: Any, binding: Binding, parent_of_new: ParentOfNew) -> Listener:
        """Hear of the channels of ``hub``, once."""
        with self._lock:
            for listener in self._listeners:
                if listener.hub() is hub:
                    return listener
            listener = Listener(self, hub, binding, parent_of_new)
            self._listeners.append(listener)
        hub.register_listener(listener)
        listener.watch_close()
        return listener

    def release(self) -> None:
        """The recorder is closed."""
        for listener in self._listeners:
            listener.release()
        for channel_id in list(self._known):
            self.ended(channel_id, "truncated", "the recorder was closed before the channel")


class Listener:
    """AG2's ``HubListener``: which channels open and close, and what humans say on them."""

    def __init__(
        self, channels: Channels, hub: Any, binding: Binding, parent_of_new: ParentOfNew
    ) -> None:
        self.hub = weakref.ref(hub)
        self._channels, self._binding = channels, binding
        self._parent_of_new = parent_of_new
        self._ids: set[str] = set()
        self._safety = binding.recorder.core.safety

    def watch_close(self) -> None:
        """A hub that is closed ends its channels without a word."""
        hub: Any = self.hub()
        original = hub.close

        async def close(*args: Any, **kwargs: Any) -> Any:
            try:
                return await original(*args, **kwargs)
            finally:
                with self._safety.guard("end the channels of a hub"):
                    for channel_id in list(self._ids):
                        self._channels.ended(channel_id, "terminated", "the hub was closed")

        self._binding.patches.set(hub, "close", close)

    def release(self) -> None:
        hub = self.hub()
        if hub is not None:
            hub.unregister_listener(self)

    async def on_channel_event(self, channel_id: str, kind: str, payload: Any) -> None:
        if not self._binding.open:
            return
        with self._safety.guard("see a channel"):
            if kind == "created":
                self.see(channel_id)
                self._channels.opened(channel_id, Channel(self._binding, self._parent_of_new()))
            elif kind in ("closed", "expired"):
                self._ids.discard(channel_id)
                reason = str(payload.get("reason") or kind)
                limit = kind == "expired" or reason in _LIMITS
                ended: EndReason = "truncated" if limit else "terminated"
                self._channels.ended(channel_id, ended, reason, payload.get("metadata"))

    def see(self, channel_id: str) -> None:
        """The channel is one of this hub."""
        self._ids.add(channel_id)

    async def on_envelope_posted(self, envelope: Any, metadata: Any) -> None:
        channel, hub = self._channels.get(envelope.channel_id), self.hub()
        if channel is None or hub is None or channel.episode is None or not self._binding.open:
            return
        with self._safety.guard("see a message"):
            data: Any = envelope.event_data if isinstance(envelope.event_data, dict) else {}
            text = data.get("text") or data.get("body")
            if not isinstance(text, str) or not text or not channel.episode.turn_ids():
                return
            passport = await hub.get_agent(envelope.sender_id)
            if passport.kind == "human":
                channel.episode.human(passport.name, text)


_CHANNELS: weakref.WeakKeyDictionary[MarftRecorder, Channels] = weakref.WeakKeyDictionary()


def channels_of(recorder: MarftRecorder) -> Channels:
    """The one registry of a recorder."""
    found = _CHANNELS.get(recorder)
    if found is None:
        found = _CHANNELS[recorder] = Channels()
        recorder.keep(found)
    return found
