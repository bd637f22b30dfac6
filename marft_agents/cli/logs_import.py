"""``marft-agents logs import``: a log out of what another program recorded."""

from __future__ import annotations

import math
from pathlib import Path

import click

from marft_agents.cli._text import say
from marft_agents.errors import LogError
from marft_agents.log.importing import FORMATS, import_log
from marft_agents.recording.redact import Redactor

_SHOWN = 10


@click.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "format",
    type=click.Choice(list(FORMATS)),
    help="Format of FILE; without it, it is told from what stands there.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("logs"),
    show_default=True,
    help="Folder to write the log into.",
)
@click.option("--reward", type=float, help="Reward of every imported episode; else none is given.")
def command(file: Path, format: str | None, output: Path, reward: float | None) -> None:
    """Make a log of FILE, recorded by another program.

    Its turns hold text and no token ids: `finetune --offline sft` learns from them, policy
    gradients do not. What cannot be read is named with its line and left out.
    """
    if reward is not None and not math.isfinite(reward):
        raise click.BadParameter("must be a finite number", param_hint="--reward")
    if not file.exists():
        raise LogError(f"{file} does not exist")
    done = import_log(file, output, format=format, reward=reward, prepare=Redactor())
    for bad in done.bad[:_SHOWN]:
        say(f"left out: {' '.join(bad.split())}")
    if done.bad_count > _SHOWN:
        say(f"left out: {done.bad_count - _SHOWN} more")
    turns = ", ".join(f"{name} {count}" for name, count in sorted(done.agents.items()))
    say(f"{file} ({done.format}) -> {done.path}: {done.episodes} episodes; turns: {turns}")
    if reward is None:
        say("no rewards: give them with --reward, or to finetune with its --reward FUNCTION")
