"""From bytes to events: the only place that decides whether a line is a record.

Invariant: a record is taken whole or not at all. A line that is not JSON is searched for whole
records beside the damage (behind a run of zero bytes, or behind a line that lost its newline); a
line that is JSON but no known event is never searched, because what looks like a record inside it
is somebody's payload.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from pydantic import ValidationError

from marft_agents.log.migrations import MIGRATIONS, Migration, migrate
from marft_agents.schema import EVENT, SCHEMA_VERSION, AnyEvent

MAX_LINE = 256 * 2**20
"""Bytes; a longer line is no record but damage, and is skipped without being held in memory."""

_BLOCK = 2**18
"""Bytes that are glanced at together."""
_BEGIN = b'{"schema_version":'
_EPISODE = b'"episode_id":'
_PIECE = re.compile(rb'[^\0]+?(?=\0|\{"schema_version":|\Z)', re.DOTALL)
_PLAIN = re.compile(rb'\{"schema_version":[0-9]+,"time":"[^"\\]*","episode_id":"([^"\\\0-\x1f]+)",')


@dataclass(frozen=True)
class Place:
    """Where a record begins: byte ``offset`` in ``file``, on ``line`` (from 1)."""

    file: Path
    offset: int
    line: int


@dataclass(frozen=True)
class Skipped:
    """A line, or a part of one, that is no readable event."""

    file: Path
    line: int
    offset: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} (byte {self.offset}): {self.reason}"


@dataclass(frozen=True)
class Refusal:
    """Why bytes are no event; ``torn`` when they are not even whole JSON."""

    reason: str
    torn: bool = False


class Found(NamedTuple):
    """One event and the bytes that it was read from."""

    event: AnyEvent
    offset: int
    length: int


class Glance(NamedTuple):
    """A line, and the episode it belongs to where a glance says so; else its ``data``."""

    line: int
    offset: int
    size: int
    episode: bytes | None
    data: bytes | None


class RawLine(NamedTuple):
    """Bytes up to a newline or the file's end; ``data`` is None for one that is too long."""

    number: int
    offset: int
    data: bytes | None


def raw_lines(
    file: BinaryIO, *, max_line: int = MAX_LINE, number: int = 0, offset: int = 0
) -> Iterator[RawLine]:
    """The lines of ``file`` with their offsets, one in memory at a time.

    ``number`` lines and ``offset`` bytes were read before.
    """
    while data := file.readline(max_line):
        number += 1
        size = len(data)
        too_long = size >= max_line and not data.endswith(b"\n")
        while too_long and (more := file.readline(max_line)):
            size += len(more)
            if more.endswith(b"\n"):
                break
        yield RawLine(number, offset, None if too_long else data)
        offset += size


def glances(file: BinaryIO) -> Iterator[Glance]:
    """Where the lines of ``file`` belong, by ``plain_episode``; many of them at once where each is
    a record of our own writing."""
    number = offset = 0
    while block := file.read(_BLOCK):
        if not block.endswith(b"\n"):
            block += file.readline(_BLOCK)
        lines = _plain_lines(block)
        end = offset + len(block)
        if lines is not None:
            starts = [start for start, _ in lines[1:]]
            for (start, name), after in zip(lines, [*starts, len(block)], strict=True):
                number += 1
                yield Glance(number, offset + start, after - start, name, None)
            offset = end
            continue
        file.seek(offset)
        for raw in raw_lines(file, number=number, offset=offset):
            known = None if raw.data is None else plain_episode(raw.data)
            name = None if known is None else known.encode()
            number, offset = raw.number, file.tell()
            yield Glance(number, raw.offset, offset - raw.offset, name, raw.data)
            if offset >= end:
                break


def _plain_lines(block: bytes) -> list[tuple[int, bytes]] | None:
    """Start and episode of every line, if each is what ``plain_episode`` says something about."""
    lines = block.count(b"\n")
    if not block.endswith(b"\n") or block.count(_BEGIN) != lines or b"\0" in block:
        return None
    if block.count(_EPISODE) != lines or not _is_utf8(block):
        return None
    found: list[tuple[int, bytes]] = []
    at = 0
    while at < len(block):
        match = _PLAIN.match(block, at)
        if match is None:
            return None
        found.append((at, match[1]))
        at = block.find(b"\n", at) + 1
    return found


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def plain_episode(data: bytes) -> str | None:
    """The episode that a line belongs to, if it holds one record of our own writing, or none.

    A glance instead of a parse: whether the line is a record is still to be found out. ``None``
    asks for ``read_line``: nothing can be said at a glance.
    """
    match = _PLAIN.match(data)
    if match is None or data.count(_BEGIN) != 1 or b"\0" in data:
        return None
    if data.count(_EPISODE) != 1:  # one inside a payload, or a key that is there twice
        return None
    try:
        return match[1].decode()
    except UnicodeDecodeError:
        return None


def read_line(data: bytes, offset: int) -> tuple[list[Found], str | None]:
    """The events of one line, and why anything in it was lost (``None``: nothing was)."""
    if not data.strip():
        return [], None
    whole = parse(data)
    if not isinstance(whole, Refusal):
        return [Found(whole, offset, len(data))], None
    if not whole.torn:
        return [], whole.reason
    pieces = [m for m in _PIECE.finditer(data) if m[0].strip()]
    parsed = [(m, parse(m[0])) for m in pieces]
    found = [
        Found(event, offset + m.start(), len(m[0]))
        for m, event in parsed
        if not isinstance(event, Refusal)
    ]
    zeros = data.count(0)
    if zeros:
        return found, f"{zeros} zero bytes"
    return found, whole.reason if len(found) < len(pieces) else None


def parse(
    data: bytes,
    *,
    version: int = SCHEMA_VERSION,
    migrations: Mapping[int, Migration] = MIGRATIONS,
) -> AnyEvent | Refusal:
    """One event from its JSON, brought up to ``version``."""
    try:
        event: AnyEvent = EVENT.validator.validate_json(data)
    except (ValidationError, RecursionError):
        return _parse_slowly(data, version, migrations)
    if event.schema_version == version:
        return event
    return _parse_slowly(data, version, migrations)


def _parse_slowly(
    data: bytes, version: int, migrations: Mapping[int, Migration]
) -> AnyEvent | Refusal:
    """Also reads escaped lone surrogates and old versions, and can say what is wrong."""
    try:
        record: Any = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Refusal(f"torn or not UTF-8 ({error.reason} at its byte {error.start})", torn=True)
    except json.JSONDecodeError as error:
        return Refusal(f"torn or not JSON ({error.msg} at its character {error.pos})", torn=True)
    except (ValueError, RecursionError) as error:
        return Refusal(f"torn or not JSON ({error})"[:200], torn=True)
    if not isinstance(record, dict):
        return Refusal(f"JSON {type(record).__name__}, not an event")
    fields = cast("dict[str, Any]", record)
    try:
        return EVENT.validate_python(migrate(fields, version=version, migrations=migrations))
    except ValidationError as error:
        return Refusal(_explain(error, fields))
    except ValueError as error:
        return Refusal(str(error))


def _explain(error: ValidationError, fields: Mapping[str, Any]) -> str:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if first["type"] == "union_tag_not_found":
        return "no `type`: not an event"
    if first["type"] == "union_tag_invalid":
        return f"unknown event type {fields.get('type')!r}"[:120]
    where = ".".join(str(part) for part in first["loc"][1:])
    return f"not a valid {fields.get('type')}: {where}: {first['msg']}"[:300]
