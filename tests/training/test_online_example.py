"""The example's online app, as it is copied by users, on a scripted server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.support_triage import online
from marft_agents.log import LogReader
from marft_agents.schema import parse_served_name
from marft_agents.testing import Reply, ScriptedServer, token_ids_of
from marft_agents.training.rollouts import load_run
from marft_agents.training.tasks import read_tasks
from tests.training.online_kit import make_source

VERSIONS = {"router": 3, "writer": 2}


def _reply(body: dict[str, Any]) -> Reply:
    """A team that always routes to billing and signs so."""
    name = str(body["model"])
    text = "billing" if name == "router" else "Sorry. - billing"
    return Reply(text, headers={"x-marft-adapter": f"{name}@v{VERSIONS[name]}"})


def test_the_example_collects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    online.write_tasks(tmp_path / "tasks.jsonl", 12)
    tasks = read_tasks(tmp_path / "tasks.jsonl")
    assert len(tasks) == 12 and set(tasks[0].task) == {"message", "department"}
    online.models.cache_clear()
    with ScriptedServer(_reply) as server:
        monkeypatch.setenv("MARFT_SERVER", server.url.removesuffix("/v1"))
        monkeypatch.setenv("MARFT_TEMPERATURE", "0.7")
        run = load_run("examples.support_triage.online:run")
        with make_source(tmp_path, run, tasks, episodes_per_iteration=12) as source:
            data = source.collect(1, VERSIONS)
            again = source.collect(2, {"router": 3, "writer": 5})
    online.models.cache_clear()
    rewards = {e.task: e.total_reward for e in data.episodes}
    assert rewards == {t.id: float(t.task["department"] == "billing") for t in tasks}
    assert source.metrics()["online/reward_mean"] == pytest.approx(1 / 3)
    for row in data.rows:
        text = "billing" if row.agent == "router" else "Sorry. - billing"
        assert list(row.token_ids) == token_ids_of(text) and row.temperature == 0.7
        assert parse_served_name(row.adapter or "") == (row.agent, VERSIONS[row.agent])
    assert len(data.rows) == 24 and data.agents == {"router": 12, "writer": 12}
    assert {row.agent for row in again.rows} == {"router"} and source.report.stale_turns == 12
    assert len(again.episodes) == 12 and source.signal
    recorded = next(LogReader(tmp_path / "online" / "r1" / "iteration-0001").episodes())
    assert recorded.metadata["marft_task"].startswith("ticket-")
