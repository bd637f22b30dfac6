"""Calls that no runtime announces: those of a client that belongs to one agent.

Invariant: such a call begins with its request and ends with its response; the SDK's retries are
attempts of the same call, told by the same body and the SDK's own count. Where an integration says
who speaks, the call is the speaker's: several agents may hold one client.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from marft_agents.recording.call import Call
from marft_agents.recording.core import Core
from marft_agents.recording.episode import LiveEpisode, current_episode

if TYPE_CHECKING:
    from marft_agents.recording.exchange import Exchange

_RETRIES: ContextVar[OwnCall | None] = ContextVar("marft_retries", default=None)
_SPEAKER: ContextVar[Speaker | None] = ContextVar("marft_speaker", default=None)


@dataclass(frozen=True, slots=True)
class Speaker:
    """Whose the unannounced calls are that are made in a context, and what they are part of."""

    core: Core
    agent: str
    selected_by: str | None = None
    parent_agent: str | None = None
    parent_turn: str | None = None

    @contextmanager
    def current(self) -> Generator[None]:
        token = _SPEAKER.set(self)
        try:
            yield
        finally:
            _SPEAKER.reset(token)


class OwnCall(Call):
    """A call that nobody announced.

    An end that the SDK may retry is held back until its next attempt, another call, or the end of
    the episode.
    """

    def __init__(self, episode: LiveEpisode, speaker: Speaker, content: bytes) -> None:
        super().__init__(
            episode,
            speaker.agent,
            selected_by=speaker.selected_by,
            parent_agent=speaker.parent_agent,
            parent_turn=speaker.parent_turn,
        )
        self.content = content
        episode.open_calls.add(self)

    @property
    def held_back(self) -> bool:
        """Whether its last attempt has failed and another may follow."""
        return not self.finished and bool(self.exchanges) and self.exchanges[-1].closed

    def over(self, exchange: Exchange) -> None:
        if exchange.answered or not exchange.may_be_retried:
            self.finish()


def own_call(core: Core, agent: str, request: Any) -> OwnCall | None:
    """The call that a request of this agent's client is (an attempt of); ``None``: no episode."""
    episode = current_episode(core)
    if episode is None:
        core.safety.warn_once(
            ("no episode", agent),
            f"marft-agents: a call of the client attached to agent {agent!r} was made outside"
            " an episode and is not recorded; put it inside `with recorder.episode():` (a"
            " thread of your own does not inherit it: use `with episode.active():` there)",
        )
        return None
    waiting = _RETRIES.get()
    if waiting is not None and waiting.held_back:
        again = request.headers.get("x-stainless-retry-count") not in (None, "0")
        if again and waiting.episode is episode and waiting.content == request.content:
            return waiting
        waiting.finish()
    speaker = _SPEAKER.get()
    if speaker is None or speaker.core is not core:
        speaker = Speaker(core, agent)
    call = OwnCall(episode, speaker, request.content)
    _RETRIES.set(call)
    return call
