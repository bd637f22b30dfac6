"""Writes that a crash cannot tear: flushed to disk first, visible only after a rename.

Invariant: a reader sees the old content or the new one, never a part of either.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Generator, Mapping
from pathlib import Path


def fsync_folder(folder: Path) -> None:
    """Make renames inside ``folder`` survive a power cut (nothing to do on Windows)."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, data: bytes) -> None:
    """Write and flush to disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _temporary(path: Path, data: bytes) -> Path:
    temporary = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        write_file(temporary, data)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def replace_file(path: Path, data: bytes) -> None:
    """Put ``data`` in place of ``path`` in one step."""
    temporary = _temporary(path, data)
    try:
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


@contextlib.contextmanager
def restored_on_error(path: Path) -> Generator[None]:
    """Put ``path`` back as it was when the block raises.

    The way back is made first and needs no room on the disk, so a full one cannot block it.
    """
    back = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    existed = path.exists()
    try:
        if existed:
            try:
                os.link(path, back)
            except OSError:  # a file system without hard links
                write_file(back, path.read_bytes())
        try:
            yield
        except BaseException:
            if existed:
                os.replace(back, path)
            else:
                path.unlink(missing_ok=True)
            raise
    finally:
        back.unlink(missing_ok=True)


def create_file(path: Path, data: bytes) -> bool:
    """Create ``path`` whole, in one step; False (and no change) when it is already there."""
    temporary = _temporary(path, data)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        if path.exists():
            return False
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)
    return True


def write_files(files: Mapping[Path, bytes]) -> None:
    """Write new files of one folder and flush them: all, or on an error none is left.

    They are flushed after the last was written, which takes about as long as flushing one.
    """
    try:
        for path, data in files.items():
            path.write_bytes(data)
        for path in files:
            flush_file(path)
        fsync_folder(next(iter(files)).parent)
    except BaseException:
        for path in files:
            path.unlink(missing_ok=True)
        raise


def flush_file(path: Path) -> None:
    """Make what was written to a file survive a power cut."""
    handle = os.open(path, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def append_line(path: Path, line: bytes, *, flush: bool = True) -> None:
    """Append one line and flush it; a torn last line stays a line of its own.

    Raises:
        OSError: the disk refuses; nothing of it stays. Nobody else appends meanwhile.
    """
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.lseek(handle, 0, os.SEEK_END)
        torn = False
        if size:
            os.lseek(handle, size - 1, os.SEEK_SET)
            torn = os.read(handle, 1) != b"\n"
        rest = (b"\n" if torn else b"") + line + b"\n"
        try:
            while rest:
                rest = rest[os.write(handle, rest) :]
            if flush:
                os.fsync(handle)
        except OSError:
            os.ftruncate(handle, size)
            raise
    finally:
        os.close(handle)


def copy_file(source: Path, target: Path) -> str:
    """Copy and flush; returns the sha256 of what was written."""
    digest = hashlib.sha256()
    with source.open("rb") as reader, target.open("wb") as writer:
        while chunk := reader.read(1 << 20):
            digest.update(chunk)
            writer.write(chunk)
        writer.flush()
        os.fsync(writer.fileno())
    return digest.hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_read_only(folder: Path) -> None:
    """Take the write permission off every file in ``folder``, where the file system has one."""
    for file in folder.iterdir():
        with contextlib.suppress(OSError):
            file.chmod(0o444)
