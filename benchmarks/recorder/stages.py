"""Where the recorder's time goes in one turn: ``python -m benchmarks.recorder.stages [CHATS]``.

Prints processor time per turn of the application's thread, stage by stage, and of the log's thread,
on the chat of ``benchmarks.recorder.chat`` with a server that answers at once. Each stage includes
what it calls (and the timer, most of a microsecond). For finding what to make faster; what the
application waits for is measured by ``benchmarks.recorder.latency``, without any timers.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import tempfile
import time
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.recorder.chat import TURNS, clients_of, play, team_of
from benchmarks.recorder.latency import server
from benchmarks.stats import median
from marft_agents import MarftRecorder

WARM_CHATS = 3
STAGES = (
    ("a run begins", "marft_agents_autogen.runs", "Going", "__init__"),
    ("a run ends", "marft_agents_autogen.runs", "Going", "close"),
    ("an agent is handed messages", "marft_agents_autogen.speeches", "_Door", "__init__"),
    ("a model call begins", "marft_agents_autogen.client", "RecordingClient", "_begin"),
    ("its request is read", "marft_agents.recording.capture", "Hook", "_open"),
    ("its request is made anew", "marft_agents.recording.exchange", "Exchange", "outgoing"),
    ("its reply is taken and restored", "marft_agents.recording.capture", "Hook", "_received"),
    ("a model call ends", "marft_agents_autogen.asking", "Ask", "finish"),
    ("an agent's item is looked at", "marft_agents_autogen.speeches", "_Door", "observe"),
    ("a frame is entered", "marft_agents_autogen.frames", "_Entered", "__enter__"),
    ("a frame is left", "marft_agents_autogen.frames", "_Entered", "__exit__"),
    ("log's thread: a turn is made", "marft_agents.recording.drafts", "TurnDraft", "event"),
    ("log's thread: redaction", "marft_agents.recording.redact", "Redactor", "__call__"),
    ("log's thread: an event, all in all", "marft_agents.recording.sink", "Sink", "_write"),
)


def _timed(owner: Any, name: str, seconds: list[float]) -> None:
    """Have every call of a method add its processor time to ``seconds``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        try:
            return original(*args, **kwargs)
        finally:
            seconds.append(time.thread_time() - began)

    setattr(owner, name, timed)


async def measure(chats: int, folder: Path, *, stream: bool) -> dict[str, list[float]]:
    """Seconds of every call of every stage."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for label, module, owner, name in STAGES:
        _timed(getattr(import_module(module), owner), name, times[label])
    with server() as url, MarftRecorder(folder) as recorder:
        clients = clients_of(url)
        for chat in range(WARM_CHATS + chats):
            if chat == WARM_CHATS:
                recorder.flush()
                for seconds in times.values():
                    seconds.clear()
            await play(recorder.wrap(team_of(clients, stream)))
    return times


def main() -> None:
    chats = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    print(f"{'stage':36} {'calls a turn':>12} {'median, µs':>11} {'µs a turn':>10}")
    with tempfile.TemporaryDirectory() as folder:
        times = asyncio.run(measure(chats, Path(folder), stream="--stream" in sys.argv))
    for label, seconds in times.items():
        turns = chats * TURNS
        calls, total = len(seconds) / turns, 1e6 * sum(seconds) / turns
        print(f"{label:36} {calls:12.1f} {1e6 * median(seconds):11.1f} {total:10.1f}")


if __name__ == "__main__":
    main()
