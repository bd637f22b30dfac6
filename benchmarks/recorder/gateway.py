"""What recording at the gateway adds: the same calls to `/v1` and to the address of an episode.

    python -m benchmarks.recorder.gateway [--calls 200] [--repeats 5]

Invariant: engine, gateway and client are processes of their own; the two addresses take turns at
one gateway, so they share whatever else the machine does. The engine does more for a recorded call,
too (ids and log-probabilities); that is part of what recording costs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import uvicorn

from benchmarks.recorder.latency import server
from benchmarks.records import Results, load_now, machine
from benchmarks.stats import median
from marft_agents.recording import MarftRecorder
from marft_agents.serving.access import Access
from marft_agents.serving.aliases import Aliases, Route
from marft_agents.serving.fleet import Fleet
from marft_agents.serving.gateway import Gateway, GatewaySettings
from marft_agents.serving.process import free_port
from marft_agents.serving.recording import Recording
from marft_agents.serving.replica import Replica
from marft_agents.serving.swap import Swapper
from marft_agents.serving.upstream import Upstream

RESULTS = Path("benchmarks/recorder/results/gateway.jsonl")
KEY = ("stream", "repeat", "calls")
TURNS_IN_EPISODE = 20
PLAIN = "/v1/chat/completions"


def serve(engine: str, logs: str, port: int) -> None:
    """A gateway without a registry, in front of ``engine``."""
    aliases = Aliases()
    aliases.point(Route("agent", 1))
    recording = Recording(MarftRecorder(logs, inject="always", raise_errors=False))
    fleet = Fleet([Replica("engine-0", cast(Any, None), Upstream(engine))])
    gateway = Gateway(Swapper(fleet, aliases), GatewaySettings(Access("benchmark")), recording)
    uvicorn.run(gateway.app(), port=port, log_level="error", access_log=False)


@contextmanager
def gateway(engine: str, logs: str) -> Generator[str]:
    """The gateway in a process of its own; yields its address."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.recorder.gateway", "--serve", engine, logs]
    process = subprocess.Popen([*command, str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(200):
            try:
                httpx.get(f"{url}/")
                break
            except httpx.TransportError:
                time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait()


def _call(client: httpx.Client, path: str, number: int, *, stream: bool) -> float:
    """Seconds of one call, of a chat that grows."""
    said = f"turn {number}: " + "what do we know so far? " * 20
    messages = [{"role": "user", "content": said} for _ in range(number % TURNS_IN_EPISODE + 1)]
    body = {"model": "agent", "messages": messages, "stream": stream}
    begin = time.perf_counter()
    client.post(path, json=body).raise_for_status()
    return time.perf_counter() - begin


def measure(client: httpx.Client, calls: int, tag: str, *, stream: bool) -> dict[str, float]:
    """Medians in ms, of calls that take turns."""
    plain: list[float] = []
    recorded: list[float] = []
    for number in range(calls):
        path = f"/episodes/{tag}-{number // TURNS_IN_EPISODE}/agents/agent{PLAIN}"
        plain.append(_call(client, PLAIN, number, stream=stream))
        recorded.append(_call(client, path, number, stream=stream))
    out = {"plain_ms": 1e3 * median(plain), "recorded_ms": 1e3 * median(recorded)}
    return out | {"added_ms": out["recorded_ms"] - out["plain_ms"], "load": load_now()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(options.serve[0], options.serve[1], int(options.serve[2]))
        return
    results = Results(options.out, KEY)
    with (
        tempfile.TemporaryDirectory() as logs,
        server() as engine,
        gateway(engine.removesuffix("/v1"), logs) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        measure(client, 20, "warm", stream=False)
        for repeat in range(options.repeats):
            for stream in (False, True):
                key = {"stream": stream, "repeat": repeat, "calls": options.calls}
                if results.has(key):
                    continue
                record = measure(client, options.calls, f"e{repeat}{stream}", stream=stream)
                results.add(key | record | {"machine": machine()})
                print(f"stream={stream!s:5} repeat {repeat}: plain {record['plain_ms']:.2f} ms,"
                      f" recorded {record['recorded_ms']:.2f} ms,"
                      f" added {record['added_ms']:.2f} ms", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
