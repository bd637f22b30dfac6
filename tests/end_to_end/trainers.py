"""``marft-agents finetune`` in processes that end by SIGKILL at a chosen place.

The command runs as it is, in a fork of a process that has imported the training libraries once: a
kill then comes while it works, not while it imports. Places are what the trainer does to the
registry's folder: opening to write, making, renaming, linking, removing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_OPERATIONS = {"open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "os.chmod"}
_MODULES = ("marft_agents.training.run", "tests.end_to_end.online_app")


@dataclass(frozen=True)
class Run:
    """How one ended: ``code`` is -9 for a kill."""

    code: int
    places: list[tuple[float, str]]
    """Those it came to; seconds since its start."""
    seconds: float
    said: str

    def publishing(self) -> range:
        """Numbers (from 1) of the places from the first copy of an adapter on."""
        first = next(i for i, (_, place) in enumerate(self.places) if "/.staging-" in place)
        return range(first + 1, len(self.places) + 1)

    def after(self, part: float) -> tuple[int, float]:
        """The last place, and the seconds since, at a ``part`` (0 to 1) of publishing and swaps."""
        first = self.places[self.publishing()[0] - 1][0]
        at = first + part * (self.seconds - first)
        number = sum(when <= at for when, _ in self.places)
        return number, at - self.places[number - 1][0]


class Trainers:
    """Forks trainers of one registry, one at a time."""

    def __init__(self, registry: Path, scratch: Path, env: dict[str, str]) -> None:
        scratch.mkdir()
        self._said = scratch / "said"
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(registry), str(self._said)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | env | {"TMPDIR": str(scratch)},
        )

    def run(self, arguments: Sequence[str], kill_at: int = 0, after_s: float = 0.0) -> Run:
        """One ``finetune``, killed ``after_s`` behind the place ``kill_at`` (from 1; 0: never)."""
        assert self._process.stdin is not None and self._process.stdout is not None
        wish = {"arguments": [*arguments], "kill_at": kill_at, "after_s": after_s}
        self._process.stdin.write(json.dumps(wish) + "\n")
        self._process.stdin.flush()
        told: dict[str, Any] = json.loads(self._process.stdout.readline())
        return Run(**told, said=self._said.read_text())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()


# -- in the process that forks -----------------------------------------------------------------


def _watch(registry: str, told: int, kill_at: int, after_s: float) -> None:
    """Tell every place, and end this process behind one of them."""
    count = 0

    def die() -> None:
        threading.Event().wait(after_s)
        os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in _OPERATIONS or not str(arguments[0]).startswith(registry):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        os.write(told, f"{event} {str(arguments[0])[len(registry) :]}\n".encode())
        count += 1
        if count == kill_at and after_s:
            threading.Thread(target=die, daemon=True).start()
        elif count == kill_at:
            die()

    sys.addaudithook(hook)


def _fork(registry: str, said: str, wish: dict[str, Any]) -> dict[str, Any]:
    read, write = os.pipe()
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        _watch(registry, write, wish["kill_at"], wish["after_s"])
        _command(wish["arguments"])
    os.close(write)
    with os.fdopen(read) as lines:
        places = [(time.monotonic() - start, line.strip()) for line in lines]
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {"code": code, "places": places, "seconds": time.monotonic() - start}


def _command(arguments: Sequence[str]) -> None:
    """Run it, and end this process as the command would."""
    from marft_agents.cli import main

    sys.argv = ["marft-agents", "finetune", *arguments]
    code: Any = 1
    try:
        main()
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(registry: str, said: str) -> None:
    for module in _MODULES:
        __import__(module)
    for line in sys.stdin:
        print(json.dumps(_fork(registry, said, json.loads(line))), flush=True)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
