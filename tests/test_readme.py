"""Every block of the README is run, in its order, as a reader would run it.

Only what a test machine must change is changed: the model is a tiny local one on the local engine,
and the port is a free one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import httpx
import pytest

from marft_agents.log import LogReader
from marft_agents.registry import Registry
from marft_agents.serving import free_port
from tests.tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parents[1]
MODEL, ADDRESS = "HuggingFaceTB/SmolLM2-135M-Instruct", "http://127.0.0.1:8000"
BLOCK = re.compile(r"(?:<!-- run: ([a-z-]+) -->\n)?```(\w*)\n(.*?)```", re.DOTALL)
PROJECT = """
TASKS = [f"ship part {i} on friday?" for i in range(16)]


def score(task, result):
    return 1.0 / (1.0 + len(result.messages[-1].to_text()) / 20)
"""


def blocks() -> dict[str, str]:
    """Text of every tagged block by its tag."""
    found = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    return {tag: text for tag, _, text in found if tag}


def commands(block: str) -> list[list[str]]:
    """Words of each command line of a shell block."""
    return [words for line in block.splitlines() if (words := shlex.split(line, comments=True))]


FEW = "--iterations 2 --set episodes_per_iteration=8"
"""Instead of the README's ten iterations of 64 episodes."""


def client_of(app: str) -> str:
    """The imports and the function ``client`` of the recording app, for the online one."""
    function = re.search(r"^def client.*?(?=^\S)", app, re.DOTALL | re.MULTILINE)
    assert function is not None
    imported = next(line for line in app.splitlines() if "OpenAIChatCompletionClient" in line)
    return f"\n\n{imported}\n\n\n{function[0]}"


def test_every_block_is_run_by_this_file() -> None:
    found = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    untagged = [text for tag, language, text in found if not tag and language != "text"]
    assert untagged == []
    assert list(blocks()) == [
        "make-targets", "extras", "serve", "record", "train", "online-app", "online", "back",
    ]  # fmt: skip


def test_make_targets_exist() -> None:
    for words in commands(blocks()["make-targets"]):
        done = subprocess.run([words[0], "--dry-run", *words[1:]], cwd=ROOT, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()


def test_the_extras_exist() -> None:
    known = metadata.metadata("marft-agents").get_all("Provides-Extra") or []
    wanted = re.findall(r"marft-agents\[(\w+)\]", blocks()["extras"])
    assert wanted == ["agentchat", "train"]
    assert set(wanted) <= set(known)


@contextmanager
def serving(words: list[str], folder: Path, port: int) -> Generator[None]:
    """The README's ``serve`` line, on the local engine and a free port."""
    argv = [sys.executable, "-m", "marft_agents", *words[1:], "--engine", "local"]
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen([*argv, "--port", str(port)], cwd=folder, stdout=log, stderr=log)
        try:
            _wait_until_healthy(process, port, folder)
            yield
        finally:
            process.terminate()
            process.wait(timeout=30)


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int, folder: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    pytest.fail((folder / "serve.log").read_text())


def run(argv: list[str], folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_walkthrough(tmp_path: Path) -> None:
    port = free_port()
    model = make_tiny_model(tmp_path / "model")
    (tmp_path / "my_project.py").write_text(PROJECT)

    def local(text: str) -> str:
        return text.replace(MODEL, str(model)).replace(ADDRESS, f"http://127.0.0.1:{port}")

    text = {tag: local(block) for tag, block in blocks().items()}
    (serve,) = commands(text["serve"])
    with serving(serve, tmp_path, port):
        (tmp_path / "app.py").write_text(text["record"])
        run([sys.executable, "app.py"], tmp_path)
        episode_id = next(iter(LogReader(tmp_path / "logs").episodes())).episode_id
        outputs = [
            run([sys.executable, "-m", "marft_agents", *words[1:]], tmp_path)
            for words in commands(text["train"].replace("EPISODE_ID", episode_id))
        ]
        registry = Registry(tmp_path / "adapters")
        assert [registry.current(agent) for agent in ("planner", "coder")] == [2, 2]
        assert "16" in outputs[0] and episode_id in outputs[-1]
        (tmp_path / "my_project.py").write_text(PROJECT + client_of(text["record"]))
        (tmp_path / "my_app.py").write_text(text["online-app"])
        lines = [json.dumps(f"ship part {i} on friday?") for i in range(8)]
        (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
        (online,) = commands(text["online"].replace("--iterations 10", FEW))
        run([sys.executable, "-m", "marft_agents", *online[1:]], tmp_path)
        assert [registry.current(agent) for agent in ("planner", "coder")] == [4, 4]
        for words in commands(text["back"]):
            run([sys.executable, "-m", "marft_agents", *words[1:]], tmp_path)
        assert [registry.current(agent) for agent in ("planner", "coder")] == [3, 4]
        assert registry.canary("planner") is not None
