"""What one ``wrap`` leaves behind: options, replaced attributes, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from marft_agents.recording import (
    EpisodeHandle,
    LiveEpisode,
    MarftRecorder,
    Patches,
    end_run,
)
from marft_agents.schema import EndReason


@dataclass(eq=False)
class Binding:
    """Options of the automatic episodes of one wrapped agent or hub."""

    recorder: MarftRecorder
    runtime: str
    end: str = "auto"
    on_end: Callable[[EpisodeHandle, Any], object] | None = None
    patches: Patches = field(default_factory=Patches)
    undo: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])

    @property
    def open(self) -> bool:
        return not self.recorder.core.closed

    def release(self) -> None:
        while self.undo:
            self.undo.pop()()
        self.patches.undo()

    def __reduce__(self) -> Any:
        """A copy of an agent is not recorded."""
        return type(None), ()

    def end_episode(
        self, episode: LiveEpisode, reason: EndReason, detail: str | None, result: Any = None
    ) -> None:
        """End an episode that was opened for what this binding records."""
        on_end = self.on_end if reason != "failed" and self.open else None
        end_run(episode, self._reason(reason), detail, on_end, result)

    def report(self, episode: LiveEpisode, reason: EndReason, detail: str | None) -> None:
        """Something inside an episode has ended so."""
        episode.report(self._reason(reason), detail)

    def _reason(self, reason: EndReason) -> EndReason:
        designed = reason == "truncated" and self.end == "terminated"
        return "terminated" if designed else reason
