"""Kill runs with SIGKILL at random moments, resume them until they end, and compare the ends.

Every second kill comes at any moment of a run, the others soon after a new checkpoint.
``python -m tests.training.killing FOLDER KILLS SEED`` prints what happened as JSON. Every run is a
process of its own, forked from this one so that it need not import anything.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

from marft_agents.registry import Registry
from marft_agents.training._quiet import quiet, set_environment
from marft_agents.training.checkpoint import CHECKPOINTS, LEARNER, checkpoints, read
from tests.tiny_model import make_tiny_model
from tests.training.synthetic import TinyModel
from tests.training.test_resume import AGENTS, CASES, World, assert_same, config


@dataclass
class Tally:
    """What was killed, and where."""

    kills: int = 0
    runs: int = 0
    before_a_checkpoint: int = 0
    after_steps: list[int] = field(default_factory=list[int])
    while_publishing: int = 0


def in_a_process(work: Callable[[], object]) -> int:
    """Start it in a fork; its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def ends_within(child: int, seconds: float, since: Callable[[], bool] = lambda: True) -> bool:
    """Whether it ends by itself, so many seconds from when ``since`` holds; else it is killed."""
    until: float | None = None
    while until is None or time.monotonic() < until:
        if until is None and since():
            until = time.monotonic() + seconds
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            if status:
                raise SystemExit(f"a run failed by itself: status {status}")
            return True
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return not status


def look(registry: Registry, tally: Tally) -> None:
    """After a kill: every checkpoint is whole."""
    tally.kills += 1
    found = [read(folder) for folder in checkpoints(registry.root / CHECKPOINTS)]
    if not found:
        tally.before_a_checkpoint += 1
    else:
        tally.after_steps.append(found[-1].facts["steps"])
    for agent in AGENTS:
        for version in registry.versions(agent):
            registry.verify(agent, version)
    tally.while_publishing += len({tuple(registry.versions(agent)) for agent in AGENTS}) > 1


def is_over(registry: Registry) -> bool:
    """Killed after its last act."""
    ended = bool(checkpoints(registry.root / LEARNER))
    return ended and not checkpoints(registry.root / CHECKPOINTS)


def until_the_end(
    world: World, kind: str, name: str, seconds: float, draw: random.Random, tally: Tally, most: int
) -> None:
    """Kill and resume one run until it ends, with at most so many kills in all."""
    registry, values = world.registry(name), config(CASES[kind])
    parent = registry.root / CHECKPOINTS
    while not is_over(registry):
        before = checkpoints(parent)[-1:]
        child = in_a_process(lambda again=bool(before): world.run(name, values, resume=again))
        late = tally.kills % 2 == 0
        patience = draw.uniform(0, seconds / 4 if late else seconds)
        if ends_within(
            child,
            patience if tally.kills < most else 600.0,
            (lambda old=before: checkpoints(parent)[-1:] != old) if late else lambda: True,
        ):
            break
        look(registry, tally)
    assert_same(registry, world.registry(f"whole-{kind}"))
    tally.runs += 1


def main(root: Path, kills: int, seed: int) -> Tally:
    set_environment()
    gc.freeze()  # what was imported is no garbage, and the loop looks for that at every start
    with quiet():
        model = make_tiny_model(root / "tiny")
        world = World(root, model, TinyModel(model))
    draw, tally, seconds = random.Random(seed), Tally(), dict[str, float]()
    for number, kind in enumerate(cycle(CASES)):
        if tally.kills >= kills:
            gc.unfreeze()
            return tally
        if kind not in seconds:
            started = time.monotonic()
            ends_within(in_a_process(lambda k=kind: world.whole(k)), 600.0)
            seconds[kind] = time.monotonic() - started
        until_the_end(world, kind, f"{kind}-{number}", seconds[kind], draw, tally, kills)
    raise AssertionError


if __name__ == "__main__":
    print(json.dumps(vars(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))))
