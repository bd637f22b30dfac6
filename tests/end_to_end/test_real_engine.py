"""The whole loop on vLLM and real weights, through the commands and the address a user has."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from examples.support_triage import app, base_model
from examples.support_triage.tasks import held_out_tickets, training_tickets
from marft_agents.registry import Registry
from marft_agents.serving import ServerProcess
from tests.end_to_end.loop import finetune, largest_gap, record, served_logprobs

AGENTS = ("router", "writer")
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None and not os.environ.get("CI"),
    reason="vLLM has no build for this machine; the local engine's loop is tested beside this one",
)


@needs_vllm
@pytest.mark.engine
def test_record_finetune_swap_on_vllm_with_real_weights(tmp_path: Path) -> None:
    model, adapters, logs = str(base_model.prepare()), tmp_path / "adapters", tmp_path / "logs"
    config = str(Path(app.__file__).parent / "finetune.yaml")
    engine = ["--engine", "vllm", "--max-lora-rank", "8", "--max-model-len", "1024"]
    with ServerProcess(adapters, model=model, agents=AGENTS, extra=engine) as server:
        base_url = server.url + "/v1"
        before = record(base_url, logs, training_tickets(60), score=app.reward)
        turns = [t for e in before.episodes for t in e.turns]
        assert len(before.episodes) == 60
        assert {t.agent for t in turns} == set(AGENTS)
        assert [t.untrainable_reason for t in turns if not t.trainable] == []
        assert {t.adapter_end for t in turns} == {"router@v1", "writer@v1"}

        done = finetune(
            str(logs), "--model", model, "--output", str(adapters), "--config", config,
            "--set", "num_train_epochs=1", "--server", server.url,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

        registry = Registry(adapters)
        for agent in AGENTS:
            assert registry.current(agent) == 2
            probe = registry.manifest(agent, 2).probe
            assert probe is not None
            served = served_logprobs(server.url, agent, probe)
            assert largest_gap(served, probe.logprobs) < 1e-2
            assert largest_gap(served, probe.base_logprobs) > 1e-2

        after = record(base_url, tmp_path / "after", held_out_tickets(12), score=app.reward)
        answered = {t.adapter_end for e in after.episodes for t in e.turns}
        assert answered == {"router@v2", "writer@v2"}
