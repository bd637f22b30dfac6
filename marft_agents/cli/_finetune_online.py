"""The online half of ``finetune``: the user's app, its tasks, and where it is recorded.

Invariant: the app, the tasks and the folder were checked when an ``OnlinePart`` exists, without
loading a training library.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from marft_agents.cli._finetune_server import Server, require_unpinned
from marft_agents.errors import ConfigError
from marft_agents.log import LogReader
from marft_agents.recording import MarftRecorder
from marft_agents.rewards import RewardFunction
from marft_agents.training.app import Run, load_run
from marft_agents.training.tasks import Task, read_tasks

if TYPE_CHECKING:
    from marft_agents.training import MarftConfig, Online, OnlineSource


@dataclass(frozen=True)
class OnlinePart:
    """What ``--online`` and ``--tasks`` name."""

    run: Run
    tasks: list[Task]
    logs: Path
    """Rounds are recorded in a subfolder of it."""


def read_online(app: str, tasks: Path, logs: Sequence[Path]) -> OnlinePart:
    """Load what the options name.

    Raises:
        ConfigError: the app, the tasks or the folder cannot be used.
        LogError: another path among the logs holds no events.
    """
    folder = next((path for path in logs if not path.is_file()), None)
    if folder is None:
        raise ConfigError(
            f"--online records into a folder, and LOGS names the file {logs[0]}; name its folder,"
            " or one to be made, beside it"
        )
    others = [path for path in logs if path != folder]
    if others:
        LogReader(*others)
    return OnlinePart(load_run(app), read_tasks(tasks), folder)


def make_online(
    part: OnlinePart,
    config: MarftConfig,
    server: Server,
    reward: RewardFunction | None,
    stack: ExitStack,
    output: Path,
    say: Callable[[str], None],
) -> Online:
    """What ``finetune`` needs to run the app; closed with ``stack``.

    Raises:
        ConfigError: the tasks and the settings do not fit, or an adapter is pinned or has a canary.
    """
    once = config.group_size == 1 and len(part.tasks) >= config.episodes_per_iteration
    if config.estimator == "group" and once:
        raise ConfigError(
            "estimator: group compares episodes of one task, and with group_size 1 no task of"
            f" {len(part.tasks)} is run twice in an iteration of {config.episodes_per_iteration};"
            " set group_size to 2 or more"
        )
    require_unpinned(output, config.agents)
    say(_amount(part, config))
    from marft_agents.training.online import OnlineSource

    source = OnlineSource(
        part.run,
        part.tasks,
        config,
        logs=part.logs,
        run_id=_run_id(),
        make_recorder=MarftRecorder,
        reward=reward,
        say=say,
    )

    return _online(stack.enter_context(source), server)


def _online(source: OnlineSource, server: Server) -> Online:
    """The source, and how its versions come into the server."""
    from marft_agents.training import Online

    ready: set[tuple[str, int]] = set()

    def prepare(versions: Mapping[str, int]) -> str | None:
        if source.ended:  # of the rounds so far, none goes on
            server.client.release(sorted(source.ended))
            source.ended.clear()
        prepared, told = server.prepare(versions)
        ready.update(versions.items() if prepared else ())
        return told

    def swap(adapter: str, version: int) -> None:
        server.swap(adapter, version, prepared=(adapter, version) in ready)

    return Online(source, swap, prepare)


def _amount(part: OnlinePart, config: MarftConfig) -> str:
    """How much the app will be run, and where that is recorded."""
    tasks = config.episodes_per_iteration // config.group_size
    again = ""
    if config.dynamic_sampling and config.group_size > 1:
        again = f" (those that earn the same each time are replaced, {config.max_resample} times)"
    return (
        f"online: {len(part.tasks)} tasks; {config.iterations} iterations of {tasks} tasks x"
        f" {config.group_size} episodes{again}, {config.at_once} at once, at most"
        f" {config.episode_timeout:g} s each; recorded in {part.logs / 'online'}"
    )


def _run_id() -> str:
    """A folder name that no other run has, in the order of time."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}-{secrets.token_hex(2)}"
