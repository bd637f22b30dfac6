"""Logs out of what other programs recorded.

Invariant: what is imported is marked (``EpisodeStarted.runtime`` begins with ``import``) and has no
token ids, so no policy gradient is ever taken on it; supervised training makes ids of its text when
asked to. A record that cannot be read costs that record and is named with its line. The log appears
whole under its name or not at all, and a file is imported once: its episodes' ids come from its
content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from marft_agents.errors import ConfigError, LogError
from marft_agents.log.encode import encode_line
from marft_agents.log.importing.agentchat import agentchat_result, agentchat_state
from marft_agents.log.importing.autogen_sqlite import autogen_sqlite
from marft_agents.log.importing.chats import Made, openai_chats, sharegpt_chats
from marft_agents.log.importing.detect import detect
from marft_agents.log.importing.draft import Draft
from marft_agents.log.importing.lines import require_utf8
from marft_agents.log.whole import whole_file
from marft_agents.schema import Event, Turn

Reading = Callable[[Path, str, datetime], Iterator[Made]]
FORMATS: Mapping[str, Reading] = {
    "autogen-sqlite": autogen_sqlite,
    "agentchat-state": agentchat_state,
    "agentchat-result": agentchat_result,
    "openai": openai_chats,
    "sharegpt": sharegpt_chats,
}
_KEPT = 100


@dataclass
class Imported:
    """What was made of a file."""

    path: Path
    format: str
    episodes: int = 0
    agents: dict[str, int] = field(default_factory=dict[str, int])
    """Agent to its turns."""
    bad: list[str] = field(default_factory=list[str])
    """The first records that could not be read, with their place."""
    bad_count: int = 0


def import_log(
    source: Path,
    output: Path,
    *,
    format: str | None = None,
    reward: float | None = None,
    prepare: Callable[[Event], Event | None] | None = None,
) -> Imported:
    """Read ``source`` and write a segment into the folder ``output``.

    ``prepare`` makes of each event the one to write (``None``: none), as redaction does.

    Raises:
        LogError: the format is not known or not that of the file, nothing in it can be read, or it
            was imported into ``output`` before.
        ConfigError: there is no such format.
        OSError: the file cannot be read, or the disk refused; nothing is written then.
    """
    if format is not None and format not in FORMATS:
        raise ConfigError(f"no format {format!r}; there are: {', '.join(FORMATS)}")
    if source.is_file():
        require_utf8(source)
    name = format or detect(source)
    digest = _digest(source)
    done = Imported(output / f"imported-{name}-{digest}.jsonl", name)
    if done.path.exists():
        raise LogError(f"{source} was imported before: {done.path}; remove that to do it again")
    begin = datetime.fromtimestamp(source.stat().st_mtime, UTC)
    with whole_file(done.path) as file:
        for made in FORMATS[name](source, f"{name}-{digest}", begin):
            if isinstance(made, Draft):
                _write(made.events(reward), file, done, prepare)
            else:
                done.bad_count += 1
                if len(done.bad) < _KEPT:
                    done.bad.append(f"{source}:{made[0]}: {made[1]}")
        if not done.episodes:
            first = "".join(f"; first: {bad}" for bad in done.bad[:1])
            raise LogError(f"no episode in {source} as {name}{first}")
    return done


def _write(
    events: Iterable[Event],
    file: BinaryIO,
    done: Imported,
    prepare: Callable[[Event], Event | None] | None,
) -> None:
    for event in events:
        ready = prepare(event) if prepare else event
        if ready is None:
            continue
        file.write(encode_line(ready))
        if isinstance(event, Turn):
            done.agents[event.agent] = done.agents.get(event.agent, 0) + 1
    done.episodes += 1


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]
