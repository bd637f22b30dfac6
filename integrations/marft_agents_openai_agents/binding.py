"""What one ``wrap`` leaves behind: options, marked agents, and the way back.

Invariant: a run finds its options through the mark on its starting agent; the mark of a closed
recorder counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from marft_agents.recording import EpisodeHandle, MarftRecorder, Patches
from marft_agents_openai_agents.doors import User

MARK = "_marft_binding"


@dataclass(eq=False)
class Binding:
    """One ``wrap``; marks the agents that it reaches."""

    recorder: MarftRecorder
    runtime: str
    user: User
    end: str = "auto"
    on_end: Callable[[EpisodeHandle, Any], object] | None = None
    root: int = 0
    """``id`` of the wrapped agent, which holds this."""
    patches: Patches = field(default_factory=Patches)

    @property
    def open(self) -> bool:
        return not self.recorder.core.closed

    def mark(self, agent: Any) -> None:
        """Let runs that start with ``agent`` be recorded."""
        self.patches.set(agent, MARK, self)
        self.user.names.add(str(agent.name))

    def release(self) -> None:
        self.patches.undo()


def binding_of(agent: Any) -> Binding | None:
    """The binding that records runs starting with ``agent``."""
    binding = getattr(agent, MARK, None)
    return binding if isinstance(binding, Binding) and binding.open else None
