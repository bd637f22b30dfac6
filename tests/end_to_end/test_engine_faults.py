"""What is told and done where vLLM itself is unwell, or is not the engine that it should be.

An engine takes its time to start, here several times; ``MARFT_ENGINE_FAULTS=1`` asks for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest

from marft_agents.errors import EngineError
from marft_agents.serving import ServerProcess
from marft_agents.serving.commands import find_vllm, vllm_command
from marft_agents.serving.process import EngineProcess, free_port
from tests.end_to_end.swaps import TARGETS, Versions, family, processes
from tests.end_to_end.test_kills import answers, check_consistent, module_of, wait_until
from tests.tiny_model import make_tiny_model

pytestmark = pytest.mark.skipif(
    not os.environ.get("MARFT_ENGINE_FAULTS"), reason="MARFT_ENGINE_FAULTS=1 asks for it"
)
AGENTS = ("planner", "writer")
MODULE = "vllm.entrypoints.openai.api_server"
STARTS_WITHIN_S = 240.0


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return Versions(tmp_path_factory.mktemp("world"), AGENTS, each=2)


def test_an_engine_that_says_it_is_well_and_generates_nothing_is_started_again(
    versions: Versions,
) -> None:
    extra = ["--engine", "vllm", "--max-lora-rank", "8", "--max-model-len", "512"]
    extra += ["--silence-timeout", "5"]
    told: list[int] = []
    with ServerProcess(versions.registry.root, model=versions.model, extra=extra) as server:
        check_consistent(server, versions)
        running = processes(str(versions.model)).items()
        (front,) = [pid for pid, argv in running if module_of(argv) == MODULE]
        frozen = family(front)
        assert frozen, "the engine's core is a process of its own"
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)

        def ask() -> None:
            body = {"model": "planner", "messages": [{"role": "user", "content": "well?"}]}
            url = f"{server.base_url}/chat/completions"
            told.append(httpx.post(url, json=body, timeout=300, trust_env=False).status_code)

        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(200)
        assert told and told[0] in (502, 503), "it does not wait for ever"
        wait_until(partial(answers, server.url), "ready again", STARTS_WITHIN_S)
        check_consistent(server, versions)
        metrics = httpx.get(f"{server.url}/metrics", trust_env=False).text
        assert 'marft_replica_silences_total{replica="engine-0",result="hangs"}' in metrics
        assert 'marft_replica_restarts_total{replica="engine-0"} 1.0' in metrics
        assert not family(front), "nothing is left of the one that hung"


@contextlib.contextmanager
def engine(model: Path, log: Path, *, adapters: bool) -> Generator[str]:
    port = free_port()
    command = vllm_command(
        model, port=port, install=find_vllm(), max_lora_rank=8, max_model_len=512, max_loras=5,
        target_modules=TARGETS,
    )  # fmt: skip
    if not adapters:
        kept = [word for word in command.argv if word != "--enable-lora"]
        command = replace(command, argv=tuple(kept))
    with EngineProcess(command, port=port, log=log, name="vLLM") as running:
        running.wait_ready(STARTS_WITHIN_S)
        yield running.url


def said(versions: Versions, url: str) -> str:
    """What ``serve`` says when it ends because of the engine at ``url``."""
    server = ServerProcess(
        versions.registry.root, model=versions.model, extra=["--server", url], start_timeout_s=60
    )
    with pytest.raises(EngineError) as caught:
        server.start()
    return str(caught.value)


def test_an_engine_without_adapters(versions: Versions, tmp_path: Path) -> None:
    with engine(versions.model, tmp_path / "engine.log", adapters=False) as url:
        told = said(versions, url)
    assert f"the engine at {url} takes no adapters" in told and "--enable-lora" in told


@pytest.mark.parametrize(("hidden", "seed"), [(256, 0), (128, 7)], ids=["shape", "weights"])
def test_an_engine_of_another_base_model(
    versions: Versions, tmp_path: Path, hidden: int, seed: int
) -> None:
    other = make_tiny_model(tmp_path / "other", hidden=hidden, seed=seed)
    with engine(other, tmp_path / "engine.log", adapters=True) as url:
        told = said(versions, url)
    assert "not answer as it was trained" in told and "another base model" in told
