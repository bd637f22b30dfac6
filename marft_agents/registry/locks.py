"""Who may change the registry now, which server serves from it, and who publishes.

Invariant: all are locks of the operating system, which end with the process that holds them,
however it ends. On a file system without locks changes are not kept apart, and a server that was
killed there looks as if it still ran.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

from marft_agents.errors import ConfigError, RegistryError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK_FILE = ".registry.lock"
SERVER_FILE = ".server.lock"
_POLL_S = 0.02
_CHANGE_TIMEOUT_S = 60.0
_SERVER_TIMEOUT_S = 1.0  # others look at the lock for an instant


def _take(handle: int, timeout_s: float, *, shared: bool = False) -> bool | None:
    """Whether the lock was got within the time; ``None`` where there are no locks."""
    if fcntl is None:
        return None
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        except OSError:
            return None


def _close(handle: int) -> None:
    """Unlock and close; closing alone would leave the lock to a child that was forked meanwhile."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


@contextlib.contextmanager
def changing(root: Path, timeout_s: float = _CHANGE_TIMEOUT_S) -> Generator[None]:
    """Keep every other process and thread from changing the registry meanwhile.

    Raises:
        RegistryError: when another one does not end.
    """
    path = root / LOCK_FILE
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if _take(handle, timeout_s) is False:
            raise RegistryError(
                f"another process has been changing {root} for {timeout_s:g} s; wait for it, or end"
                f" it (fuser {path} names it)"
            )
        yield
    finally:
        _close(handle)


@contextlib.contextmanager
def owned(path: Path, told: str) -> Generator[bool]:
    """A new file that this process holds the lock of, and then says ``told``, for the block.

    Yields False, and nothing is said, when somebody looked at it just then.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        taken = _take(handle, 0.0) is not False
        if taken:
            os.write(handle, told.encode())
        yield taken
    finally:
        path.unlink(missing_ok=True)
        _close(handle)


@contextlib.contextmanager
def looked_at(path: Path) -> Generator[tuple[bool | None, str]]:
    """Whether nobody holds the file's lock (``None``: there are no locks), and what it says.

    Raises:
        OSError: there is no such file, or it is not to be read.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        free = _take(handle, 0.0, shared=True)
        yield free, os.read(handle, 4096).decode("utf-8", "replace")
    finally:
        _close(handle)


def _read(handle: int) -> str | None:
    """Whom the lock file names; ``None`` when it is empty."""
    os.lseek(handle, 0, os.SEEK_SET)
    text = os.read(handle, 4096).decode("utf-8", "replace")
    try:
        told: Any = json.loads(text)
    except ValueError:
        return "a server" if text.strip() else None
    who = cast("dict[str, Any]", told) if isinstance(told, dict) else {}
    return f"process {who.get('pid')} on {who.get('host')} at {who.get('url')}"


def server_of(root: Path) -> str | None:
    """The server that serves from this folder, in words; ``None`` when none does."""
    try:
        handle = os.open(root / SERVER_FILE, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        free = _take(handle, 0.0, shared=True)
        return None if free else _read(handle) or (None if free is None else "a server")
    finally:
        _close(handle)


def require_not_served(root: Path) -> None:
    """Two servers on one folder would disagree about the versions in use.

    Raises:
        ConfigError: naming the server that is there.
    """
    if who := server_of(root):
        raise ConfigError(
            f"{root} is served already, by {who}; use that server, stop it, or serve another folder"
        )


@contextlib.contextmanager
def serving(root: Path, url: str) -> Generator[None]:
    """Say that ``url`` serves from the folder, until the block ends.

    Raises:
        ConfigError: when another server does.
    """
    handle = os.open(root / SERVER_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if _take(handle, _SERVER_TIMEOUT_S) is False:
            require_not_served(root)
            raise ConfigError(f"{root} is served already; serve another folder")
        told = {"pid": os.getpid(), "host": socket.gethostname(), "url": url}
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps(told).encode() + b"\n")
        try:
            yield
        finally:
            os.ftruncate(handle, 0)
    finally:
        _close(handle)
