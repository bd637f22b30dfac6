"""Results on disk: one JSON object a line, and the machine that they come from.

Invariant: a run that is on disk is not run again, so a benchmark that was interrupted goes on where
it stopped; a run under other settings has another key.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Results:
    """A file of records; ``key`` names the fields that tell runs apart."""

    path: Path
    key: Sequence[str]

    def read(self) -> list[Record]:
        """The latest record of every key, in the order of the file."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return list({self._key(r): r for r in map(json.loads, lines)}.values())

    def has(self, record: Record) -> bool:
        """Whether there is a record with this one's key."""
        return self._key(record) in {self._key(r) for r in self.read()}

    def add(self, record: Record) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, sort_keys=True) + "\n")

    def _key(self, record: Record) -> str:
        return json.dumps([record.get(name) for name in self.key], sort_keys=True)


def machine() -> Record:
    """Processor, cores, memory, and the versions that matter."""
    names = ("torch", "transformers", "trl", "peft")
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": {name: importlib.metadata.version(name) for name in names},
        "commit": _commit(),
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or "unknown"
    lines = [line for line in text.splitlines() if line.startswith("model name")]
    return lines[0].split(":", 1)[1].strip() if lines else "unknown"


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def load_now() -> float:
    """Processes that want to run, averaged over a minute: what else the machine was doing."""
    return round(os.getloadavg()[0], 2)
