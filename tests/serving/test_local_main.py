"""The command: loopback only, one line for a mistake, a clean end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from marft_agents.errors import ConfigError
from marft_agents.serving.local.__main__ import bind, check_loopback
from marft_agents.serving.local.chat import render
from marft_agents.serving.local.engine import EngineOptions, LocalEngine
from marft_agents.serving.local.protocol import ChatRequest
from tests.tiny_model import make_tiny_model

MODULE = [sys.executable, "-m", "marft_agents.serving.local"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_is_taken(host: str) -> None:
    check_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_every_other_address_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="listens on loopback only"):
        check_loopback(host)


def test_a_taken_port_is_told_at_once() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="cannot listen on"):
            bind("127.0.0.1", taken.getsockname()[1])


def test_a_mistake_is_one_line_and_code_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [*MODULE, "--model", str(tmp_path), "--host", "0.0.0.0"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("marft local engine: --host 0.0.0.0") and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1


def test_a_template_with_a_mistake_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{% for m in messages %}")
    done = subprocess.run(
        [*MODULE, "--model", str(tmp_path), "--chat-template", str(file)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert "t.jinja: line 1: " in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_given_template_replaces_the_models_own(tmp_path: Path) -> None:
    options = EngineOptions(chat_template="{{ 'answers with a plan' }}")
    engine = LocalEngine(make_tiny_model(tmp_path / "model"), options)
    try:
        messages = [{"role": "user", "content": "coder"}]
        request = ChatRequest.model_validate({"model": "base", "messages": messages})
        ids = render(engine.model.tokenizer, messages, request)
        assert engine.model.tokenizer.decode(ids) == "answers with a plan"
    finally:
        engine.close()


def test_help_says_what_it_is_for() -> None:
    done = subprocess.run([*MODULE, "--help"], capture_output=True, text=True, check=True)
    assert "not for production" in done.stdout
    assert "temperature 0" in " ".join(done.stdout.split())


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_start_serve_and_stop(tmp_path: Path, how: signal.Signals) -> None:
    """Stopped in the middle of a stream, it ends by itself, soon, and frees the port."""
    model = make_tiny_model(tmp_path / "model")
    command = [*MODULE, "--model", str(model), "--port", "0", "--threads", "1"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as engine:
        try:
            assert engine.stderr is not None
            assert "not for production" in engine.stderr.readline()
            found = re.search(r"http://127\.0\.0\.1:(\d+)", engine.stderr.readline())
            assert found is not None
            body = {"prompt": "plan", "max_tokens": 900, "stream": True, "ignore_eos": True}
            url = f"{found[0]}/v1/completions"
            with httpx.stream("POST", url, json=body, timeout=30) as reply:
                next(reply.iter_lines())
                engine.send_signal(how)
                assert engine.wait(timeout=30) in (0, 130, -how)
            rest = engine.stderr.read()
            assert "Traceback" not in rest, rest
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", int(found[1]))) != 0
        finally:
            engine.kill()
