"""One application under one tool: time of every turn, processor time of the whole.

    python -m benchmarks.recorder.chat TOOL URL CHATS FOLDER [--stream]

Invariant: the application is the same whatever the tool: an AutoGen round robin of a planner and a
coder, ten turns a chat, each chat with new agents. A turn's time is what the application waits
between two messages, and it holds exactly one model call. Processor time is that of the process
after the first chats, which warm up, until everything that was recorded is written.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sqlite3
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

TURNS = 10
WARM_CHATS = 3
TOOLS = ("plain", "marft-agents", "mlflow", "opentelemetry")
INFO = ModelInfo(
    vision=False, function_calling=False, json_output=False, family="unknown",
    structured_output=False,
)  # fmt: skip
Wrap = Callable[[Any], Any]
Finish = Callable[[], object]
"""Returns when everything is written."""
Noted = Callable[[], int]
"""How many model calls the tool wrote down."""
Tool = tuple[Wrap, Finish, Noted]


def _plain(folder: Path) -> Tool:
    return lambda team: team, lambda: None, lambda: 0


def _marft(folder: Path) -> Tool:
    from marft_agents import MarftRecorder
    from marft_agents.log import LogReader
    from marft_agents.schema import Turn

    recorder = MarftRecorder(folder / "logs")

    def noted() -> int:
        return sum(isinstance(event, Turn) for event, _ in LogReader(folder / "logs").events())

    return recorder.wrap, recorder.close, noted


def _mlflow(folder: Path) -> Tool:
    import mlflow as module  # pyright: ignore[reportMissingImports] only where this runs

    mlflow: Any = module

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    mlflow.set_experiment("chat")
    mlflow.autogen.autolog()

    def finish() -> None:
        mlflow.flush_trace_async_logging(terminate=True)

    def noted() -> int:
        with sqlite3.connect(folder / "mlflow.db") as database:
            (calls,) = database.execute("SELECT count(*) FROM spans WHERE type = 'LLM'").fetchone()
        return calls

    return lambda team: team, finish, noted


def _opentelemetry(folder: Path) -> Tool:
    from opentelemetry.instrumentation.openai import (  # pyright: ignore[reportMissingImports]
        OpenAIInstrumentor,
    )
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    file = (folder / "spans.json").open("w", encoding="utf-8")
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(out=file)))
    # Not the provider of the whole process: AutoGen would write spans of its own to that one.
    OpenAIInstrumentor().instrument(tracer_provider=provider)

    def finish() -> None:
        provider.shutdown()
        file.close()

    def noted() -> int:
        return (folder / "spans.json").read_text().count('"name": "openai.chat"')

    return lambda team: team, finish, noted


START: dict[str, Callable[[Path], Tool]] = dict(
    zip(TOOLS, (_plain, _marft, _mlflow, _opentelemetry), strict=True)
)


def team_of(url: str, stream: bool) -> RoundRobinGroupChat:
    """A new team, each agent with a client of its own."""
    agents: list[Any] = [
        AssistantAgent(
            name,
            OpenAIChatCompletionClient(
                model="agent", base_url=url, api_key="none", model_info=INFO
            ),
            model_client_stream=stream,
        )
        for name in ("planner", "coder")
    ]
    end = MaxMessageTermination(TURNS + 1)
    return RoundRobinGroupChat(agents, termination_condition=end)


async def play(team: RoundRobinGroupChat) -> list[float]:
    """Seconds of each turn of one chat; the task's own message is not one."""
    times: list[float] = []
    before = 0.0
    async for item in team.run_stream(task="Plan and write the program, step by step."):
        if isinstance(item, TaskResult) or type(item).__name__.endswith("ChunkEvent"):
            continue
        now = time.perf_counter()
        if before:
            times.append(now - before)
        before = now
    return times


async def measure(tool: str, url: str, chats: int, folder: Path, stream: bool) -> dict[str, Any]:
    wrap, finish, noted = START[tool](folder)
    times: list[float] = []
    for _ in range(WARM_CHATS):
        await play(wrap(team_of(url, stream)))
    cpu = time.process_time()
    for _ in range(chats):
        times += await play(wrap(team_of(url, stream)))
    finish()
    cpu = time.process_time() - cpu
    return {
        "turns": len(times),
        "seconds": times,
        "cpu_s_per_turn": cpu / (chats * TURNS),
        "calls": (WARM_CHATS + chats) * TURNS,
        "noted": noted(),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "written_bytes": sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()),
        "versions": {name: version(name) for name in
                     ("autogen-agentchat", "openai", "mlflow",
                      "opentelemetry-instrumentation-openai", "opentelemetry-sdk")},
    }  # fmt: skip


def main() -> None:
    tool, url, chats, folder, *rest = sys.argv[1:]
    result = asyncio.run(measure(tool, url, int(chats), Path(folder), "--stream" in rest))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
