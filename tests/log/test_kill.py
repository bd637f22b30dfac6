"""``kill -9`` of a recorded app at random moments: what was acknowledged is in the log, once.

``MARFT_KILLS=200`` runs as many kills as that (40 by default); ``MARFT_KILL_SEED`` draws others.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from marft_agents.log import LogReader
from marft_agents.recording import MarftRecorder
from marft_agents.schema import Turn
from tests.log.events import turn

ROOT = Path(__file__).parent.parent.parent
KILLS = int(os.environ.get("MARFT_KILLS", "40"))
SEED = int(os.environ.get("MARFT_KILL_SEED", "20261129"))
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")


@contextmanager
def _program(*arguments: str) -> Generator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.log.killing", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        yield process


def _ask(process: subprocess.Popen[str], line: str = "") -> str:
    assert process.stdin is not None and process.stdout is not None
    if line:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    answer = process.stdout.readline()
    assert answer, "the program ended"
    return answer


def test_kill_9_at_random_moments_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    draw = random.Random(SEED)
    acknowledged: set[tuple[str, str]] = set()
    silent, usual = 0, 0.0
    with _program("--server") as server, _program(_ask(server).strip()) as killer:
        for number in range(KILLS):
            delay = draw.uniform(0.0001, 2 * usual) if number > 1 else 0.0
            started = time.monotonic()
            said = json.loads(_ask(killer, f"{tmp_path} {number} {delay:.6f}"))
            if number <= 1:  # the second app has all its imports in memory
                usual = time.monotonic() - started
            acknowledged |= {(episode, turn_id) for episode, *ids in said for turn_id in ids}
            silent += not said
    with MarftRecorder(tmp_path) as recorder, recorder.episode(id="next"):
        recorder.core.emit(turn(0, episode="next", turn_id="next"))
    reader = LogReader(tmp_path)
    events = [event for event, _ in reader.events()]
    found = Counter((e.episode_id, e.turn_id) for e in events if isinstance(e, Turn))
    assert acknowledged <= found.keys(), f"lost: {sorted(acknowledged - found.keys())[:5]}"
    assert set(found.values()) == {1}
    assert found["next", "next"] == 1
    torn = Counter(skipped.file for skipped in reader.skipped)
    assert reader.skipped_count == len(reader.skipped) and all(n <= 1 for n in torn.values())
    assert 0 < silent < KILLS, "the kills fall before and after the first acknowledgement"
    assert len(acknowledged) > KILLS
    print(f"{KILLS} kills, {len(acknowledged)} turns acknowledged, {sum(torn.values())} lines torn")
