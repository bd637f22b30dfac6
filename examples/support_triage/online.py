"""The same team for online training: a ticket in, its reward out.

    python -m examples.support_triage.online tasks.jsonl 240
    marft-agents finetune logs/ --model MODEL --server http://127.0.0.1:8000 \\
        --online examples.support_triage.online:run --tasks tasks.jsonl

``MARFT_SERVER`` and ``MARFT_TEMPERATURE`` say whom to ask and how freely to sample.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from examples.support_triage import app
from examples.support_triage.tasks import Ticket, training_tickets
from marft_agents import MarftRecorder


async def run(task: dict[str, str], recorder: MarftRecorder) -> float:
    """Answer one ticket; the number returned is the team's reward."""
    ticket = Ticket(**task)
    team = recorder.wrap(app.make_team(models()))
    result = await team.run(task=ticket.message)
    return app.reward(ticket, result)


@functools.cache
def models() -> app.Models:
    """The clients of all runs, which share one event loop."""
    server = os.environ.get("MARFT_SERVER", "http://127.0.0.1:8000").rstrip("/")
    temperature = float(os.environ.get("MARFT_TEMPERATURE", "0.8"))
    return app.make_models(f"{server}/v1", temperature=temperature)


def write_tasks(path: str | Path, count: int) -> None:
    """``count`` training tickets, one a line."""
    tickets = training_tickets(count)
    lines = [json.dumps({"id": f"ticket-{n}", "task": asdict(t)}) for n, t in enumerate(tickets)]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_tasks(sys.argv[1], int(sys.argv[2]))
