"""The stage on logs by one of TRL's own trainers, inside a run of ours.

Invariant: credit, measuring, publishing and what is said are those of every other stage; only the
steps are TRL's. It is not resumable in the middle.
"""

from __future__ import annotations

import math

from marft_agents.errors import ConfigError
from marft_agents.training.imitation import train_with_trl
from marft_agents.training.preferences import method_rows
from marft_agents.training.stages import Stages

TRL_METHODS = ("sft", "kto", "dpo")


def imitate(stages: Stages) -> None:
    """Train every adapter by ``config.offline`` and publish.

    Raises:
        ConfigError: with more than one process.
        NothingToLearn: when the method finds nothing to train on.
    """
    learner, config, session = stages.learner, stages.config, stages.learner.session
    if session.world > 1:
        raise ConfigError(
            f"offline: {config.offline} runs in one process; start it without torchrun"
        )
    work = stages.prepare_offline()
    credits = work.credits
    if credits is None or stages.plan is None:
        raise ConfigError(f"offline: {config.offline} needs logs")
    learner.open(work)
    data = stages.plan.data
    rows = {
        a.adapter: method_rows(data, a.rows, credits.advantage)
        for a in stages.plan.adapters
        if a.adapter not in credits.flat
    }
    metrics = train_with_trl(
        session.model,
        config.offline,
        rows,
        config,
        stages.scratch / "trl",
        stages.say,
        share=session.share,
        log=learner.trainer.report,
    )
    session.model.eval()
    learner.steps_taken = learner.trainer.state.global_step
    learner.trainer.metrics |= metrics
    for adapter in [a for a in work.meters if not any(n.startswith(f"{a}/") for n in metrics)]:
        del work.meters[adapter]
    work.report.metrics |= {n: v for n, v in metrics.items() if math.isfinite(v)}
    work.report.effects = {a: meter.finish() for a, meter in work.meters.items()}
    stages.finish_offline(work, work.report)
