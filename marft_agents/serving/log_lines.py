"""What a server writes about itself, one line an event, as text or as JSON.

Invariant: a line holds ids, names, numbers and reasons; never a prompt, a reply or a key. Whatever
a value says, it stays inside its line: control characters are escaped. Lines are written by a
thread of their own, some at a time; a full disk, or a pipe that nobody reads, loses lines, which
are counted, and holds up no request.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from marft_agents.errors import ConfigError
from marft_agents.recording.patterns import mask

Format = Literal["text", "json"]
LEVELS = ("debug", "info", "warning", "error")
_events = logging.getLogger("marft_agents.serving.events")
_OURS = ("marft_agents", "uvicorn")
_PLAIN = re.compile(r"[A-Za-z0-9_.:/@+,~%-]+")
_BARE = frozenset({"time", "level", "event"})
_LONGEST = 1000
_LONGEST_TRACE = 8000
_WAITING = 10_000
_CLOSE_S = 2.0
_GATHER_S = 0.05
"""How long a line waits for others: waking the thread for each takes longer than writing it."""
_STDERR = 2
_SAID = frozenset({"message", "problem", "reason", "trace"})
"""Fields that quote others, who may have quoted a secret."""


@dataclass(frozen=True, slots=True)
class Told:
    """The message of a log record that is made of fields; ``None`` is left out."""

    fields: Mapping[str, Any]

    def __str__(self) -> str:
        return _as_text({k: _cleaned(k, v) for k, v in self.fields.items() if v is not None})


def say(event: str, level: int = logging.INFO, **fields: Any) -> None:
    """One event of the server as a line."""
    if _events.isEnabledFor(level):
        _events.log(level, Told({"event": event, **fields}))


# -- how a line looks --------------------------------------------------------------------------


class LineFormatter(logging.Formatter):
    """A record as one line of ``key=value``, or of JSON."""

    def __init__(self, kind: Format) -> None:
        super().__init__()
        self._kind = kind

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields: dict[str, Any] = {
            "time": when.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
        }
        for name, value in self._said(record).items():
            if value is not None:
                fields[name] = _cleaned(name, value)
        if self._kind == "json":
            return json.dumps(fields, default=str)
        return _as_text(fields)

    def _said(self, record: logging.LogRecord) -> Mapping[str, Any]:
        told: Any = record.msg
        if isinstance(told, Told):
            return told.fields
        fields = {"event": "log", "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        return fields


def _cleaned(name: str, value: Any) -> Any:
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return round(value, 4)
    text = mask(str(value))[0] if name in _SAID else str(value)
    longest = _LONGEST_TRACE if name == "trace" else _LONGEST
    return text if len(text) <= longest else text[:longest] + "..."


def _as_text(fields: Mapping[str, Any]) -> str:
    """``key=value`` with what begins every line bare."""
    return " ".join([_text(v) if k in _BARE else f"{k}={_text(v)}" for k, v in fields.items()])


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else json.dumps(value)
    return json.dumps(value) if isinstance(value, bool) else str(value)


# -- where it goes -----------------------------------------------------------------------------


class LineHandler(logging.Handler):
    """Hands lines to a thread that writes them; ``lost`` counts those that it could not.

    Args:
        path: a file that is appended to, and opened anew when somebody moved it away.
        descriptor: where lines go without a ``path``.
    """

    def __init__(
        self, kind: Format, path: Path | None = None, *, descriptor: int = _STDERR
    ) -> None:
        super().__init__()
        self.lost = 0
        self._path = path
        self._out = descriptor if path is None else _opened(path)
        self._told = False
        self._lines: queue.SimpleQueue[str | logging.LogRecord | None] = queue.SimpleQueue()
        """Records whose fields change no more are put into words by the thread."""
        self._closing = threading.Event()
        self.setFormatter(LineFormatter(kind))
        self._thread = threading.Thread(target=self._write_all, name="marft-lines", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() >= _WAITING:
            self.lost += 1
        elif isinstance(record.msg, Told):
            self._lines.put(record)
        elif line := self._line(record):
            self._lines.put(line)

    def finish(self) -> None:
        """Write what is left, unless that takes too long; nothing is written afterwards.

        Not ``close``, which ``logging.config`` calls on every handler that it did not make.
        """
        self._lines.put(None)
        self._closing.set()
        self._thread.join(_CLOSE_S)
        self.close()

    def _write_all(self) -> None:
        going = True
        while going:
            waiting = [self._lines.get()]
            if waiting[0] is not None:
                self._closing.wait(_GATHER_S)
            with contextlib.suppress(queue.Empty):
                while len(waiting) < _WAITING:
                    waiting.append(self._lines.get_nowait())
            going = None not in waiting
            self._write([self._line(told) for told in waiting if told is not None])
        if self._path is not None:
            os.close(self._out)

    def _line(self, told: str | logging.LogRecord) -> str:
        """What is to be written; nothing when it cannot be put into words."""
        if isinstance(told, str):
            return told
        try:
            return self.format(told) + "\n"
        except Exception:
            self.handleError(told)
            return ""

    def _write(self, lines: list[str]) -> None:
        data = "".join(lines).encode("utf-8", "backslashreplace")
        try:
            self._open_anew()
            while data:
                data = data[os.write(self._out, data) :]
        except OSError as error:  # a full disk, or nobody reads any more
            self.lost += data.count(b"\n")
            if self._path is not None and not self._told:
                self._told = True
                with contextlib.suppress(OSError, ValueError):
                    print(f"marft-agents cannot write {self._path}: {error}", file=sys.stderr)

    def _open_anew(self) -> None:
        if self._path is None:
            return
        try:
            there, mine = self._path.stat(), os.fstat(self._out)
            if (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino):
                return
        except FileNotFoundError:
            pass
        moved, self._out = self._out, _opened(self._path)
        os.close(moved)


def _opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)


@contextlib.contextmanager
def logging_to(
    kind: Format = "text", level: str = "info", path: Path | None = None
) -> Generator[LineHandler]:
    """Write what this package and its web server log, while the block runs, to stderr or a file.

    Raises:
        ConfigError: when the file cannot be opened.
    """
    try:
        handler = LineHandler(kind, path)
    except OSError as error:
        raise ConfigError(
            f"--log-file {path} cannot be written ({error.strerror or error}); name a file in a"
            " folder that this user may write to"
        ) from error
    loggers = [logging.getLogger(name) for name in _OURS]
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(level.upper() if logger.name != "uvicorn" else "WARNING")
        logger.propagate = False
    try:
        yield handler
    finally:
        for logger, was, propagated in before:
            logger.removeHandler(handler)
            logger.setLevel(was)
            logger.propagate = propagated
        handler.finish()


def lost_lines() -> int:
    """Lines that were not written by those who write now."""
    handlers = logging.getLogger(_OURS[0]).handlers
    return sum(handler.lost for handler in handlers if isinstance(handler, LineHandler))


def json_say(out: Callable[[str], None]) -> Callable[[str], None]:
    """What the server announces to people, as JSON events: one a line that says something."""

    def told(line: str) -> None:
        if line.strip():
            when = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            event: Mapping[str, str] = {"time": when, "event": "say", "message": line.strip()}
            out(json.dumps(event))

    return told
