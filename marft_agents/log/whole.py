"""Files and folders that appear whole under their name, or not at all.

Invariant: what is written beside the name is flushed to disk before it gets the name; a failure
leaves nothing behind, and what had the name before stays until then.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO

from marft_agents.errors import LogError


def refuse_existing(path: Path, cure: str = "name another place, or remove it first") -> None:
    """An empty folder is as good as none.

    Raises:
        LogError: when there is something under the name.
    """
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists() or path.is_symlink():
        raise LogError(f"{path} exists; {cure}")


@contextlib.contextmanager
def whole_file(path: Path) -> Generator[BinaryIO]:
    """A file to write, which gets its name at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, scratch = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb", buffering=2**20) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
        names_to_disk(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise


@contextlib.contextmanager
def whole_folder(path: Path) -> Generator[Path]:
    """A folder to fill, which gets its name at the end; an older one under it goes then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        made = scratch / "new"
        made.mkdir()
        yield made
        for file in made.rglob("*"):
            if file.is_file():
                _to_disk(file)
        names_to_disk(made)
        older = path.exists()
        if older:
            path.rename(scratch / "old")
        try:
            made.rename(path)
        except OSError:
            if older:
                (scratch / "old").rename(path)
            raise
        names_to_disk(path.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _to_disk(file: Path) -> None:
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())


def names_to_disk(folder: Path) -> None:
    """Flush the names in a folder, where the system can."""
    if os.name == "nt":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
