"""``marft-agents logs export``: the log in a format that other tools read."""

from __future__ import annotations

from pathlib import Path

import click

from marft_agents.cli._text import say
from marft_agents.log import LogReader
from marft_agents.log.exporting import FORMATS, export_log


@click.command("export")
@click.argument("logs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--to", "format", required=True, type=click.Choice(list(FORMATS)), help="Format.")
@click.option("--force", is_flag=True, help="Replace OUTPUT if it exists.")
def command(logs: tuple[Path, ...], output: Path, format: str, force: bool) -> None:
    """Write LOGS (files, or folders of *.jsonl) to OUTPUT.

    hf: a folder for datasets.load_from_disk, a row a turn. parquet: the same rows in one file.
    otel: spans by OpenTelemetry's GenAI conventions, OTLP/JSON lines. inspect: an evaluation log of
    Inspect AI. sharegpt: the chat of every answered call, JSON lines. What the format does not hold
    is said at the end; the log is not changed.
    """
    done = export_log(LogReader(*logs), format, output, force=force)
    say(f"{done.path}: {done.count} {done.what} of {done.episodes} episodes")
    say(f"not in {format}: {done.loses}")
    if done.skipped:
        say(f"lines of the log that are no event: {done.skipped} (see logs validate)")
