"""Programs on disks of their own: ``python -m tests.recording.disks JOB FOLDER``.

Run inside ``unshare -rm``, so that they may mount; what they print is one JSON object.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from marft_agents import MarftRecorder
from marft_agents.log import LogReader


def _mount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)


def _say(recorder: MarftRecorder, text: str) -> None:
    episode = recorder.current()
    assert episode is not None
    episode.human("ann", text)


def full(folder: Path) -> dict[str, Any]:
    """The disk fills up half-way through an episode; then somebody makes room."""
    _mount(folder, "size=400k")
    ballast = folder / "ballast"
    ballast.write_bytes(b"x" * 200_000)
    with MarftRecorder(folder) as recorder:
        started = time.perf_counter()
        with recorder.episode(id="hit") as episode:
            for number in range(30):
                _say(recorder, f"{number} " + "y" * 20_000)
            flushed = recorder.flush()
            ballast.unlink()
            episode.reward(1.0)
        with recorder.episode(id="later") as later:
            later.reward(0.5)
            _say(recorder, "room again")
        took = time.perf_counter() - started
    reader = LogReader(folder)
    episodes = {e.episode_id: e for e in reader.episodes()}
    hit, after = episodes["hit"], episodes["later"]
    return {
        "flushed": flushed,
        "took": took,
        "written": len(hit.humans),
        "dropped": hit.ended.dropped_events if hit.ended else None,
        "rewards": [hit.team_reward, after.team_reward],
        "later": [len(after.humans), after.ended.dropped_events if after.ended else None],
        "skipped": reader.skipped_count,
    }


def read_only(folder: Path) -> dict[str, Any]:
    """The disk cannot be written at first."""
    _mount(folder, "size=400k")
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    with MarftRecorder(folder) as recorder:
        with recorder.episode(id="hit") as episode:
            _say(recorder, "lost")
            episode.reward(1.0)
            flushed = recorder.flush()
        flushed = flushed and recorder.flush()
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
        with recorder.episode(id="later"):
            pass
    episodes = {e.episode_id: e for e in LogReader(folder).episodes()}
    hit = episodes["hit"]
    return {
        "flushed": flushed,
        "dropped": hit.ended.dropped_events if hit.ended else None,
        "reward": hit.team_reward,
        "later": episodes["later"].ended is not None,
    }


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    jobs: dict[str, Callable[[Path], dict[str, Any]]] = {"full": full, "read_only": read_only}
    print(json.dumps(jobs[sys.argv[1]](Path(sys.argv[2]))))
