"""The product: one base, one adapter per agent, packed turns, one critic.

Invariant: nothing is called but what a training run calls.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

from benchmarks.trainer.common import ALPHA, RANK, RATE, TARGETS, Clock, Timed, now, token_count
from benchmarks.trainer.logs import ROWS, agent_names, make_episodes
from marft_agents.registry import write_untrained_adapter
from marft_agents.training import MarftConfig
from marft_agents.training.dataset import read_training_set
from marft_agents.training.loop import Learner
from marft_agents.training.session import Session


def run(model_dir: Path, agents: int, scratch: Path, objective: str) -> Timed:
    """One base, one adapter per agent, through the product's learner."""
    names = agent_names(agents)
    roles = {name: name for name in names}
    config = MarftConfig(
        output_dir=str(scratch),
        report_to="none",
        use_cpu=True,
        per_device_train_batch_size=ROWS,
        num_train_epochs=1.0,
        update_epochs=1,
        awr_skip_share=0.0,
        target_kl=1e6,
        effect_turns=1,
        learning_rate=RATE,
        online_learning_rate=RATE,
        lora_target_modules=TARGETS,
    )
    starts = {
        name: write_untrained_adapter(
            scratch / name, model_dir, rank=RANK, alpha=ALPHA, target_modules=TARGETS
        )
        for name in names
    }
    session = Session(model_dir, starts, config, _quiet)
    learner, clock, timed = Learner(session, config, _quiet), Clock(), list[Timed]()
    learner.trainer.training_step = clock.around(learner.trainer.training_step)

    def program() -> Generator[Any, None, None]:
        for update, team in enumerate((1, agents)):  # one agent's step warms up
            episodes = make_episodes(session.tokenizer, team, f"u{update}-")
            started, before = now(), clock.seconds
            yield from learner.update(
                read_training_set(episodes), roles, objective=objective, iteration=update
            )
            seconds = now() - started
            timed.append(Timed(token_count(episodes), seconds, clock.seconds - before))

    learner.run(program())
    return timed[-1]


def _quiet(_line: str) -> None:
    """The product's own lines are not needed here."""
