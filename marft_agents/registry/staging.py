"""Folders in which versions are put together, and what killed publishers leave of them.

Invariant: ``.staging-X`` belongs to the process that holds the lock of ``.publishing-X``, and goes
as soon as that process is known to be dead: its lock can be had, by a process of the same kernel.
A lock says nothing across kernels (not every file system passes it on) nor where there are none;
what lies there without a change for an hour goes then. An owner that lives keeps its folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Generator
from pathlib import Path

from marft_agents.registry import locks

STAGING = ".staging-"
_OWNER = ".publishing-"
_STALE_AFTER_S = 3600.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@contextlib.contextmanager
def staging(folder: Path) -> Generator[Path]:
    """A new folder inside ``folder``, gone when the block ends (unless it was renamed).

    Raises:
        OSError: the disk refuses.
    """
    with contextlib.ExitStack() as held:
        name = _owned(folder, held)
        work = folder / f"{STAGING}{name}"
        work.mkdir()
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


def remove_dead(folder: Path) -> None:
    """Take away what publishers that are dead, or seem so for an hour, left in a folder."""
    left = {p.name.removeprefix(STAGING) for p in folder.glob(f"{STAGING}*")}
    for name in left | {p.name.removeprefix(_OWNER) for p in folder.glob(f"{_OWNER}*")}:
        work, owner = folder / f"{STAGING}{name}", folder / f"{_OWNER}{name}"
        dead = _is_dead(owner)
        if dead is None:
            dead = _is_old(work) or (_is_old(owner) and not work.exists())
        if dead:
            shutil.rmtree(work, ignore_errors=True)
            with contextlib.suppress(OSError):
                owner.unlink(missing_ok=True)


def _is_dead(owner: Path) -> bool | None:
    """Whether the process that made this file is gone; ``None``: that cannot be known."""
    with contextlib.suppress(FileNotFoundError, PermissionError), locks.looked_at(owner) as seen:
        free, told = seen
        if free is False:
            return False
        if free and told and told == _kernel():  # said under the lock, which is free again
            return True
    return None


def _owned(folder: Path, held: contextlib.ExitStack) -> str:
    """The name of a lock that is held until ``held`` ends."""
    while True:
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        owner = folder / f"{_OWNER}{name}"
        if held.enter_context(locks.owned(owner, _kernel())):
            return name
        held.close()


def _kernel() -> str:
    """Which running kernel this is, the same in all of its containers; empty: it does not tell."""
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text(encoding="ascii").strip()
    return ""


def _is_old(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime > _STALE_AFTER_S
    return False
