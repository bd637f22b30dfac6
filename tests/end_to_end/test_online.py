"""Logs, then the app itself: every iteration is recorded under the versions of the one before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.support_triage.tasks import training_tickets
from marft_agents.log import LogReader
from marft_agents.registry import Registry
from marft_agents.serving import ServerProcess
from tests.end_to_end.loop import finetune, record
from tests.end_to_end.online_app import AGENTS
from tests.end_to_end.test_local_engine import short_answers
from tests.tiny_model import make_tiny_model


def test_offline_then_online_on_the_local_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(make_tiny_model(tmp_path / "model"))
    adapters, logs, tasks = tmp_path / "adapters", tmp_path / "logs", tmp_path / "tasks.jsonl"
    tickets = training_tickets(12)
    tasks.write_text("".join(json.dumps({"task": t.message}) + "\n" for t in tickets))
    with ServerProcess(adapters, model=model, agents=AGENTS, extra=["--engine", "local"]) as server:
        monkeypatch.setenv("APP_SERVER", server.url)
        record(server.base_url, logs, tickets, score=short_answers)
        done = finetune(
            str(logs), "--model", model, "--output", str(adapters), "--server", server.url,
            "--online", "tests.end_to_end.online_app:run", "--tasks", str(tasks),
            "--iterations", "2", "--epochs", "1", "--set", "episodes_per_iteration=8",
            "--set", "online_learning_rate=3e-3",
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    registry = Registry(adapters)
    for agent in AGENTS:
        assert (registry.versions(agent), registry.current(agent)) == ([1, 2, 3, 4], 4)
        assert [registry.manifest(agent, v).parent for v in (2, 3, 4)] == [1, 2, 3]
    moves = [line for line in registry.audit() if line["action"] == "promote"]
    assert [line["to"] for line in moves] == [2, 2, 3, 3, 4, 4], "the team moves together"
    assert all("prepared" in line["evidence"] for line in moves)
    folders = sorted(path.name for path in (logs / "online").glob("*/*"))
    assert folders == ["iteration-0001", "iteration-0002"]
    for number, folder in enumerate(sorted((logs / "online").glob("*/*"))):
        turns = [t for e in LogReader(folder).episodes() for t in e.turns]
        assert len(turns) == 16 and all(t.trainable for t in turns)
        served = number + 2
        assert {t.adapter_start for t in turns} == {f"{agent}@v{served}" for agent in AGENTS}
    assert not list((adapters / ".checkpoints").glob("checkpoint-*"))
