"""The whole loop on one machine: serve, measure, record, fine-tune, swap, measure again.

Everything is the product's own: the engine and gateway of ``marft-agents serve``, the recorder
around an AutoGen team, ``marft-agents finetune``, and a hot swap while the server runs.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

from autogen_agentchat.base import TaskResult
from autogen_agentchat.teams import RoundRobinGroupChat

from examples.support_triage import app, base_model
from examples.support_triage.tasks import Ticket, held_out_tickets, training_tickets
from marft_agents import MarftError, MarftRecorder
from marft_agents.evaluation import compare, proportion
from marft_agents.registry import Registry
from marft_agents.serving import ServerProcess

AGENTS = ("router", "writer")
HERE = Path(__file__).parent
STARTED = time.monotonic()
Converse = Callable[[Ticket, RoundRobinGroupChat], Awaitable[TaskResult]]


def say(message: str) -> None:
    """One line of progress with the seconds since the start."""
    print(f"[{time.monotonic() - STARTED:5.0f} s] {message}", flush=True)


def starting(seconds: float, line: str) -> None:
    """What the server printed last, every few seconds while it starts."""
    say(f"  starting, {seconds:.0f} s: {line.strip()[:90]}")


async def play(
    tickets: list[Ticket],
    base_url: str,
    converse: Converse,
    *,
    temperature: float,
    at_once: int,
    label: str,
) -> list[TaskResult]:
    """Run the application on every ticket, ``at_once`` conversations at a time."""
    gate, done = asyncio.Semaphore(at_once), 0
    models = app.make_models(base_url, temperature=temperature)

    async def turn(ticket: Ticket) -> TaskResult:
        nonlocal done
        async with gate:
            result = await converse(ticket, app.make_team(models))
        done += 1
        if done % max(1, len(tickets) // 4) == 0:
            say(f"  {label}: {done}/{len(tickets)} conversations")
        return result

    try:
        return list(await asyncio.gather(*(turn(t) for t in tickets)))
    finally:
        await models.close()


async def plain(ticket: Ticket, team: RoundRobinGroupChat) -> TaskResult:
    """The application on its own."""
    return await team.run(task=ticket.message)


def measure(tickets: list[Ticket], base_url: str, args: argparse.Namespace) -> list[bool]:
    """Success per held-out ticket, greedy decoding."""
    results = asyncio.run(
        play(tickets, base_url, plain, temperature=0.0, at_once=args.at_once, label="held out")
    )
    return [app.success(t, r) for t, r in zip(tickets, results, strict=True)]


def record(tickets: list[Ticket], base_url: str, logs: Path, args: argparse.Namespace) -> float:
    """Record every training conversation with its reward; returns the mean reward."""
    recorder = MarftRecorder(logs)

    async def recorded(ticket: Ticket, team: RoundRobinGroupChat) -> TaskResult:
        team = recorder.wrap(team)
        async with recorder.episode(task=ticket.message, metadata={"split": "train"}) as episode:
            result = await team.run(task=ticket.message)
            episode.reward(app.reward(ticket, result))
        return result

    with recorder:
        results = asyncio.run(
            play(
                tickets,
                base_url,
                recorded,
                temperature=args.temperature,
                at_once=args.at_once,
                label="recorded",
            )
        )
    return sum(app.reward(t, r) for t, r in zip(tickets, results, strict=True)) / len(tickets)


def finetune(model: Path | str, logs: Path, adapters: Path, url: str) -> None:
    """Train, publish and hot-swap through the command that a user runs."""
    command = [
        sys.executable, "-m", "marft_agents", "finetune", str(logs), "--model", str(model),
        "--output", str(adapters), "--config", str(HERE / "finetune.yaml"), "--server", url,
    ]  # fmt: skip
    say("$ marft-agents " + " ".join(command[3:]))
    code = subprocess.run(command).returncode
    if code != 0:
        raise SystemExit(f"quickstart: finetune ended with exit code {code}; the reason is above")


def pick_engine(asked: str) -> str:
    """``auto`` takes vLLM where it is installed and says so when it is not."""
    if asked != "auto":
        return asked
    if importlib.util.find_spec("vllm") is not None:
        return "vllm"
    say("vLLM is not installed here: using the local engine (not for production)")
    return "local"


def conclude(before: list[bool], after: list[bool], run: Path, model: Path | str) -> int:
    """Print the table and the next commands; the exit code says whether the team got better."""
    old, new = proportion(before), proportion(after)
    gain = compare([float(x) for x in before], [float(x) for x in after])
    print(f"\nheld-out success, {gain.n} tickets, greedy, 95 % intervals")
    print(f"  before        {old}")
    print(f"  after         {new}")
    print(f"  difference    {gain.difference:+.0%} [{gain.low:+.0%}, {gain.high:+.0%}] (paired)")
    print("\nwhat was trained")
    registry = Registry(run / "adapters")
    for agent in AGENTS:
        manifest = registry.manifest(agent, registry.current(agent) or 1)
        facts, parent = manifest.training, manifest.parent
        print(
            f"  {agent:<7} v{parent} -> v{manifest.version}: {facts['turns']} turns of"
            f" {facts['episodes']} conversations, {facts['tokens']} tokens, rank {manifest.rank}"
        )
    report = {"before": before, "after": after, "seconds": round(time.monotonic() - STARTED, 1)}
    (run / "result.json").write_text(json.dumps(report) + "\n", encoding="utf-8")
    if not gain.better:
        print("\nThe team did not get better: the interval of the difference reaches 0 or less.")
        print(f"Look at the logs with: marft-agents inspect {run / 'logs'}")
        return 1
    print(f"""
The team got better. On an application of your own:
  marft-agents serve adapters/ --model {model} --agents planner,coder
  # in the app: base_url="http://127.0.0.1:8000/v1", model="planner", and
  #             team = MarftRecorder("logs/").wrap(team)
  marft-agents inspect logs/
  marft-agents finetune logs/ --model {model} --output adapters/ --server http://127.0.0.1:8000
This run's logs and adapters: {run}""")
    return 0


def loop(args: argparse.Namespace, run: Path) -> int:
    """One pass of the loop inside the folder ``run``."""
    model: Path | str = args.model or base_model.prepare()
    engine = pick_engine(args.engine)
    held_out, training = held_out_tickets(args.held_out), training_tickets(args.episodes)
    say(f"serve: starting the {engine} engine with an untrained adapter per agent")
    # No higher rank than the adapters have: on a CPU every rank served is paid for.
    options = ["--engine", engine, "--max-lora-rank", "8", "--max-model-len", "1024"]
    with ServerProcess(
        run / "adapters", model=model, agents=AGENTS, extra=options, progress=starting
    ) as server:
        base_url = server.url + "/v1"
        say(f"measure: {len(held_out)} held-out tickets, before")
        before = measure(held_out, base_url, args)
        say(f"  success {proportion(before)}")
        say(f"record: {len(training)} conversations at temperature {args.temperature}")
        mean = record(training, base_url, run / "logs", args)
        say(f"  mean reward {mean:.2f}")
        finetune(model, run / "logs", run / "adapters", server.url)
        say("measure: the same held-out tickets, same application, same address, after")
        after = measure(held_out, base_url, args)
    return conclude(before, after, run, model)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="local folder or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--engine", choices=("auto", "vllm", "local"), default="auto")
    parser.add_argument("--episodes", type=int, default=240, help="training conversations")
    parser.add_argument("--held-out", type=int, default=60, help="held-out tickets")
    parser.add_argument("--at-once", type=int, default=64, help="conversations at a time")
    parser.add_argument("--temperature", type=float, default=0.8, help="while recording")
    parser.add_argument("--output", type=Path, default=Path("quickstart-run"))
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    run = args.output / datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    run.mkdir(parents=True)
    try:
        return loop(args, run)
    except MarftError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 2
    finally:
        say(f"done; everything of this run is in {run}")


if __name__ == "__main__":
    sys.exit(main())
