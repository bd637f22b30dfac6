"""A folder with a model, logs, adapters and a server that is none, and ``finetune`` run on them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from marft_agents.cli import main
from marft_agents.errors import SwapError
from marft_agents.registry import Change, Registry, describe_base
from tests.training.synthetic import Team, TinyModel, snapshot


@dataclass
class Shop:
    """A folder with a model, logs and adapters, and the command to run on them."""

    root: Path
    model: Path
    tiny: TinyModel
    capsys: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch

    @property
    def team(self) -> Team:
        return Team(self.tiny, self.root / "logs")

    def run(self, *options: str, logs: str = "logs", model: Path | None = None) -> tuple[int, str]:
        """Exit code and output."""
        arguments = ["finetune", logs, "--model", str(model or self.model), "--set", "use_cpu=true"]
        self.monkeypatch.setattr(sys, "argv", ["marft-agents", *arguments, *options])
        self.monkeypatch.chdir(self.root)
        with pytest.raises(SystemExit) as stopped:
            main()
        told = self.capsys.readouterr()
        self.error = told.err
        return int(stopped.value.code or 0), told.out

    def refuses(self, *options: str, logs: str = "logs", model: Path | None = None) -> str:
        """The one line of an error, after checking that nothing changed."""
        before = snapshot(self.root)
        code, _ = self.run(*options, logs=logs, model=model)
        assert code == 2
        assert self.error.startswith("marft-agents: ") and self.error.count("\n") == 1
        assert snapshot(self.root) == before
        return self.error


@dataclass
class FakeGateway:
    """Stands in for the gateway's client: moves ``CURRENT`` as the real one does."""

    model: Path
    adapters: Path
    limit: int = 16
    slots: int | None = None
    refuse: str | None = None
    """An agent whose swaps fail; ``unready``: one whose preparation does."""
    unready: str | None = None
    one_by_one: str | None = None
    """Why all cannot be prepared."""
    prepared: list[tuple[int, dict[str, int]]] = field(
        default_factory=list[tuple[int, dict[str, int]]]
    )
    """What was prepared, with the number of swaps before that."""
    swaps: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    released: list[tuple[int, list[str]]] = field(default_factory=list[tuple[int, list[str]]])
    """Episodes that have ended, with the number of swaps before that was said."""

    def __call__(self, url: str, **options: Any) -> FakeGateway:
        return self

    def __enter__(self) -> FakeGateway:
        return self

    def __exit__(self, *error: object) -> None: ...

    def state(self) -> dict[str, Any]:
        registry = Registry(self.adapters)
        return {
            "base": describe_base(self.model).model_dump(mode="json"),
            "agents": {a: {"current": registry.current(a)} for a in registry.agents()},
            "max_lora_rank": self.limit,
            "max_loras": self.slots,
        }

    def release(self, episodes: Sequence[str]) -> int:
        self.released.append((len(self.swaps), list(episodes)))
        return len(episodes)

    def prepare_all(self, versions: Mapping[str, int]) -> str | None:
        if self.unready in versions:
            raise SwapError(f"{self.unready}: its probe failed")
        self.prepared.append((len(self.swaps), dict(versions)))
        return self.one_by_one

    def swap(
        self, agent: str, version: int, change: Change | None = None, *, wait: bool = True
    ) -> dict[str, Any]:
        if agent == self.refuse:
            raise SwapError(f"{agent}: the engine refused")
        ready = self.prepared[-1][1] if self.prepared and self.one_by_one is None else {}
        assert wait is (ready.get(agent) != version), "with all prepared, no swap waits"
        self.swaps.append((agent, version))
        Registry(self.adapters).move(agent, version, change or Change())
        return {}


def served(shop: Shop, model: Path | None = None, **options: Any) -> FakeGateway:
    """A server of the shop's adapters."""
    gateway = FakeGateway(model or shop.model, shop.root / "adapters", **options)
    shop.monkeypatch.setattr("marft_agents.cli._finetune_server.GatewayClient", gateway)
    return gateway
