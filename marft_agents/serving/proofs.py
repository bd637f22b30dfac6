"""Which versions one run of an engine is known to answer from as it should.

Invariant: a proof is of one run: it is added by whoever loaded and probed the version on it, and is
gone when the version is unloaded, or when the replica leaves the traffic for whatever reason, since
nobody knows then whether the engine is still the same one. It says what the version's folder was
before the version was looked over; a folder that is no longer that proves nothing.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from marft_agents.registry.reader import MANIFEST_FILE
from marft_agents.serving.probe import ProbeReport


@dataclass(frozen=True)
class Folder:
    """A version's folder at one moment: device, inode, size and times of every file."""

    files: tuple[tuple[str, int, int, int, int, int], ...]
    manifest: bytes

    @classmethod
    def seen(cls, path: Path) -> Folder:
        """The folder now.

        Raises:
            OSError: it cannot be read.
        """
        files: list[tuple[str, int, int, int, int, int]] = []
        for file in sorted(path.iterdir()):
            s = file.stat()
            files.append((file.name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns))
        return cls(tuple(files), (path / MANIFEST_FILE).read_bytes())


@dataclass(frozen=True)
class Proof:
    """What a probe found, when, and of which folder."""

    report: ProbeReport
    folder: Folder
    time: datetime


@dataclass(frozen=True)
class Brought:
    """A version that is up: what its probe found, and when where that was beforehand."""

    report: ProbeReport
    since: datetime | None = None

    def evidence(self) -> dict[str, Any]:
        """For the audit trail."""
        told: dict[str, Any] = {"probe": self.report.as_json()}
        if self.since is not None:
            told["prepared"] = self.since.isoformat(timespec="milliseconds")
        return told


class Proofs:
    """The proofs of one engine, by the version's name there; used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._run = 0
        self._found: dict[str, Proof] = {}

    @property
    def run(self) -> int:
        """Which run it is, to be read before what :meth:`add` is to tell of."""
        return self._run

    def add(self, run: int, name: str, report: ProbeReport, folder: Folder) -> None:
        """Note a version that was loaded and probed on a run, unless that is over."""
        with self._lock:
            if run == self._run:
                self._found[name] = Proof(report, folder, datetime.now(UTC))

    def of(self, name: str) -> Proof | None:
        return self._found.get(name)

    def drop(self, name: str) -> None:
        """The version is being unloaded."""
        with self._lock:
            self._found.pop(name, None)

    def forget(self) -> None:
        """Whatever comes next may be another run."""
        with self._lock:
            self._run += 1
            self._found.clear()
