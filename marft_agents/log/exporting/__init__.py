"""The log in formats that other tools read.

Invariant: one episode in memory at a time; the output appears whole under its name or not at all,
and replaces nothing unless asked to. What a format cannot hold is said (``Format.loses``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marft_agents.errors import ConfigError, LogError
from marft_agents.log.exporting.inspect import write_inspect
from marft_agents.log.exporting.otel import write_otel
from marft_agents.log.exporting.sharegpt import write_sharegpt
from marft_agents.log.exporting.tables import write_dataset, write_parquet
from marft_agents.log.reader import LogReader
from marft_agents.log.whole import refuse_existing, whole_file, whole_folder
from marft_agents.schema import Episode

_DATASET = frozenset({".arrow", ".json"})
"""Suffixes of what stands in a folder of ``datasets``."""


@dataclass(frozen=True)
class Format:
    """How one format is written: ``write`` takes episodes and a file, or a folder."""

    write: Callable[..., int]
    what: str
    """What the number that ``write`` returns counts."""
    loses: str
    folder: bool = False


_ROWS_LOSE = (
    "tool events, human turns and edits as events of their own; which reward came from where; what"
    " of a message is no role, content, name or tool call; other sampling settings"
)
FORMATS: Mapping[str, Format] = {
    "hf": Format(write_dataset, "turns", _ROWS_LOSE, folder=True),
    "parquet": Format(write_parquet, "turns", _ROWS_LOSE),
    "otel": Format(
        write_otel,
        "spans",
        "human turns; rewards that were refused or not given; definitions of tools",
    ),
    "inspect": Format(
        write_inspect,
        "samples",
        "human turns; which reward came from where; definitions of tools; content that is no text",
    ),
    "sharegpt": Format(
        write_sharegpt,
        "chats",
        "token ids and log-probabilities, so no policy gradient can be taken; failed calls; tool"
        " and human events outside messages; sampling settings; adapter versions; dependencies",
    ),
}


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path
    episodes: int
    count: int
    what: str
    loses: str
    skipped: int
    """Lines of the log that are no event."""


def export_log(reader: LogReader, format: str, output: Path, *, force: bool = False) -> Exported:
    """Write the log that ``reader`` reads to ``output``.

    Raises:
        ConfigError: there is no such format.
        LogError: ``output`` exists and ``force`` is not set, or it is no export and cannot be
            replaced, or the log cannot be read.
        MissingExtraError: a package that the format needs is not installed.
        OSError: the disk refused; there is no output then.
    """
    if format not in FORMATS:
        raise ConfigError(f"no format {format!r}; there are: {', '.join(FORMATS)}")
    _refuse_the_log(reader, output)
    chosen, seen = FORMATS[format], _Counted(reader)
    _refuse_another_kind(output, chosen)
    if not force:
        refuse_existing(output, "name another place, or pass --force to replace it")
    target: Any
    if chosen.folder:
        with whole_folder(output.absolute()) as target:
            count = chosen.write(seen, target)
    else:
        with whole_file(output.absolute()) as target:
            count = chosen.write(seen, target)
    return Exported(output, seen.count, count, chosen.what, chosen.loses, reader.skipped_count)


def _refuse_the_log(reader: LogReader, output: Path) -> None:
    target = output.resolve()
    for file in reader.files:
        if target == file.resolve() or target in file.resolve().parents:
            raise LogError(f"{output} holds the log itself ({file}); name another place")


def _refuse_another_kind(output: Path, chosen: Format) -> None:
    """Only what an export wrote is replaced, never a folder with other things in it."""
    if not output.is_dir():
        return
    if not chosen.folder:
        raise LogError(f"{output} is a folder; name a file, e.g. {output / 'export'}")
    inside = list(output.iterdir())
    foreign = [path.name for path in inside if path.suffix not in _DATASET or path.is_dir()]
    if foreign:
        raise LogError(f"{output} holds other things ({foreign[0]}); name another place")


class _Counted:
    """The episodes of a log, counted on the way."""

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader
        self.count = 0

    def __iter__(self) -> Iterator[Episode]:
        self.count = 0
        for episode in self._reader.episodes():
            self.count += 1
            yield episode
