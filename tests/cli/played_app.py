"""An app for ``--online``: two agents on the tiny model, answered by the versions in use.

The replies are chosen by a counter; their log-probabilities are what the adapters in use give them,
so the replay check of every round is a real one.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from marft_agents.recording import MarftRecorder
from marft_agents.registry import Registry
from tests.training.synthetic import AGENTS, BAD, GOOD, Team, TinyModel


@dataclass
class Played:
    """The team behind ``run``; ``fails`` says which of its plays raise."""

    tiny: TinyModel
    adapters: Path
    logs: Path
    fails: frozenset[int] = frozenset()
    plays: int = 0
    calls: dict[str, str] = field(default_factory=dict[str, str])
    """Agents that call another adapter than their own."""
    _models: dict[str, Any] = field(default_factory=dict[str, Any])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def play(self, task: Any, recorder: MarftRecorder) -> float:
        with self._lock, recorder.episode():
            number, self.plays = self.plays, self.plays + 1
            if number in self.fails:
                raise ConnectionError("no answer")
            live = recorder.current()
            assert live is not None
            good = (number % 2 == 0, number % 3 == 0)
            for index, agent in enumerate(AGENTS):
                reply = GOOD if good[index] else BAD
                live.add_turn(self._team(agent).turn(live.id, agent, index, str(task), reply))
            return sum(good) / 2

    def _team(self, agent: str) -> Team:
        """Answers as the version of the agent in use does."""
        called = self.calls.get(agent, agent)
        version = Registry(self.adapters).current(called)
        assert version is not None
        name = f"{called}@v{version}"
        if name not in self._models:
            base: Any = AutoModelForCausalLM.from_pretrained(self.tiny.folder, dtype=torch.float32)
            folder = Registry(self.adapters).path(called, version)
            tiny = TinyModel(self.tiny.folder)
            tiny.model = PeftModel.from_pretrained(base, str(folder)).eval()
            self._models[name] = Team(tiny, self.logs, adapters=dict.fromkeys(AGENTS, name))
        return self._models[name]


PLAYED: list[Played] = []
"""The one that ``run`` plays with."""


def run(task: Any, recorder: MarftRecorder) -> float:
    return PLAYED[-1].play(task, recorder)
