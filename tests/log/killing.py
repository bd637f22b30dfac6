"""The app that ``test_kill.py`` kills: recorded turns over HTTP, acknowledged line by line.

``python -m tests.log.killing URL`` is a server of such apps: it forks one for each line ``FOLDER
NUMBER DELAY`` on its input, kills it with SIGKILL after ``DELAY`` seconds (0: once it has
acknowledged three times), and answers with one JSON line. Forking spares the interpreter's start,
so that hundreds of kills take seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import openai

from marft_agents import MarftRecorder
from marft_agents.testing import ScriptedServer

TURNS = 4


def app(url: str, folder: Path, number: int, out: int) -> None:
    """Episodes of a few turns; after each flush, what is safe by then is said on ``out``."""
    client = openai.OpenAI(base_url=url, api_key="sk-test", max_retries=0)
    with MarftRecorder(folder) as recorder:
        recorder.attach_client(client, "planner")
        for episode_number in range(10_000):
            with recorder.episode(id=f"{number}-{episode_number}") as episode:
                for step in range(TURNS):
                    client.chat.completions.create(
                        model="planner",
                        messages=[{"role": "user", "content": f"{step} " + "x" * 3000}],
                    )
                    if step % 2:
                        assert recorder.flush()
                        os.write(out, json.dumps([episode.id, *episode.turns()]).encode() + b"\n")
                episode.reward(1.0)


def kill_one(url: str, folder: Path, number: int, delay: float) -> list[list[str]]:
    """Start an app, kill it, and return what it had acknowledged."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read_end)
            app(url, folder, number, write_end)
        finally:
            os._exit(1)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        lines = [pipe.readline() for _ in range(0 if delay else 3)]
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        lines += pipe.read().splitlines(keepends=True)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the app ended by itself: {status}"
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def main() -> None:
    url = sys.argv[1]
    with openai.OpenAI(base_url=url, api_key="sk-test") as client:  # imports what calls need
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    for line in sys.stdin:
        folder, number, delay = line.split()
        said: Any = kill_one(url, Path(folder), int(number), float(delay))
        print(json.dumps(said), flush=True)


def serve() -> None:
    """The scripted server in a process of its own: the apps are forked from one without threads."""
    with ScriptedServer() as server:
        print(server.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--server"] else main()
