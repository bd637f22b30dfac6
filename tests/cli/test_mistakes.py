"""Circumstances that no command may answer with a traceback, or with silence."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click
import pytest

from marft_agents import cli
from marft_agents.errors import ServerError
from marft_agents.log import LogWriter
from marft_agents.schema import EpisodeEnded
from tests.serving.stage import make_house


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyboardInterrupt(), "\nmarft-agents: interrupted\n"),
        (ServerError("GET /x answered 500: oops\nsecond\x1b[31m line"),
         "marft-agents: GET /x answered 500: oops second\\x1b[31m line\n"),
        (OSError(28, "No space left on device", "adapters/credit.jsonl"),
         "marft-agents: [Errno 28] No space left on device: 'adapters/credit.jsonl'\n"),
    ],
)  # fmt: skip
def test_what_others_say_is_one_plain_line(
    error: BaseException,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @click.command()
    def failing() -> None:
        raise error

    def find(*_: Any) -> click.Command:
        return failing

    monkeypatch.setattr(type(cli.cli), "get_command", find)
    monkeypatch.setattr(sys, "argv", ["marft-agents", "inspect"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == (130 if isinstance(error, KeyboardInterrupt) else 2)
    assert capsys.readouterr().err == line


STRANGERS: dict[str, Any] = {
    "no base": {},
    "base is text": {"base": "tiny", "max_lora_rank": 16},
    "no rank": {"base": {"fingerprint": "f"}},
    "rank is text": {"base": {"fingerprint": "f"}, "max_lora_rank": "many"},
}


@contextmanager
def stranger(answer: Any) -> Generator[str]:
    """A server that answers everything with one JSON document; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run a command that fails with one line; returns the line."""
    with LogWriter(tmp_path / "logs") as log:
        log.write(EpisodeEnded(episode_id="e"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEY", "k" * 40)

    def fail(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["marft-agents", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        line = capsys.readouterr().err
        assert stopped.value.code == 2 and line.count("\n") == 1, line
        return line

    return fail


def finetune(server: str, key: str = "KEY") -> tuple[str, ...]:
    return ("finetune", "logs", "--model", "m", "--server", server, "--operator-key-env", key)


@pytest.mark.parametrize("answer", STRANGERS.values(), ids=STRANGERS)
def test_a_server_that_is_not_ours(answer: Any, run: Callable[..., str]) -> None:
    with stranger(answer) as url:
        assert f"{url} answers, but not as `marft-agents serve`" in run(*finetune(url))


def test_a_swap_that_only_seems_to_have_happened(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = make_house(tmp_path)
    house.publish("router", untrained=True)
    (house.registry.root / ".operator-key").write_text("k" * 40)
    with stranger({}) as url:
        line = run("swap", "router", "--adapters", str(house.registry.root), "--server", url)
    assert "as no `marft-agents serve` does" in line


def test_an_empty_address_or_function_is_not_no_address(run: Callable[..., str]) -> None:
    assert "is no address of a server" in run(*finetune(""))
    assert "--reward takes" in run("finetune", "logs", "--model", "m", "--reward", "")


def test_a_key_that_no_header_can_carry(
    run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ODD", "ключ")
    assert "the operator key holds" in run(*finetune("http://127.0.0.1:9", "ODD"))
    assert "'ODD' has characters" in run("serve", "a", "--model", "m", "--api-key-env", "ODD")


def test_a_command_asked_to_end_leaves_no_scratch_folder(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, tempfile, click, marft_agents.cli as cli\n"
        "@click.command()\n"
        "def waits():\n"
        "    with tempfile.TemporaryDirectory(dir=sys.argv[-1]):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        signal.pause()\n"
        "cli.cli.get_command = lambda *_: waits\n"
        "folder, sys.argv = sys.argv[-1], ['marft-agents', 'inspect']\n"
        "sys.argv.append(folder)\n"
        "waits.params.append(click.Argument(['folder'], expose_value=False))\n"
        "cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr.strip()) == (130, "marft-agents: interrupted")
    assert list(tmp_path.iterdir()) == []
