"""Fine-tuning: logs in, then the app run online, one new version per adapter out.

Invariant: logs → plan → replay → critic → credit → training → proof → publish, in this order. Every
refusal comes before the registry is touched, and all adapters of an update are published after all
of them were trained.
"""

from __future__ import annotations

import dataclasses
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from marft_agents.errors import ConfigError
from marft_agents.log import LogReader
from marft_agents.registry import Registry, describe_base, resolve_model_dir
from marft_agents.rewards import RewardFunction, ScoreTally, score_episodes
from marft_agents.schema import BaseModelInfo, served_name
from marft_agents.training import _quiet, checkpoint
from marft_agents.training.adapters import start_folder
from marft_agents.training.config import MarftConfig
from marft_agents.training.dataset import TrainingSet, read_training_set
from marft_agents.training.forecast import estimate_lines, memory_warning
from marft_agents.training.imitate import TRL_METHODS, imitate
from marft_agents.training.loop import Learner
from marft_agents.training.naming import method_lines
from marft_agents.training.plan import (
    NewAdapter,
    Plan,
    ServerLimits,
    Untouched,
    make_plan,
)
from marft_agents.training.preflight import plan_lines, reading_lines, require_sense
from marft_agents.training.processes import Processes
from marft_agents.training.publish import changed_settings
from marft_agents.training.rates import block_size, check_rates
from marft_agents.training.results import FinetuneResult
from marft_agents.training.roles import check_adapter_settings
from marft_agents.training.session import Session
from marft_agents.training.stages import SINGLE_ADAPTER, Online, Stages
from marft_agents.training.textlogs import renderer, text_lines
from marft_agents.training.tracking import check_trackers, tracked, tracking_lines

Say = Callable[[str], None]
_MAY_CHANGE = frozenset({
    "iterations", "save_steps", "save_total_limit", "save_strategy", "logging_steps", "at_once",
    "per_device_train_batch_size", "gradient_accumulation_steps",  # their product is compared
    "episode_timeout", "report_to", "project", "max_guard_trips", "max_nonfinite_steps", "run_name",
})  # fmt: skip
"""Settings that a resumed run may change without becoming another run."""
_OF_CRITIC = ("estimator", "critic", "critic_hidden", "critic_rank")
"""Settings that shape the critic."""


def finetune(
    logs: Sequence[str | Path],
    *,
    model: str,
    output: str | Path,
    config: MarftConfig | None = None,
    reward: RewardFunction | None = None,
    limits: ServerLimits | None = None,
    online: Online | None = None,
    resume: bool = False,
    fresh_optimizer: bool = False,
    dry_run: bool = False,
    say: Say = print,
) -> FinetuneResult | None:
    """Train one adapter per agent, from recorded episodes and then by running the app.

    Args:
        logs: files and folders of recorded events.
        model: the base that answered: a folder or a hub id.
        output: the registry's folder.
        reward: scores the episodes that nobody scored.
        limits: what the server takes; ``config.max_lora_rank`` when not given.
        online: runs the app between updates; ``None``: the logs are all there is.
        resume: go on from the newest checkpoint of a run that was interrupted.
        fresh_optimizer: with ``resume``, keep the weights and start Adam's moments anew.
        dry_run: stop after saying what would be trained.
        say: receives every line of output.

    Returns:
        What was published; ``None`` for a dry run.

    Raises:
        MarftError: with nothing published by the update at hand.
    """
    config = config or MarftConfig()
    require_sense(config, online=online is not None)
    if config.process_index > 0:
        say = _silent
    check_rates(config)
    check_trackers(config)
    registry = Registry(output)
    base, model_dir = describe_base(model), resolve_model_dir(model)
    settings = changed_settings(config)
    saved = _newest(registry, base, settings) if resume else None
    if saved is None:
        _note_interrupted(registry, say)
    limits = limits or ServerLimits(config.max_lora_rank)
    reader = _reader(logs, config, online, say)
    # Read and scored once: a reward function may judge otherwise the next time it is asked.
    plan = Processes.of(config).on_main(
        partial(_plan_of_logs, reader, registry, base, model_dir, config, reward, limits, say)
    )
    say("")
    for line in method_lines(config, logs=plan is not None, online=online is not None):
        say(line)
    if dry_run:
        say("")
        for line in estimate_lines(plan, registry, model_dir, config, limits, online=bool(online)):
            say(line)
        return None
    registry.require_writable()
    config = tracked(config, registry.root)
    _warn_of_memory(plan, registry, config, say)
    for line in tracking_lines(config):
        say(line)
    with _quiet.quiet(), tempfile.TemporaryDirectory(prefix="marft-finetune-") as scratch:
        random.seed(config.seed)
        torch.manual_seed(config.seed)
        stages = _stages(
            plan, registry, base, model_dir, config, settings, Path(scratch), online,
            [] if reader is None else [str(path) for path in reader.files], say,
        )  # fmt: skip
        return _run(stages, saved, fresh_optimizer, say)


def _silent(_line: str) -> None:
    """Every process but the first keeps quiet."""


def _note_interrupted(registry: Registry, say: Say) -> None:
    left = checkpoint.checkpoints(registry.root / checkpoint.CHECKPOINTS)
    if left:
        say(
            f"note: {left[-1]} is of a run that was interrupted; --resume goes on from it, and this"
            " run begins anew"
        )


def _warn_of_memory(plan: Plan | None, registry: Registry, config: MarftConfig, say: Say) -> None:
    warning = None if plan is None else memory_warning(plan, registry, config)
    if warning is not None:
        say(warning)


# -- what there is to do -----------------------------------------------------------------------


def _reader(
    logs: Sequence[str | Path], config: MarftConfig, online: Online | None, say: Say
) -> LogReader | None:
    """The recorded events; ``None`` when the run starts online.

    Raises:
        LogError: when there are none and nothing will make some.
    """
    if config.offline == "none":
        say("no stage on logs (offline: none)")
        return None
    if online is None:
        return LogReader(*logs)
    there = [path for path in logs if Path(path).is_file() or any(Path(path).glob("*.jsonl"))]
    if not there:
        say(f"{', '.join(map(str, logs))}: no recorded events yet, so the run starts online")
        return None
    return LogReader(*there)


def _plan_of_logs(
    reader: LogReader | None,
    registry: Registry,
    base: BaseModelInfo,
    model_dir: Path,
    config: MarftConfig,
    reward: RewardFunction | None,
    limits: ServerLimits,
    say: Say,
) -> Plan | None:
    """The plan of the stage on logs."""
    if reader is None:
        return None
    text = renderer(model_dir) if config.offline == "sft" else None
    tally = None if reward is None else ScoreTally()
    episodes = reader.episodes()
    if reward is not None and tally is not None:
        episodes = score_episodes(reward, episodes, tally)
    data = read_training_set(episodes, text=text)
    for line in (*reading_lines(reader, tally), *text_lines(data.rows)):
        say(line)
    plan = make_plan(
        data,
        registry=registry,
        base=base,
        model_dir=model_dir,
        agents=_mapping(config, data),
        new=lambda adapter: new_adapter(config, adapter),
        max_length=config.max_length,
        limits=limits,
        spread=config.offline != "sft" or config.sft_threshold is None,
        settings=config.adapters,
    )
    for line in plan_lines(plan):
        say(line)
    return plan


def new_adapter(config: MarftConfig, adapter: str) -> NewAdapter:
    """Shape of an adapter that does not exist yet."""
    return NewAdapter(
        int(config.of_adapter(adapter, "lora_rank")),
        int(config.of_adapter(adapter, "lora_alpha")),
        list(config.of_adapter(adapter, "lora_target_modules")),
    )


def _mapping(config: MarftConfig, data: TrainingSet) -> Mapping[str, str]:
    """``agents:``, or one adapter for everybody who is trained (estimator ``single``)."""
    if config.estimator != "single":
        return config.agents
    own = {a: r for a, r in config.agents.items() if r not in ("frozen", "external")}
    if own:
        first = next(iter(own.items()))
        raise ConfigError(
            f"estimator: single trains one adapter, {SINGLE_ADAPTER!r}, for every agent, and"
            f" `agents:` maps {first[0]!r} to {first[1]!r}; leave that out"
        )
    speaking = {row.agent for row in data.rows}
    return {a: config.agents.get(a, SINGLE_ADAPTER) for a in sorted({*speaking, *config.agents})}


def _starts(
    plan: Plan | None, registry: Registry, config: MarftConfig, online: Online | None
) -> dict[str, int | None]:
    """The version that each adapter starts from; ``None``: from a new one."""
    starts = {} if plan is None else {a.adapter: a.start for a in plan.adapters}
    if online is not None:
        for adapter in registry.agents():
            role = config.agents.get(adapter, adapter)
            if role == adapter and config.estimator != "single":
                starts.setdefault(adapter, registry.current(adapter))
    if config.estimator == "single":
        starts.setdefault(SINGLE_ADAPTER, registry.current(SINGLE_ADAPTER))
    if not starts:
        raise ConfigError(
            f"no adapter to train: {registry.root} has none and there are no logs. Start"
            " `marft-agents serve` with --agents first; it publishes untrained ones"
        )
    return starts


def _stages(
    plan: Plan | None,
    registry: Registry,
    base: BaseModelInfo,
    model_dir: Path,
    config: MarftConfig,
    settings: Mapping[str, Any],
    scratch: Path,
    online: Online | None,
    logs: list[str],
    say: Say,
) -> Stages:
    starts = _starts(plan, registry, config, online)
    if plan is None:
        check_adapter_settings(config.adapters, starts)
    folders = {
        adapter: start_folder(
            adapter,
            version,
            registry,
            model_dir,
            new_adapter(config, adapter),
            seed=config.seed,
            scratch=scratch,
        )
        for adapter, version in sorted(starts.items())
    }
    learner = Learner(Session(model_dir, folders, config, say), config, say)
    return Stages(
        learner,
        registry,
        base,
        config,
        scratch,
        settings=settings,
        plan=plan,
        online=online,
        logs=logs,
        say=say,
    )


# -- doing it ----------------------------------------------------------------------------------


def _run(
    stages: Stages, saved: checkpoint.Checkpoint | None, fresh_optimizer: bool, say: Say
) -> FinetuneResult:
    started = time.monotonic()
    learner, config, plan = stages.learner, stages.config, stages.plan
    if saved is not None:
        _load(stages, saved, fresh_optimizer, say)
    elif plan is None:
        _carry_over(stages, say)
    if plan is not None and not stages.offline_done:
        by_adapter = {a.adapter: a.rows for a in plan.adapters}
        learner.session.try_sharing(plan.data.picked(by_adapter))
        if saved is None:
            stages.replay(plan.data, by_adapter)
        if config.offline in TRL_METHODS:
            imitate(stages)
    learner.after_step = _checkpoints(stages)
    learner.run(stages.program())
    _finish(stages)
    return FinetuneResult(
        adapters=[stages.results[name] for name in sorted(stages.results)],
        untouched=_untouched(stages),
        explained_variance=stages.explained,
        seconds=time.monotonic() - started,
        tokens_scored=learner.trainer.tokens_scored,
        credit_file=stages.credit_file,
        rounds=stages.rounds,
        swapped={} if stages.online is None else dict.fromkeys(stages.results, "yes"),
        metrics=learner.trainer.metrics,
    )


def _untouched(stages: Stages) -> list[Untouched]:
    """Whoever no update of the run has moved, with the reason."""
    spoke = set(stages.roles.values())
    why = {
        adapter: "no iteration taught it anything" if adapter in spoke else "0 samples"
        for adapter in stages.learner.session.adapters
    }
    why |= {u.name: u.why for u in ([] if stages.plan is None else stages.plan.untouched)}
    why |= stages.untouched
    return [Untouched(name, why[name]) for name in why if name not in stages.results]


def _checkpoints(stages: Stages) -> Callable[[], None]:
    every = max(int(stages.config.save_steps), 1)

    def after_step() -> None:
        if stages.learner.steps_taken % every == 0:
            stages.save()

    return after_step


def _finish(stages: Stages) -> None:
    """Keep what a later online run can start from; a run that is over has no checkpoints."""
    root, learner = stages.registry.root, stages.learner
    if not learner.session.is_main:
        return
    facts = {**stages.facts(), "versions": {r.adapter: r.version for r in stages.results.values()}}
    try:
        checkpoint.write(root / checkpoint.LEARNER, learner, facts, keep=1)
    except OSError as error:
        stages.say(f"WARNING: cannot keep Adam and critic for a later run ({error})")
    for folder in checkpoint.checkpoints(root / checkpoint.CHECKPOINTS):
        checkpoint.remove(folder)


def _carry_over(stages: Stages, say: Say) -> None:
    """Adam states and critic of the last run, where its versions are those in use."""
    found = checkpoint.checkpoints(stages.registry.root / checkpoint.LEARNER)
    if not found:
        return
    try:
        saved = checkpoint.read(found[-1])
    except ConfigError as error:
        say(f"Adam and critic start anew: {error}")
        return
    current = {a: stages.registry.current(a) for a in stages.learner.session.adapters}
    versions: dict[str, int] = saved.facts["versions"]
    other = [a for a, v in versions.items() if current.get(a) != v]
    same_base = saved.facts["base"]["fingerprint"] == stages.base.fingerprint
    before: dict[str, Any] = saved.facts["settings"]
    changed = [n for n in _OF_CRITIC if before.get(n, _default(n)) != getattr(stages.config, n)]
    if other or not same_base or "estimator" in changed:
        why = f"{other[0]} is another version now" if other else "it was another set-up"
        say(f"Adam and critic start anew: the last run's are not these adapters' ({why})")
        return
    checkpoint.carry_over(stages.learner, saved, critic=not changed)
    names = ", ".join(served_name(a, v) for a, v in sorted(versions.items()))
    verb = "goes" if changed else "and critic go"
    say(f"Adam {verb} on from the run that made {names}")
    if changed:
        say(f"the critic starts anew: {changed[0]} is another one")


# -- resuming ----------------------------------------------------------------------------------


def _newest(
    registry: Registry, base: BaseModelInfo, settings: Mapping[str, Any]
) -> checkpoint.Checkpoint:
    """The checkpoint to go on from.

    Raises:
        ConfigError: when there is none, or it is of another base or other settings.
    """
    parent = registry.root / checkpoint.CHECKPOINTS
    found = checkpoint.checkpoints(parent)
    if not found:
        raise ConfigError(
            f"--resume: no checkpoint in {parent}; a run that ended has none. Start without"
            " --resume"
        )
    saved = checkpoint.read(found[-1])
    was: dict[str, Any] = saved.facts["base"]
    if was["fingerprint"] != base.fingerprint:
        raise ConfigError(
            f"--resume: the checkpoint {saved.folder} is of the base {was['name']}"
            f" ({was['fingerprint'][:12]}), and --model is {base.name} ({base.fingerprint[:12]})"
        )
    _same_settings(saved, settings)
    return saved


def _same_settings(saved: checkpoint.Checkpoint, now: Mapping[str, Any]) -> None:
    before: dict[str, Any] = saved.facts["settings"]
    for name in sorted({*before, *now} - _MAY_CHANGE):
        was, is_now = (side.get(name, _default(name)) for side in (before, now))
        if name == "lora_target_modules" and isinstance(was, list) and isinstance(is_now, list):
            was, is_now = sorted(was), sorted(is_now)
        if was != is_now:
            raise ConfigError(
                f"--resume: the run was started with {name} {was!r}, and now it is {is_now!r}; give"
                " the same settings, or start again without --resume"
            )


def _default(name: str) -> Any:
    """Of a setting that only one of two runs changed."""
    for field in dataclasses.fields(MarftConfig):
        if field.name == name:
            made = field.default_factory
            return field.default if made is dataclasses.MISSING else made()
    return "not there"


def _load(stages: Stages, saved: checkpoint.Checkpoint, fresh_optimizer: bool, say: Say) -> None:
    roles: dict[str, str] = saved.facts["roles"]
    block, was = block_size(stages.config), int(saved.facts["block"])
    if block != was:
        raise ConfigError(
            f"--resume: a step of the run took {was} turns and now it would take {block}"
            " (per_device_train_batch_size x gradient_accumulation_steps x processes, now"
            f" {stages.config.world_size}); make them as many, or start again without --resume"
        )
    if stages.plan is not None:
        now = stages.plan.roles
        odd = sorted(a for a in {*roles, *now} if roles.get(a) != now.get(a))
        if odd and not saved.facts["offline_done"]:
            raise ConfigError(
                f"--resume: agent {odd[0]!r} was {roles.get(odd[0], 'not there')!s} when the run"
                f" started and is {now.get(odd[0], 'not there')!s} now; give the same logs and"
                " `agents:`, or start again without --resume"
            )
        count = saved.facts["episodes"]
        if count is not None and count != len(stages.plan.data.episodes):
            say(
                f"note: the run began with {count} episodes and there are"
                f" {len(stages.plan.data.episodes)} now; it goes on with those it began with"
            )
    checkpoint.load_learner(stages.learner, saved, fresh_optimizer=fresh_optimizer)
    stages.load_facts(saved.facts)
    say(f"resumed from {saved.folder.name}: {stages.learner.steps_taken} steps were taken before")
    if fresh_optimizer:
        say("the weights are kept and Adam's moments start anew (--fresh-optimizer)")
