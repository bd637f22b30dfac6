"""``marft-agents inspect``: what was recorded, and what can be learned from it.

Invariant: text and ``--json`` say the same. Reading needs no model and no torch.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

import click

from marft_agents.cli._inspect_episode import Credit, episode_json, episode_lines, read_credit
from marft_agents.cli._inspect_list import list_json, list_lines
from marft_agents.cli._inspect_summary import summarise, summary_lines
from marft_agents.cli._text import say
from marft_agents.log import LogReader
from marft_agents.log.encode import to_plain


@click.command("inspect")
@click.argument("logs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--episodes", is_flag=True, help="List every episode, with its id and reward.")
@click.option("--episode", metavar="ID", help="Show one episode, turn by turn.")
@click.option(
    "--credit",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="With --episode: the credit.jsonl of a training run, for values and advantages.",
)
@click.option("--tokens", is_flag=True, help="With --episode: token ids and log-probabilities too.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of text.")
def command(
    logs: tuple[Path, ...],
    episodes: bool,
    episode: str | None,
    credit: Path | None,
    tokens: bool,
    as_json: bool,
) -> None:
    """Show what LOGS (files, or folders of *.jsonl) hold.

    Episodes, rewards, turns and tokens per agent, what can be trained on and why the rest cannot.
    """
    if episode is None and (credit is not None or tokens):
        raise click.UsageError("--credit and --tokens need --episode ID")
    if episodes and episode is not None:
        raise click.UsageError("--episodes lists all, --episode ID shows one; give one of them")
    reader = LogReader(*logs)
    if episodes:
        say(_document(list_json(reader)) if as_json else "\n".join(list_lines(reader)))
        return
    if episode is None:
        summary = summarise(reader)
        say(_document(summary.as_json()) if as_json else "\n".join(summary_lines(summary)))
        return
    seen = reader.episode(episode)
    joined = read_credit(credit, episode) if credit else Credit()
    if as_json:
        say(_document(episode_json(seen, joined)))
    else:
        say("\n".join(episode_lines(seen, joined, tokens=tokens)))


def _document(value: dict[str, Any]) -> str:
    return json.dumps(_strict(to_plain(value)), indent=2, allow_nan=False)


def _strict(value: Any) -> Any:
    """JSON has no NaN and no infinity; they become ``null``."""
    if isinstance(value, dict):
        return {k: _strict(item) for k, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_strict(item) for item in cast("list[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
