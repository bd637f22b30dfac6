"""``marft-agents finetune``: logs in, new adapter versions out, swapped into a running server.

Invariant: whatever can be wrong (names, settings, logs, rewards, base model, rank, server) is said
on one line before anything is trained, and nothing is changed then.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from marft_agents.cli._text import say
from marft_agents.errors import ConfigError, MarftError, MissingExtraError, ServerError
from marft_agents.log import LogReader
from marft_agents.registry import describe_base
from marft_agents.rewards import RewardFunction, load_reward_function
from marft_agents.serving import GatewayClient
from marft_agents.serving.calls import NoAnswerError
from marft_agents.training._quiet import set_environment
from marft_agents.training.options import merge, read_assignments, read_yaml

if TYPE_CHECKING:
    from marft_agents.training import FinetuneResult


@dataclass(frozen=True)
class _Server:
    """A running gateway, checked before training."""

    client: GatewayClient
    state: Mapping[str, Any]


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
@click.option("--server", metavar="URL", help="Swap the new versions into this running server.")
@click.option(
    "--operator-key-env",
    metavar="NAME",
    help="Variable with the server's operator key; default: the file in --output.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be trained, and stop.")
@click.option("--learning-rate", type=float, help="Adam's step size.")
@click.option("--epochs", type=float, help="Passes over each adapter's turns.")
@click.option("--rank", type=int, help="LoRA rank of adapters that do not exist yet.")
@click.option("--seed", type=int, help="Seed of everything random.")
@click.option("--set", "assignments", metavar="KEY=VALUE", multiple=True, help="Any setting.")
def command(
    logs: Sequence[Path],
    model: str,
    output: Path,
    config_file: Path | None,
    reward: str | None,
    server: str | None,
    operator_key_env: str | None,
    dry_run: bool,
    learning_rate: float | None,
    epochs: float | None,
    rank: int | None,
    seed: int | None,
    assignments: Sequence[str],
) -> None:
    """Train one LoRA adapter per agent from recorded episodes in LOGS.

    Settings come from --config, then --set, then the flags; the later ones win.
    """
    layers = _layers(
        config_file,
        assignments,
        {
            "learning_rate": learning_rate,
            "num_train_epochs": epochs,
            "lora_rank": rank,
            "seed": seed,
        },
    )
    LogReader(*logs)
    function = load_reward_function(reward) if reward is not None else None
    with ExitStack() as stack:
        gateway = None
        if server is not None:
            gateway = _connect(stack, server, operator_key_env, output, model)
        result = _train(logs, model, output, layers, function, gateway, dry_run)
        if result is None:
            say("dry run: nothing was trained")
            return
        swapped, failure = _swap(result, gateway)
    _tell(result, swapped, model, output, server)
    if failure is not None:
        raise failure


def _layers(
    config_file: Path | None, assignments: Sequence[str], flags: Mapping[str, Any]
) -> list[tuple[str, Mapping[str, Any]]]:
    """Settings and where they come from, the weakest first."""
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if config_file is not None:
        layers.append((str(config_file), read_yaml(config_file)))
    layers.append(("--set", read_assignments(assignments)))
    layers.append(("flag", {name: value for name, value in flags.items() if value is not None}))
    return layers


def _connect(stack: ExitStack, url: str, key_env: str | None, output: Path, model: str) -> _Server:
    """The server's client, after comparing its base and limits with the run's."""
    key = None
    if key_env is not None:
        key = os.environ.get(key_env)
        if not key:
            raise ConfigError(f"--operator-key-env: the variable {key_env} is not set")
    client = stack.enter_context(GatewayClient(url, operator_key=key, adapters_dir=output))
    try:
        state = client.state()
    except NoAnswerError as error:
        raise ServerError(
            f"{error}; start `marft-agents serve`, or leave out --server and swap later"
        ) from error
    served: Any = state.get("base")
    rank: Any = state.get("max_lora_rank")
    if not isinstance(served, dict) or not isinstance(rank, int):
        raise ServerError(
            f"{url} answers, but not as `marft-agents serve` of this version does; name its address"
        )
    served, ours = cast("dict[str, Any]", served), describe_base(model)
    if served.get("fingerprint") != ours.fingerprint:
        raise ServerError(
            f"{url} serves the base {served.get('name')} ({str(served.get('fingerprint'))[:12]}),"
            f" and --model is {ours.name} ({ours.fingerprint[:12]}); give the base that is served"
        )
    return _Server(client, state)


def _train(
    logs: Sequence[Path],
    model: str,
    output: Path,
    layers: Sequence[tuple[str, Mapping[str, Any]]],
    reward: RewardFunction | None,
    gateway: _Server | None,
    dry_run: bool,
) -> FinetuneResult | None:
    set_environment()
    try:
        from marft_agents.training import MarftConfig, ServerLimits, finetune
    except ImportError as error:
        if isinstance(error, MissingExtraError):
            raise
        raise MissingExtraError("train", needed_for="marft-agents finetune") from error
    limits = None
    if gateway is not None:
        modules = gateway.state.get("target_modules")
        limits = ServerLimits(int(gateway.state["max_lora_rank"]), modules or None)
    return finetune(
        list(logs),
        model=model,
        output=output,
        config=MarftConfig(**merge(MarftConfig, layers)),
        reward=reward,
        limits=limits,
        dry_run=dry_run,
        say=say,
    )


def _swap(
    result: FinetuneResult, gateway: _Server | None
) -> tuple[dict[str, str], MarftError | None]:
    """Swap every new version in; what could not be swapped keeps its old version."""
    swapped: dict[str, str] = {}
    failure: MarftError | None = None
    if gateway is None:
        return swapped, None
    for adapter in result.adapters:
        try:
            gateway.client.swap(adapter.adapter, adapter.version, by="marft-agents finetune")
            swapped[adapter.adapter] = "yes"
        except ServerError as error:
            swapped[adapter.adapter] = "failed"
            failure = failure or error
    return swapped, failure


def _tell(
    result: FinetuneResult,
    swapped: Mapping[str, str],
    model: str,
    output: Path,
    server: str | None,
) -> None:
    from marft_agents.training.results import result_lines

    say("")
    for line in result_lines(result, swapped):
        say(line)
    say(f"credit per turn: {result.credit_file}; {result.seconds:.0f} s in all")
    waiting = [a for a in result.adapters if swapped.get(a.adapter) != "yes"]
    if waiting:
        say("next, into a running server (with --offline when none runs):")
    for a in waiting:
        options = f"--adapters {output} --version {a.version}"
        options += f" --server {server}" if server else ""
        say(f"  marft-agents swap {a.adapter} {options}")
    if waiting and server is None:
        say(f"then, if none runs:\n  marft-agents serve {output} --model {model}")
