"""One turn of one agent: the episode it joins or is, and whom it serves.

Invariant: an agent may be in any number of turns at once, so everything a turn knows is its own.
Whether a turn is inside another one is said by the context; on a network, where turns run in the
context of a link, by the channel.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from marft_agents.recording import Call, EndReason, LiveEpisode, TurnKind, describe_error
from marft_agents_ag2.binding import Binding
from marft_agents_ag2.channels import CHANNEL, HUB, Channel, channels_of
from marft_agents_ag2.wire import request_text

TURN: ContextVar[Turn | None] = ContextVar("marft_ag2_turn", default=None)
TOOL: ContextVar[Tool | None] = ContextVar("marft_ag2_tool", default=None)

_HALTED = "HALTED: "


@dataclass(eq=False)
class Tool:
    """A tool at work; ``ran_agent``: it was no environment, but an agent."""

    turn: Turn
    ran_agent: bool = False


@dataclass(eq=False)
class Turn:
    """From the request that an agent is given to its answer."""

    binding: Binding
    agent: str
    episode: LiveEpisode
    own: bool = False
    parent_agent: str | None = None
    parent_turn: str | None = None
    selected_by: str | None = None
    channel: Channel | None = None
    turn_ids: list[str] = field(default_factory=list[str])
    tool_turns: dict[str, str] = field(default_factory=dict[str, str])
    """Tool name → the model turn that called it."""
    over: bool = False
    root: Turn | None = None
    """For a turn inside another one: the outermost."""
    inside: int = 0
    """Turns inside this one that go on; one in the background may outlast it."""
    left: tuple[Any, BaseException | None] | None = None

    @property
    def open(self) -> bool:
        return self.binding.open and not self.over and not self.episode.closed

    def call(self, kind: TurnKind = "act", *, subtask: bool = False) -> Call:
        """A model call made in this turn, or in a subtask of it."""
        if not subtask:
            agent, parent = self.agent, (self.parent_agent, self.parent_turn)
        else:
            agent, parent = f"{self.agent}-subtask", (self.agent, self.last)
        return Call(
            self.episode,
            agent,
            kind,
            selected_by=self.selected_by if kind == "act" and not subtask else None,
            delivered=self.channel.said if self.channel else (),
            parent_agent=parent[0],
            parent_turn=parent[1],
        )

    @property
    def last(self) -> str | None:
        return self.turn_ids[-1] if self.turn_ids else None

    @contextmanager
    def entered(self) -> Generator[None]:
        turn, tool = TURN.set(self), TOOL.set(None)
        try:
            with self.episode.active():
                yield
        finally:
            TOOL.reset(tool)
            TURN.reset(turn)

    def close(
        self,
        dependencies: Mapping[Any, Any],
        response: Any = None,
        error: BaseException | None = None,
    ) -> None:
        """The turn is over, by its answer or an exception."""
        self.over = True
        if not self.binding.open:
            return
        with self.binding.recorder.core.safety.guard("end a turn"):
            if self.root is not None:
                self.root.one_less()
            elif self.channel is None:
                self.left = (response, error)
                self._end_when_alone()
            elif self.last is not None:
                text = getattr(response, "content", None)
                self.channel.spoke(dependencies, self.last, self.tool_turns, text)

    def one_less(self) -> None:
        """A turn inside this one is over."""
        with self.episode.lock:
            self.inside -= 1
            alone = self.inside == 0
        if alone:
            self._end_when_alone()

    def _end_when_alone(self) -> None:
        if self.left is not None and self.inside == 0:
            left, self.left = self.left, None
            self._end(*left)

    def _end(self, response: Any, error: BaseException | None) -> None:
        reason: EndReason = "terminated"
        detail = None
        said = getattr(response, "content", None)
        if error is not None:
            reason, detail = "failed", describe_error(error)
        elif isinstance(said, str) and said.startswith(_HALTED):
            reason, detail = "truncated", said
        if self.own:
            self.binding.end_episode(self.episode, reason, detail, response)
        elif error is None:
            self.binding.report(self.episode, reason, detail)


def begin_turn(binding: Binding, agent: str, event: Any, dependencies: Mapping[Any, Any]) -> Turn:
    """The turn that starts now in the current context."""
    recorder, parent = binding.recorder, TURN.get()
    if parent is not None and parent.open and parent.binding.recorder is recorder:
        if (tool := TOOL.get()) is not None:
            tool.ran_agent = True
        turn = Turn(binding, agent, recorder.current() or parent.episode)
        turn.parent_agent, turn.parent_turn = parent.agent, parent.last
        turn.root = parent.root or parent
        with turn.root.episode.lock:
            turn.root.inside += 1
        return turn
    channel = _channel(binding, dependencies)
    if channel is not None:
        turn = Turn(binding, agent, channel.join(request_text(event)), channel=channel)
        turn.parent_agent, turn.parent_turn = channel.parent
        turn.selected_by = channel.chosen_by(dependencies)
        return turn
    episode = recorder.current()
    if episode is None:
        opened = recorder.open_episode(request_text(event), binding.runtime)
        return Turn(binding, agent, opened, own=True)
    if episode.turn_ids():
        _heard(episode, request_text(event))
    return Turn(binding, agent, episode)


def parent_of_new_channel() -> tuple[str | None, str | None]:
    """Agent and turn that a channel serves which is opened here; its tool is no environment."""
    turn, tool = TURN.get(), TOOL.get()
    if turn is None or not turn.open:
        return None, None
    if tool is not None:
        tool.ran_agent = True
    return turn.agent, turn.last


def _channel(binding: Binding, dependencies: Mapping[Any, Any]) -> Channel | None:
    channel_id = getattr(dependencies.get(CHANNEL), "channel_id", None)
    if channel_id is None:
        return None
    channels = channels_of(binding.recorder)
    if channels.get(channel_id) is None:  # opened before this recorder listened
        hub = getattr(dependencies.get(HUB), "_hub", None)
        channels.opened(channel_id, Channel(binding))
        if hub is not None:
            channels.listen(hub, binding, parent_of_new_channel).see(channel_id)
    return channels.get(channel_id)


def _heard(episode: LiveEpisode, words: str | None) -> None:
    """A later turn in the app's episode brings words: a human's, when no agent said them."""
    if not words:
        return
    with episode.lock:
        said = episode.ledger.link([{"role": "user", "content": words}])
    if not said:
        episode.human(None, words)
