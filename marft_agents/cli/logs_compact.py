"""``marft-agents logs compact``: few files in place of many."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import click

from marft_agents.cli._text import say
from marft_agents.log.compact import Compacted, compact


def _date(_: click.Context, __: click.Parameter, value: str | None) -> datetime | None:
    if value is None:
        return None
    try:
        time = datetime.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is no date; write it as 2026-11-29 or 2026-11-29T18:00:00+01:00"
        ) from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


@click.command("compact")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--before",
    metavar="DATE",
    callback=_date,
    help="Only episodes whose events are all older than DATE (UTC, unless it says otherwise).",
)
@click.option("--delete", metavar="EPISODE_ID", multiple=True, help="Leave this episode out.")
def command(source: Path, target: Path, before: datetime | None, delete: tuple[str, ...]) -> None:
    """Write the log SOURCE (a file, or a folder of *.jsonl) into the new folder TARGET.

    One episode after the other, in few files; without duplicate turns and without rewards and edits
    that later ones supersede. Reads back as the same episodes. SOURCE is not changed; a segment
    that a running app still writes is left alone.
    """
    for line in _lines(source, target, compact([source], target, before=before, delete=delete)):
        say(line)


def _lines(source: Path, target: Path, done: Compacted) -> Iterator[str]:
    yield (
        f"{source}: {done.source_files} files, {done.source_bytes / 1e6:.1f} MB ->"
        f" {target}: {done.files} files, {done.bytes / 1e6:.1f} MB"
    )
    yield f"{done.episodes} episodes, {done.events} events"
    if done.left_out:
        yield f"left out: {done.left_out} events that are there twice or superseded"
    if done.later:
        yield f"left out: {done.later} episodes that have an event since that date"
    if done.deleted:
        yield f"deleted: {', '.join(done.deleted)}; SOURCE still has them, so remove it"
    if done.damaged:
        yield f"left out: {done.damaged} damaged lines; only SOURCE has them (logs validate)"
    for path, who in done.still_written.items():
        yield f"left alone: {path} is still written by {who}"
