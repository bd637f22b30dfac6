"""The loop that both end-to-end tests run: record, fine-tune, swap, and look at what answers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
from autogen_agentchat.base import TaskResult

from examples.support_triage import app
from examples.support_triage.tasks import Ticket
from marft_agents import MarftRecorder
from marft_agents.log import LogReader
from marft_agents.schema import Episode, Probe


@dataclass(frozen=True)
class Recorded:
    """Results as the application saw them, beside the episodes in the log."""

    results: list[TaskResult]
    episodes: list[Episode]


def record(
    base_url: str,
    logs: Path,
    tickets: list[Ticket],
    *,
    score: Callable[[Ticket, TaskResult], float],
    temperature: float = 0.9,
) -> Recorded:
    """Run the unchanged application on every ticket under a recorder."""
    recorder = MarftRecorder(logs)

    async def run() -> list[TaskResult]:
        models = app.make_models(base_url, temperature=temperature)
        gate = asyncio.Semaphore(32)

        async def one(ticket: Ticket) -> TaskResult:
            async with gate, recorder.episode(task=ticket.message) as episode:
                result = await recorder.wrap(app.make_team(models)).run(task=ticket.message)
                episode.reward(score(ticket, result))
                return result

        try:
            return list(await asyncio.gather(*(one(t) for t in tickets)))
        finally:
            await models.close()

    with recorder:
        results = asyncio.run(run())
    return Recorded(results, list(LogReader(logs).episodes()))


def finetune(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``marft-agents finetune`` as a user runs it."""
    command = [sys.executable, "-m", "marft_agents", "finetune", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


def served_logprobs(url: str, model: str, probe: Probe) -> list[float]:
    """Log-probability (L,) of each token of the probe's reply, from the address an app uses."""
    prompt = probe.prompt_token_ids + probe.token_ids
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=120.0).raise_for_status().json()
    scored = reply["choices"][0]["prompt_logprobs"][len(probe.prompt_token_ids) :]
    tokens = probe.token_ids
    return [entry[str(t)]["logprob"] for entry, t in zip(scored, tokens, strict=True)]


def largest_gap(left: list[float], right: list[float]) -> float:
    """max |left - right|."""
    return max(abs(a - b) for a, b in zip(left, right, strict=True))
