"""Run one command and take its whole process group down when the parent is gone.

Invariant: this file imports the standard library only and runs as a script, first in a session of
its own. Its stdin is a pipe from the parent; the end of that pipe means that the parent died,
however it died, and then nothing in the group survives.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

_GRACE_S = float(os.environ.get("MARFT_GUARD_GRACE_S", "10"))
_PR_SET_PDEATHSIG = 1


def _die_with_guard() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_group(child: subprocess.Popen[bytes]) -> None:
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(0, signal.SIGKILL)


def _watch_parent(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 1024):
        pass
    _end_group(child)


def _ignore(_number: int, _frame: object) -> None:
    """A handler, not SIG_IGN: the child must not inherit it."""


def main(argv: list[str]) -> int:
    # The group's SIGTERM is for the child; the guard stays to report how the child ended.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _ignore)
    try:
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, preexec_fn=_die_with_guard)
    except OSError as error:
        print(f"cannot run {argv[0]}: {error.strerror}", flush=True)
        return 127
    threading.Thread(target=_watch_parent, args=(child,), daemon=True).start()
    code = child.wait()
    os.killpg(0, signal.SIGTERM)  # what the child left behind; the guard itself ignores it
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
