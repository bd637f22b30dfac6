"""What is measured: an engine with adapters, and the servers in front of it.

Invariant: everything is a process of its own, started as users start it, on loopback, and gone when
the block is left. All servers reach the same adapters of the same engine; the engine knows them
because ``marft-agents serve`` has loaded them.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import httpx

from benchmarks.gateway.load import KEY
from marft_agents.registry import Registry, describe_base, write_untrained_adapter
from marft_agents.registry.base import module_shapes
from marft_agents.registry.tensors import write_float32
from marft_agents.serving.commands import EngineCommand, find_vllm, vllm_command
from marft_agents.serving.process import EngineProcess, GuardedProcess, free_port
from tools.runtimes import environment

AGENTS = ("planner", "coder", "reviewer")
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
RANK = 8
_START_S = 120.0
_KEY_IN = "MARFT_BENCHMARK_KEY"


def tiny_llama() -> Path:
    """A random Llama of 2 layers, made once; vLLM needs heads of 32 on a CPU."""
    from tests.tiny_model import make_tiny_model

    folder = Path(".cache/gateway-llama-128").absolute()
    return folder if (folder / "config.json").exists() else make_tiny_model(folder, hidden=128)


def write_adapter(folder: Path, model: Path, seed: int, rank: int = RANK) -> Path:
    """A LoRA whose every weight is random: it answers otherwise than the base."""
    write_untrained_adapter(folder, model, rank=rank, target_modules=MODULES, seed=seed)
    draw = random.Random(seed)
    tensors: dict[str, tuple[tuple[int, ...], array[float]]] = {}
    for module, (out, into) in module_shapes(model, MODULES).items():
        for name, shape in (("lora_A", (rank, into)), ("lora_B", (out, rank))):
            values = array("f", [draw.gauss(0, 0.1) for _ in range(shape[0] * shape[1])])
            tensors[f"base_model.model.{module}.{name}.weight"] = (shape, values)
    write_float32(folder / "adapter_model.safetensors", tensors)
    return folder


def make_registry(folder: Path, model: Path, versions: int = 1, *, rank: int = RANK) -> Registry:
    """Every agent with one version, the first agent with so many; the first one is current."""
    registry, base = Registry(folder / "adapters"), describe_base(model)
    for i, agent in enumerate(AGENTS):
        for n in range(1 if i else versions):
            staged = write_adapter(folder / f"staged-{agent}-{n}", model, 1000 * i + n, rank)
            registry.publish(agent, staged, base=base, parent=None)
    return registry


class Server(GuardedProcess):
    """A server whose processor time is known."""

    url: str

    def cpu_s(self) -> float:
        """Seconds of processor time of all its processes so far."""
        return cpu_of(self._guard.pid if self._guard is not None else 0)


class Engine(EngineProcess, Server):
    """An engine whose processor time is known."""


def cpu_of(session: int) -> float:
    """Seconds of processor time of every process in a session."""
    total = 0.0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session:
                    total += time.clock_gettime(_clock_of(int(entry.name)))
    return total


def _clock_of(pid: int) -> int:
    """Linux's clock of one process: /proc counts in steps of 10 ms, which is too coarse."""
    return (~pid << 3) | 2


def wait_until(ready: Callable[[], bool], server: GuardedProcess) -> None:
    """Return when ``ready`` holds; the server's log says why it never does."""
    deadline = time.monotonic() + _START_S
    while not ready():
        server.check_alive()
        if time.monotonic() > deadline:
            raise RuntimeError(f"{server.name} was not ready in time:\n{server.tail()}")
        time.sleep(0.1)


def answers(url: str, path: str = "/health") -> bool:
    """Whether a server says that it is well."""
    try:
        return httpx.get(f"{url}{path}", timeout=5).is_success
    except httpx.HTTPError:
        return False


@dataclass(frozen=True)
class Target:
    """Where the clients go: address and names of the models there."""

    name: str
    url: str
    models: tuple[str, ...]
    server: Server | None
    """``None``: no server but the engine."""


@contextmanager
def scripted_engine(folder: Path) -> Generator[Engine]:
    """The scripted engine."""
    log = folder / "engine.log"
    command = EngineCommand((sys.executable, "-m", "benchmarks.gateway.engine"))
    engine = Engine(command, port=0, log=log, name="the scripted engine")
    with engine:
        wait_until(lambda: b"\n" in log.read_bytes(), engine)
        engine.url = f"http://127.0.0.1:{int(log.read_text())}"
        yield engine


@contextmanager
def vllm_engine(
    folder: Path, model: Path, say: Callable[[str], None], *, rank: int = RANK
) -> Generator[Engine]:
    """vLLM, started with the command that ``serve`` starts it with."""
    port = free_port()
    command = vllm_command(
        model,
        port=port,
        install=find_vllm(),
        max_lora_rank=rank,
        max_loras=len(AGENTS) + 1,
        target_modules=MODULES,
    )
    engine = Engine(command, port=port, log=folder / "engine.log", name="the vLLM engine")
    with engine:
        said = time.monotonic()
        say("starting vLLM")
        engine.wait_ready(300.0)
        say(f"vLLM was ready after {time.monotonic() - said:.0f} s")
        yield engine


@contextmanager
def engine_named(name: str, folder: Path, model: Path, *, rank: int = RANK) -> Generator[Engine]:
    """The scripted engine or vLLM, which takes adapters of a rank."""
    vllm = name != "scripted"
    start = vllm_engine(folder, model, print, rank=rank) if vllm else scripted_engine(folder)
    with start as engine:
        yield engine


@contextmanager
def ours(folder: Path, model: Path, engine_url: str) -> Generator[Target]:
    """``marft-agents serve`` in front of the engine."""
    port, log = free_port(), folder / "serve.log"
    program = Path(sys.executable).with_name("marft-agents")
    argv = [str(program), "serve", str(folder / "adapters"), "--model", str(model)]
    argv += ["--server", engine_url, "--port", str(port), "--api-key-env", _KEY_IN]
    server = Server(argv, log=log, name="marft-agents serve", env={_KEY_IN: KEY})
    server.url = f"http://127.0.0.1:{port}"
    with server:
        wait_until(lambda: answers(server.url), server)
        yield Target("marft-agents", server.url, AGENTS, server)


_LITELLM = """\
model_list:
{models}
litellm_settings:
  set_verbose: false
  request_timeout: 600
general_settings:
  master_key: {key}
  disable_spend_logs: true
"""
_LITELLM_MODEL = """\
  - model_name: {agent}
    litellm_params:
      model: hosted_vllm/{agent}@v1
      api_base: {url}/v1
      api_key: none
"""


@contextmanager
def litellm(folder: Path, engine_url: str) -> Generator[Target]:
    """LiteLLM's proxy with one worker, in front of the engine; as its guide to production says."""
    python, port = environment("bench-gateway"), free_port()
    models = "".join(_LITELLM_MODEL.format(agent=agent, url=engine_url) for agent in AGENTS)
    config = folder / "litellm.yaml"
    config.write_text(_LITELLM.format(models=models, key=KEY), encoding="utf-8")
    argv = [str(python.with_name("litellm")), "--config", str(config), "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--num_workers", "1"]
    env = {
        "LITELLM_LOG": "ERROR",
        "LITELLM_MODE": "PRODUCTION",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_TELEMETRY": "False",
        "NO_PROXY": "127.0.0.1",
    }
    server = Server(argv, log=folder / "litellm.log", name="LiteLLM's proxy", env=env)
    server.url = f"http://127.0.0.1:{port}"
    with server:
        wait_until(lambda: answers(server.url, "/health/liveliness"), server)
        yield Target("litellm", server.url, AGENTS, server)


def litellm_version() -> str:
    """The version in its environment."""
    code = "import importlib.metadata as m; print(m.version('litellm'))"
    done = subprocess.run(
        [str(environment("bench-gateway")), "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def versions_here(names: Sequence[str]) -> dict[str, str]:
    """Versions of what is installed of these."""
    out: dict[str, str] = {}
    for name in names:
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            continue
    return out
