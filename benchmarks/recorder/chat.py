"""One application with a tool and without it, in turn: time of every turn, processor time in all.

    python -m benchmarks.recorder.chat TOOL URL PAIRS CHATS FOLDER [--stream]

Invariant: the application is the same with the tool and without: an AutoGen round robin of a
planner and a coder, ten turns a chat, each chat with new agents, each block with new clients. A
turn's time is what the application waits between two messages, and it holds exactly one model call.
Blocks of ``CHATS`` chats with the tool and without alternate in one process, first the one and then
the other, so that a machine that becomes slower does so for both. A tool that writes in the
background finishes before the next block begins, which its processor time holds, and its turns do
not.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sqlite3
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient
from openai.resources.chat.completions import AsyncCompletions

from benchmarks.stats import median

TURNS = 10
WARM_CHATS = 6
Block = dict[str, float]
"""Figures of one block of chats: milliseconds a turn."""
INFO = ModelInfo(
    vision=False, function_calling=False, json_output=False, family="unknown",
    structured_output=False,
)  # fmt: skip


class Tool:
    """Nothing at all: what is measured of it is the noise."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on(self) -> None:
        """From here on, what the application does is recorded."""

    def wrap(self, team: Any) -> Any:
        return team

    def off(self) -> None:
        """Write what is recorded and leave the application alone."""

    def noted(self) -> int:
        """How many model calls were written down, after all."""
        return 0


class Marft(Tool):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from marft_agents import MarftRecorder

        self.recorder = MarftRecorder(folder / "logs")

    def wrap(self, team: Any) -> Any:
        return self.recorder.wrap(team)

    def off(self) -> None:
        self.recorder.flush()

    def noted(self) -> int:
        from marft_agents.log import LogReader
        from marft_agents.schema import Turn

        self.recorder.close()
        events = LogReader(self.folder / "logs").events()
        return sum(isinstance(event, Turn) for event, _ in events)


class MLflow(Tool):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        import mlflow as module  # pyright: ignore[reportMissingImports] only where this runs

        self.mlflow: Any = module
        self.mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        self.mlflow.set_experiment("chat")

    def on(self) -> None:
        self.mlflow.autogen.autolog()

    def off(self) -> None:
        self.mlflow.flush_trace_async_logging()
        self.mlflow.autogen.autolog(disable=True)

    def noted(self) -> int:
        self.mlflow.flush_trace_async_logging(terminate=True)
        with sqlite3.connect(self.folder / "mlflow.db") as database:
            (calls,) = database.execute("SELECT count(*) FROM spans WHERE type = 'LLM'").fetchone()
        return calls


class OpenTelemetry(Tool):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from opentelemetry.instrumentation.openai import (  # pyright: ignore[reportMissingImports]
            OpenAIInstrumentor,
        )
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

        self.file = (folder / "spans.json").open("w", encoding="utf-8")
        # Not the provider of the whole process: AutoGen would write spans of its own to that one.
        self.provider = TracerProvider()
        self.provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(out=self.file)))
        # Taken off and put on again here: its own way of taking itself off leaves the method as is.
        self.own: Any = AsyncCompletions.create
        OpenAIInstrumentor().instrument(tracer_provider=self.provider)
        self.instrumented: Any = AsyncCompletions.create
        assert self.own is not self.instrumented
        AsyncCompletions.create = self.own

    def on(self) -> None:
        AsyncCompletions.create = self.instrumented

    def off(self) -> None:
        self.provider.force_flush()
        AsyncCompletions.create = self.own

    def noted(self) -> int:
        self.provider.shutdown()
        self.file.close()
        return (self.folder / "spans.json").read_text().count('"name": "openai.chat"')


TOOLS: dict[str, type[Tool]] = {
    "nothing": Tool,
    "marft-agents": Marft,
    "mlflow": MLflow,
    "opentelemetry": OpenTelemetry,
}


NAMES = ("planner", "coder")


def clients_of(url: str) -> list[Any]:
    """A model client for each agent; an application makes them once."""
    return [
        OpenAIChatCompletionClient(model="agent", base_url=url, api_key="none", model_info=INFO)
        for _ in NAMES
    ]


def team_of(clients: Sequence[Any], stream: bool) -> RoundRobinGroupChat:
    """A new team, each agent with a client of its own."""
    agents: list[Any] = [
        AssistantAgent(name, client, model_client_stream=stream)
        for name, client in zip(NAMES, clients, strict=True)
    ]
    end = MaxMessageTermination(TURNS + 1)
    return RoundRobinGroupChat(agents, termination_condition=end)


async def play(team: RoundRobinGroupChat) -> list[float]:
    """Milliseconds of each turn of one chat; the task's own message is not one."""
    times: list[float] = []
    before = 0.0
    async for item in team.run_stream(task="Plan and write the program, step by step."):
        if isinstance(item, TaskResult) or type(item).__name__.endswith("ChunkEvent"):
            continue
        now = time.perf_counter()
        if before:
            times.append(1e3 * (now - before))
        before = now
    return times


async def block(url: str, chats: int, stream: bool, tool: Tool | None) -> tuple[Block, list[float]]:
    """Chats with the tool, or without any; its figures, and the milliseconds of every turn."""
    clients, times = clients_of(url), list[float]()
    cpu = time.process_time()
    if tool is not None:
        tool.on()
    for _ in range(chats):
        team = team_of(clients, stream)
        times += await play(tool.wrap(team) if tool is not None else team)
    if tool is not None:
        tool.off()
    cpu = (time.process_time() - cpu) / (chats * TURNS)
    for client in clients:
        await client.close()
    return {"p50_ms": median(times), "mean_ms": fmean(times), "cpu_ms": 1e3 * cpu}, times


def p99(times: Sequence[float]) -> float:
    return sorted(times)[min(len(times) - 1, int(0.99 * len(times)))]


async def measure(
    name: str, url: str, pairs: int, chats: int, folder: Path, stream: bool
) -> dict[str, Any]:
    tool = TOOLS[name](folder)
    await block(url, WARM_CHATS, stream, tool)
    await block(url, WARM_CHATS, stream, None)
    blocks: dict[bool, list[Block]] = {True: [], False: []}
    turns: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(pairs):
        for with_it in (pair % 2 == 0, pair % 2 == 1):
            figures, times = await block(url, chats, stream, tool if with_it else None)
            blocks[with_it].append(figures)
            turns[with_it] += times
    return {
        "with": blocks[True],
        "without": blocks[False],
        "p99_ms": [p99(turns[True]), p99(turns[False])],
        "calls": (WARM_CHATS + pairs * chats) * TURNS,
        "noted": tool.noted(),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "written_bytes": sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()),
        "versions": {name: version(name) for name in
                     ("autogen-agentchat", "openai", "mlflow",
                      "opentelemetry-instrumentation-openai", "opentelemetry-sdk")},
    }  # fmt: skip


def main() -> None:
    name, url, pairs, chats, folder, *rest = sys.argv[1:]
    os.chdir(folder)  # MLflow writes beside its database, too
    done = measure(name, url, int(pairs), int(chats), Path(folder), "--stream" in rest)
    print(json.dumps(asyncio.run(done)))


if __name__ == "__main__":
    main()
