"""Offline fine-tuning: logs in, one new version per adapter out.

Invariant: logs → plan → replay → critic → credit → training → proof → publish, in this order. Every
refusal comes before the registry is touched, and all adapters are published after all were trained.
"""

from __future__ import annotations

import copy
import math
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from marft_agents.errors import ConfigError, RegistryError
from marft_agents.log import LogReader
from marft_agents.registry import Registry, describe_base, resolve_model_dir
from marft_agents.rewards import RewardFunction, ScoreTally, score_episodes
from marft_agents.training import _quiet
from marft_agents.training.advantages import Credits, assign_credit
from marft_agents.training.config import MarftConfig
from marft_agents.training.dataset import TrainingSet, read_training_set
from marft_agents.training.plan import (
    AdapterPlan,
    NewAdapter,
    Plan,
    ServerLimits,
    Untouched,
    make_plan,
)
from marft_agents.training.preflight import plan_lines, reading_lines, table
from marft_agents.training.progress import Progress
from marft_agents.training.publish import Trained, publish_all, save_critic, write_lines
from marft_agents.training.results import FinetuneResult, credit_lines
from marft_agents.training.session import Session
from marft_agents.training.trainer import MarftTrainer, WeightedTurn

Say = Callable[[str], None]
SCARCE_TURNS = 20
"""Fewer turns than this teach an adapter little but their own words."""


def finetune(
    logs: Sequence[str | Path],
    *,
    model: str,
    output: str | Path,
    config: MarftConfig | None = None,
    reward: RewardFunction | None = None,
    limits: ServerLimits | None = None,
    dry_run: bool = False,
    say: Say = print,
) -> FinetuneResult | None:
    """Train one adapter per agent from recorded episodes and publish the new versions.

    Args:
        logs: files and folders of recorded events.
        model: the base that answered: a folder or a hub id.
        output: the registry's folder.
        reward: scores the episodes that nobody scored.
        limits: what the server takes; ``config.max_lora_rank`` when not given.
        dry_run: stop after saying what would be trained.
        say: receives every line of output.

    Returns:
        What was published; ``None`` for a dry run.

    Raises:
        MarftError: with nothing published.
    """
    config = config or MarftConfig()
    if config.world_size > 1:
        raise ConfigError(
            f"{config.world_size} training processes were started; start one, without a launcher"
        )
    reader, registry = LogReader(*logs), Registry(output)
    base, model_dir = describe_base(model), resolve_model_dir(model)
    data, tally = _read(reader, reward)
    for line in reading_lines(reader, tally):
        say(line)
    plan = make_plan(
        data,
        registry=registry,
        base=base,
        model_dir=model_dir,
        agents=config.agents,
        new=NewAdapter(config.lora_rank, config.lora_alpha, config.lora_target_modules),
        max_length=config.max_length,
        limits=limits or ServerLimits(config.max_lora_rank),
    )
    for line in plan_lines(plan):
        say(line)
    if dry_run:
        return None
    registry.require_writable()
    say("")
    with _quiet.quiet(), tempfile.TemporaryDirectory(prefix="marft-finetune-") as scratch:
        logs_read = [str(path) for path in reader.files]
        return _run(plan, registry, config, Path(scratch), say, logs_read)


def _read(
    reader: LogReader, reward: RewardFunction | None
) -> tuple[TrainingSet, ScoreTally | None]:
    if reward is None:
        return read_training_set(reader.episodes()), None
    tally = ScoreTally()
    return read_training_set(score_episodes(reward, reader.episodes(), tally)), tally


def _run(
    plan: Plan,
    registry: Registry,
    config: MarftConfig,
    scratch: Path,
    say: Say,
    logs_read: list[str],
) -> FinetuneResult:
    started = time.monotonic()
    random.seed(config.seed)
    torch.manual_seed(config.seed)
    session = Session(plan, registry, config, scratch, say)
    session.replay()
    critic = session.critic()
    credits = assign_credit(plan, critic.values, config)
    for line in _credit_summary(credits, config.awr_skip_share):
        say(line)
    for name, count in _scarce(plan, credits).items():
        say(
            f"WARNING: only {count} turns carry what {name} learns; record more episodes, with good"
            " and bad ends, before trusting its new version"
        )
    kept = [a for a in plan.adapters if a.adapter not in credits.flat]
    meters = {a.adapter: session.meter(a, credits) for a in kept}
    metrics = _train(session, kept, credits, scratch)
    trained = [
        Trained(a, meters[a.adapter].finish(), meters[a.adapter].probe(), metrics) for a in kept
    ]
    rows = plan.data.rows
    by_action = {(rows[i].episode, rows[i].k): w for i, w in credits.weight.items()}
    credit_file = registry.root / "credit.jsonl"
    try:
        adapters = publish_all(session, trained, credits, critic, scratch / "staged", logs_read)
        write_lines(credit_file, credit_lines(credits, by_action))
        save_critic(registry.root, critic, plan.base, config)
    except OSError as error:
        raise RegistryError(f"cannot write to {registry.root}: {error}") from error
    flat = [Untouched(name, "no signal: its turns do not differ") for name in credits.flat]
    scored = sum(rows[i].length for i, w in credits.weight.items() if w > 0)
    return FinetuneResult(
        adapters=adapters,
        untouched=[*plan.untouched, *flat],
        explained_variance=critic.explained_variance,
        seconds=time.monotonic() - started,
        tokens_scored=round(scored * config.num_train_epochs),
        credit_file=credit_file,
        metrics=metrics,
    )


def _scarce(plan: Plan, credits: Credits) -> dict[str, int]:
    """Adapters that hardly any turn teaches, with the number of turns."""
    used = {
        a.adapter: sum(credits.weight[i] > 0 for i in a.rows)
        for a in plan.adapters
        if a.adapter not in credits.flat
    }
    return {name: count for name, count in used.items() if count < SCARCE_TURNS}


def _credit_summary(credits: Credits, share: float) -> Sequence[str]:
    deltas: dict[str, list[float]] = {}
    for action in (action for episode in credits.actions for action in episode):
        deltas.setdefault(action.agent, []).append(action.delta)
    rows = [("agent", "actions", "mean credit per action")]
    for agent, values in sorted(deltas.items()):
        rows.append((agent, str(len(values)), f"{math.fsum(values) / len(values):+.4f}"))
    lines = ["", *table(rows)]
    lines += [
        f"{adapter}: no signal, its turns do not differ in advantage; untouched"
        for adapter in credits.flat
    ]
    return lines + [
        f"{adapter}: {count} turns of little weight are skipped (together at most"
        f" {share:.0%} of it)"
        for adapter, count in credits.skipped.items()
        if count
    ]


def _train(
    session: Session, adapters: Sequence[AdapterPlan], credits: Credits, scratch: Path
) -> dict[str, float]:
    """Train the adapters one after another; returns the last logged metrics."""
    config, say, rows = session.config, session.say, session.plan.data.rows
    turns = [
        WeightedTurn(
            adapter=a.adapter,
            prompt_ids=rows[i].prompt_ids,
            token_ids=rows[i].token_ids,
            weight=credits.weight[i] / credits.mean_weight[a.adapter],
            temperature=rows[i].temperature,
        )
        for a in adapters
        for i in a.rows
        if credits.weight[i] > 0
    ]
    args = copy.copy(config)
    args.output_dir = str(scratch / "loop")
    trainer = MarftTrainer(session.model, args, turns, share_prefixes=session.share)
    sampler = trainer.sampler()
    steps = {a.adapter: sampler.blocks(a.adapter) for a in adapters}
    trainer.add_callback(Progress(steps, say))
    say("")
    say(
        f"training: {len(turns)} turns in {config.num_train_epochs:g} passes,"
        f" {sum(steps.values())} steps, one adapter after another"
    )
    trainer.train()
    session.model.eval()
    for adapter, count in trainer.nonfinite.items():
        say(f"WARNING: {adapter}: {count} steps were not finite and were skipped")
    metrics: dict[str, float] = {}
    for entry in trainer.state.log_history:
        metrics |= {name: float(value) for name, value in entry.items() if "/" in name}
    return metrics
