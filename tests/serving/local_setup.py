"""A tiny model, adapters, a running local engine, and the plain forward pass it must equal."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# reason: transformers and peft ship no complete types
from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import uvicorn
from peft import PeftModel
from safetensors.torch import save_file
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM

from marft_agents.serving.local.app import create_app
from marft_agents.serving.local.engine import EngineOptions, LocalEngine
from marft_agents.serving.local.protocol import Settings
from marft_agents.serving.local.rows import Generation, Piece
from tests.tiny_model import make_tiny_model

HIDDEN, KV = 32, 16
SHAPES = {"q_proj": (HIDDEN, HIDDEN), "k_proj": (KV, HIDDEN), "v_proj": (KV, HIDDEN)}
LAYERS = 2
Tensors = dict[str, torch.Tensor]


def write_adapter(
    folder: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    size: float = 0.1,
    config: dict[str, Any] | None = None,
    change: Callable[[Tensors], None] | None = None,
) -> Path:
    """Write a PEFT LoRA adapter for the tiny model; ``size`` 0 makes B = 0."""
    random = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for layer in range(LAYERS):
        for name, (out, size_in) in SHAPES.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, size_in, generator=random)
            b = torch.randn(out, rank, generator=random) * size
            tensors[f"{prefix}.lora_B.weight"] = b
    if change is not None:
        change(tensors)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    full = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 8,
        "target_modules": sorted(SHAPES),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(full | (config or {})))
    return folder


class World:
    """A model folder with two adapters and an untrained one."""

    def __init__(self, folder: Path) -> None:
        self.model = make_tiny_model(folder / "model")
        self.folders = {
            "router@v1": write_adapter(folder / "router-v1", seed=1),
            "writer@v1": write_adapter(folder / "writer-v1", seed=2, rank=8),
            "idle@v1": write_adapter(folder / "idle-v1", seed=3, size=0.0),
        }
        self._references: dict[str, Any] = {}

    def logits(self, served: str, ids: Sequence[int]) -> torch.Tensor:
        """(T, V): what a plain transformers + PEFT forward gives at every position."""
        if served not in self._references:
            model: Any = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
            if served != "base":
                model = cast(Any, PeftModel.from_pretrained(model, self.folders[served]))
            self._references[served] = model.eval()
        with torch.inference_mode():
            return self._references[served](input_ids=torch.tensor([list(ids)])).logits[0].float()

    def logprobs(
        self, served: str, prompt: Sequence[int], out: Sequence[int], temperature: float = 1.0
    ) -> list[float]:
        """Teacher-forced log-probabilities of ``out`` after ``prompt``."""
        logits = self.logits(served, [*prompt, *out])[len(prompt) - 1 : -1] / temperature
        chosen = torch.log_softmax(logits, -1).gather(-1, torch.tensor(list(out))[:, None])
        return chosen[:, 0].tolist()

    @contextlib.contextmanager
    def engine(self, **options: Any) -> Generator[LocalEngine]:
        """An engine that serves every adapter of this world."""
        engine = LocalEngine(self.model, EngineOptions(**options))
        try:
            for name, folder in self.folders.items():
                engine.load_adapter(name, folder)
            yield engine
        finally:
            engine.close()
            assert not engine.alive

    @contextlib.contextmanager
    def client(self, **options: Any) -> Generator[tuple[LocalEngine, TestClient]]:
        """The routes without a socket."""
        with self.engine(**options) as engine, TestClient(create_app(engine)) as client:
            yield engine, client


@contextlib.contextmanager
def listening(engine: LocalEngine) -> Generator[str]:
    """The routes on a real socket; yields the base address."""
    config = uvicorn.Config(
        create_app(engine), port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Poll until true."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.002)


class Reply:
    """A generation handed to the engine directly, and what came back."""

    def __init__(self, prompt: Sequence[int], settings: Settings) -> None:
        self._pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        self.generation = Generation(list(prompt), settings, self._pieces.put)
        self.whole = Piece()

    def next(self) -> Piece:
        piece = self._pieces.get(timeout=20)
        self.whole.add(piece)
        return piece

    def wait(self) -> Piece:
        """The complete reply; an error raises."""
        while self.whole.finish_reason is None:
            self.next()
            if self.whole.error is not None:
                raise self.whole.error
        return self.whole


def ask(
    engine: LocalEngine,
    served: str,
    prompt: Sequence[int],
    settings: Settings | None = None,
    **kw: Any,
) -> Reply:
    """Submit one generation."""
    base = settings or Settings(max_tokens=12, temperature=0.0, ignore_eos=True)
    reply = Reply(prompt, replace(base, **kw))
    engine.submit(served, [reply.generation])
    return reply


def events(text: str) -> list[dict[str, Any]]:
    """The JSON of a whole event stream, which must end with [DONE]."""
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
