"""The whole loop on the local engine and a tiny model: every seam between the rooms, in seconds."""

from __future__ import annotations

from pathlib import Path

from autogen_agentchat.base import TaskResult

from examples.support_triage.tasks import Ticket, held_out_tickets, training_tickets
from marft_agents.registry import Registry
from marft_agents.serving import ServerProcess
from tests.end_to_end.loop import finetune, largest_gap, record, served_logprobs
from tests.tiny_model import make_tiny_model

AGENTS = ("router", "writer")


def short_answers(_ticket: Ticket, result: TaskResult) -> float:
    """A reward that a random model can earn: the fewer characters the duo says, the better."""
    said = sum(len(m.to_text()) for m in result.messages if m.source in AGENTS)  # pyright: ignore[reportAttributeAccessIssue] every message of this team is a chat message
    return 1.0 / (1.0 + said / 20.0)


def test_record_finetune_swap_on_the_local_engine(tmp_path: Path) -> None:
    model = str(make_tiny_model(tmp_path / "model"))
    adapters, logs = tmp_path / "adapters", tmp_path / "logs"
    with ServerProcess(adapters, model=model, agents=AGENTS, extra=["--engine", "local"]) as server:
        before = record(server.base_url, logs, training_tickets(24), score=short_answers)
        turns = [t for e in before.episodes for t in e.turns]
        assert [t.untrainable_reason for t in turns if not t.trainable] == []
        assert {t.adapter_end for t in turns} == {"router@v1", "writer@v1"}
        assert {t.logprob_mode for t in turns} == {"processed"}
        assert {t.sampling.top_p for t in turns} == {1.0}
        writers = {e.episode_id: e.turns[1] for e in before.episodes}
        for episode in before.episodes:
            router = episode.turns[0]
            if len(router.text or "") > 8:
                assert writers[episode.episode_id].depends_on == [router.turn_id]

        done = finetune(
            str(logs), "--model", model, "--output", str(adapters), "--server", server.url,
            "--learning-rate", "1e-2", "--epochs", "2",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        registry = Registry(adapters)
        for agent in AGENTS:
            assert (registry.versions(agent), registry.current(agent)) == ([1, 2], 2)
            probe = registry.manifest(agent, 2).probe
            assert probe is not None
            served = served_logprobs(server.url, agent, probe)
            assert largest_gap(served, probe.logprobs) < 1e-2
            assert largest_gap(served, probe.base_logprobs) > 1e-2
        assert (adapters / "credit.jsonl").is_file()

        after = record(
            server.base_url, tmp_path / "after", held_out_tickets(6), score=short_answers
        )
        answered = {t.adapter_end for e in after.episodes for t in e.turns}
        assert answered == {"router@v2", "writer@v2"}
