"""``marft-agents finetune``: logs in, new adapter versions out, swapped into a running server.

Invariant: whatever can be wrong (names, settings, logs, rewards, base model, rank, server, app,
tasks) is said on one line before anything is trained, and nothing is changed then. Of several
processes the first one speaks and swaps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from marft_agents.cli._finetune_online import OnlinePart, make_online, read_online
from marft_agents.cli._finetune_server import (
    Server,
    connect,
    pins,
    require_same_adapters,
    swap_all,
)
from marft_agents.cli._text import say
from marft_agents.errors import (
    ConfigError,
    MissingExtraError,
    RegistryError,
    ServerError,
    TrainingError,
)
from marft_agents.log import LogReader
from marft_agents.rewards import RewardFunction, load_reward_function
from marft_agents.training._quiet import set_environment
from marft_agents.training.options import CHOICES, merge, read_assignments, read_yaml

if TYPE_CHECKING:
    from marft_agents.training import FinetuneResult, MarftConfig

_FLAGS = {
    "offline": "offline",
    "estimator": "estimator",
    "level": "level",
    "schedule": "schedule",
    "iterations": "iterations",
    "learning_rate": "learning_rate",
    "epochs": "num_train_epochs",
    "rank": "lora_rank",
    "seed": "seed",
}
"""Flags that are settings by another way."""


@dataclass(frozen=True)
class _Options:
    """The command line, but for the settings."""

    logs: tuple[Path, ...]
    model: str
    output: Path
    config_file: Path | None
    assignments: tuple[str, ...]
    reward: str | None
    online: str | None
    tasks: Path | None
    server: str | None
    operator_key_env: str | None
    resume: bool
    fresh_optimizer: bool
    dry_run: bool


@click.command("finetune")
@click.argument("logs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--model", required=True, help="Base model that answered: a folder or a hub id.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("adapters"),
    show_default=True,
    help="The registry's folder.",
)
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="Settings as YAML.")
@click.option("--reward", metavar="MODULE:FUNCTION", help="Scores episodes without a reward.")
@click.option("--offline", metavar="|".join(CHOICES["offline"]), help="Method for the logs.")
@click.option("--estimator", metavar="|".join(CHOICES["estimator"]), help="Kind of advantage.")
@click.option("--level", metavar="|".join(CHOICES["level"]), help="MARFT-A or MARFT-T.")
@click.option("--schedule", metavar="|".join(CHOICES["schedule"]), help="Who is updated when.")
@click.option("--online", metavar="MODULE:FUNCTION", help="Your app: run(task, recorder).")
@click.option("--tasks", type=click.Path(path_type=Path), help="Tasks for --online, JSON lines.")
@click.option("--iterations", type=int, help="Of collecting and training, online.")
@click.option("--server", metavar="URL", help="Swap the new versions into this running server.")
@click.option(
    "--operator-key-env",
    metavar="NAME",
    help="Variable with the server's operator key; default: the file in --output.",
)
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in --output.")
@click.option("--fresh-optimizer", is_flag=True, help="With --resume: start Adam's moments anew.")
@click.option("--dry-run", is_flag=True, help="Say what would be trained, and stop.")
@click.option("--learning-rate", type=float, help="Adam's step size.")
@click.option("--epochs", type=float, help="Passes over each adapter's turns.")
@click.option("--rank", type=int, help="LoRA rank of adapters that do not exist yet.")
@click.option("--seed", type=int, help="Seed of everything random.")
@click.option("--set", "assignments", metavar="KEY=VALUE", multiple=True, help="Any setting.")
def command(**given: Any) -> None:
    """Train one LoRA adapter per agent from recorded episodes in LOGS, then, with --online, by
    running your app.

    Settings come from --config, then --set, then the flags; the later ones win.
    """
    flags = {setting: given.pop(flag) for flag, setting in _FLAGS.items()}
    flags = {name: value for name, value in flags.items() if value is not None}
    options = _Options(**given)
    _require_sense(options, flags)
    layers = _layers(options, flags)
    _require_use_of_schedule(options, layers)
    online = _online_part(options)
    function = load_reward_function(options.reward) if options.reward is not None else None
    with ExitStack() as stack:
        server = _server(stack, options)
        result = _train(stack, options, layers, function, online, server)
        if result is None:
            _main_says("dry run: nothing was trained")
            return
        if not _is_main():
            return
        swapped, failure, pinned = dict(result.swapped), None, pins(options.output)
        if server is not None and online is None:
            swapped, failure = swap_all(result.adapters, server, pinned)
    _tell(result, swapped, pinned, options)
    if failure is not None:
        raise failure


def _is_main() -> bool:
    """Whether this is the first of the processes that a launcher started."""
    return os.environ.get("RANK", "0") == "0"


def _main_says(line: str) -> None:
    if _is_main():
        say(line)


def _require_sense(options: _Options, flags: Mapping[str, Any]) -> None:
    """Refuse flags that make no sense together.

    Raises:
        ConfigError: naming them.
    """
    online, tasks, server = options.online, options.tasks, options.server
    offline_only = online is None
    wrong = {
        "--online needs --tasks FILE: what the app is to be run on":
            online is not None and tasks is None,
        "--online needs --server URL: the app is answered by `marft-agents serve`, and every"
        " iteration's versions are swapped into it": online is not None and server is None,
        "--tasks needs --online MODULE:FUNCTION: the app that is run on them":
            tasks is not None and offline_only,
        "--iterations is of the online stage; it needs --online":
            "iterations" in flags and offline_only,
        "--offline none leaves nothing to do without --online":
            flags.get("offline") == "none" and offline_only,
        "--fresh-optimizer needs --resume; a run that starts has a fresh optimizer":
            options.fresh_optimizer and not options.resume,
        "--operator-key-env needs --server URL":
            options.operator_key_env is not None and server is None,
    }  # fmt: skip
    for why, holds in wrong.items():
        if holds:
            raise ConfigError(why)


def _require_use_of_schedule(
    options: _Options, layers: Sequence[tuple[str, Mapping[str, Any]]]
) -> None:
    """The flag --schedule is about policy gradients; a file may set it for other runs too.

    Raises:
        ConfigError: when nothing of this run would follow it.
    """
    settings = {name: value for _, values in layers for name, value in values.items()}
    method = settings.get("offline", "awr")
    if "schedule" in layers[-1][1] and options.online is None and method != "ppo":
        raise ConfigError(
            f"--schedule orders policy-gradient updates, and offline: {method} has none; add"
            " --offline ppo or --online, or leave it out"
        )


def _layers(options: _Options, flags: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Settings and where they come from, the weakest first."""
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if options.config_file is not None:
        layers.append((str(options.config_file), read_yaml(options.config_file)))
    layers.append(("--set", read_assignments(options.assignments)))
    layers.append(("flag", flags))
    return layers


def _online_part(options: _Options) -> OnlinePart | None:
    if options.online is None or options.tasks is None:
        LogReader(*options.logs)  # a path that is wrong is said before anything is loaded
        return None
    return read_online(options.online, options.tasks, options.logs)


def _server(stack: ExitStack, options: _Options) -> Server | None:
    if options.server is None:
        return None
    server = connect(stack, options.server, options.operator_key_env, options.output, options.model)
    if options.online is not None:
        require_same_adapters(server, options.output)
    return server


def _train(
    stack: ExitStack,
    options: _Options,
    layers: Sequence[tuple[str, Mapping[str, Any]]],
    reward: RewardFunction | None,
    online: OnlinePart | None,
    server: Server | None,
) -> FinetuneResult | None:
    set_environment()
    try:
        from marft_agents.training import MarftConfig, finetune
    except ImportError as error:
        if isinstance(error, MissingExtraError):
            raise
        raise MissingExtraError("train", needed_for="marft-agents finetune") from error
    config: MarftConfig = MarftConfig(**merge(MarftConfig, layers))
    source = None
    if online is not None and server is not None:
        source = make_online(online, config, server, reward, stack, options.output, _main_says)
    before = _newest_checkpoint(options.output)
    try:
        return finetune(
            list(options.logs),
            model=options.model,
            output=options.output,
            config=config,
            reward=reward,
            limits=None if server is None else server.limits,
            online=source,
            resume=options.resume,
            fresh_optimizer=options.fresh_optimizer,
            dry_run=options.dry_run,
            say=_main_says,
        )
    except (TrainingError, ServerError, RegistryError, OSError, KeyboardInterrupt):
        kept = _newest_checkpoint(options.output)
        if kept is not None and (kept != before or options.resume):
            _main_says(f"{kept} is kept: the same command with --resume goes on from there")
        raise


def _newest_checkpoint(output: Path) -> Path | None:
    from marft_agents.training.checkpoint import CHECKPOINTS, checkpoints

    return next(reversed(checkpoints(output / CHECKPOINTS)), None)


def _tell(
    result: FinetuneResult,
    swapped: Mapping[str, str],
    pinned: Mapping[str, int],
    options: _Options,
) -> None:
    from marft_agents.training.results import result_lines

    say("")
    for line in result_lines(result, swapped):
        say(line)
    credit = "" if result.credit_file is None else f"credit per turn: {result.credit_file}; "
    say(f"{credit}{result.seconds:.0f} s in all")
    kept = [a for a in result.adapters if a.adapter in pinned and swapped.get(a.adapter) != "yes"]
    for a in kept:
        say(
            f"{a.adapter} is pinned: v{a.version} is published and v{pinned[a.adapter]} stays in"
            f" use (marft-agents adapters pin {a.adapter} --remove --adapters {options.output})"
        )
    waiting = [a for a in result.adapters if swapped.get(a.adapter) != "yes" and a not in kept]
    if not waiting and not kept and options.server is not None and result.adapters:
        say(f"{options.server} serves the new versions already")
    if waiting:
        say("next, into a running server (with --offline when none runs):")
    for a in waiting:
        more = f"--adapters {options.output} --version {a.version}"
        more += f" --server {options.server}" if options.server else ""
        say(f"  marft-agents swap {a.adapter} {more}")
    if waiting and options.server is None:
        say(f"then, if none runs:\n  marft-agents serve {options.output} --model {options.model}")
