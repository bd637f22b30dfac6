"""Running the user's app on tasks, several at a time.

Invariant: a run that raises or takes too long is data, counted with its first message; what it
recorded stays in the log. A number that a run returns is the team's reward in each of its episodes
that has none; a run that returns something else, or nothing, gave no reward, never one of 0.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from marft_agents.errors import RewardError, TrainingError
from marft_agents.schema import Episode, RewardEvent
from marft_agents.training.app import GRACE_S, GRACE_TIMES, Failure, Run, call_app, load_run
from marft_agents.training.tasks import Task

__all__ = ["Attempt", "Collected", "Outcome", "Recorder", "collect", "give_returned", "load_run"]

_T = TypeVar("_T")
Say = Callable[[str], None]
SOURCE = "run"


class Recorder(Protocol):
    """What is needed of the recorder that the app records with."""

    def defaults(
        self, *, task: Any = None, metadata: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[Sequence[str]]: ...

    def reward(
        self,
        episode_id: str,
        value: float | None,
        *,
        agent: str | None = None,
        turn_id: str | None = None,
        source: str = "app",
    ) -> None: ...

    def flush(self, timeout: float | None = 10.0) -> bool: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Attempt:
    """One run of one task."""

    id: str
    task: Task

    @property
    def metadata(self) -> dict[str, Any]:
        """What its episodes are logged with."""
        return {**self.task.metadata, "marft_task": self.task.id, "marft_attempt": self.id}


@dataclass(frozen=True)
class Outcome:
    """What became of an attempt."""

    attempt: Attempt
    episode_ids: Sequence[str]
    """Top-level episodes that it recorded."""
    returned: object = None
    failure: Failure | None = None


@dataclass
class Collected:
    """The attempts of one round, and what their returned values were worth."""

    outcomes: list[Outcome]
    seconds: float
    refused: list[str] = field(default_factory=list[str])
    """Returned numbers that are no reward, each with its task."""
    no_number: Counter[str] = field(default_factory=Counter[str])
    """Types that runs returned whose episodes then had no reward."""

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.failure is not None]

    @property
    def without_episode(self) -> list[Outcome]:
        """Runs that ended well and recorded nothing."""
        return [o for o in self.outcomes if o.failure is None and not o.episode_ids]

    def require_episodes(self, *, elsewhere: bool = False) -> None:
        """Stop where no further run can be of use either.

        ``elsewhere``: the log holds episodes that began outside of any run's context.

        Raises:
            TrainingError: every run failed, or none recorded an episode.
        """
        failed = self.failed
        if self.outcomes and len(failed) == len(self.outcomes):
            raise TrainingError(f"all {len(failed)} runs failed: {'; '.join(failures(failed))}")
        if not elsewhere and self.outcomes and not any(o.episode_ids for o in self.outcomes):
            raise TrainingError(
                f"{len(self.without_episode)} runs ended without recording an episode: wrap the"
                " team inside run with the recorder it was given (each iteration has its own):"
                " `team = recorder.wrap(team)`" + "".join(f"; {line}" for line in failures(failed))
            )


def failures(outcomes: Iterable[Outcome]) -> list[str]:
    """One line per kind: how often, and the first message with its task."""
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        if outcome.failure is not None:
            counts[outcome.failure.kind] += 1
            where = f"first, task {outcome.attempt.task.id!r}: {outcome.failure.message}"
            first.setdefault(outcome.failure.kind, where)
    return [f"{count} {kind} ({first[kind]})" for kind, count in counts.most_common()]


def collect(
    run: Run,
    attempts: Sequence[Attempt],
    recorder: Recorder,
    *,
    at_once: int,
    timeout: float,
    say: Say = print,
    runner: asyncio.Runner | None = None,
) -> Collected:
    """Run the app on every attempt, ``at_once`` at a time, each for ``timeout`` seconds at most.

    ``runner`` keeps one event loop over several calls, so that the app may keep its clients. When
    interrupted, running attempts are told to stop first, so that their episodes end.
    """
    started = time.monotonic()
    if runner is None:
        with asyncio.Runner() as own:
            outcomes = _finish(own, _all(run, attempts, recorder, at_once, timeout, say))
    else:
        outcomes = _finish(runner, _all(run, attempts, recorder, at_once, timeout, say))
    return Collected(outcomes, time.monotonic() - started)


def _finish(runner: asyncio.Runner, work: Coroutine[Any, Any, _T]) -> _T:
    try:
        return runner.run(work)
    except BaseException:
        loop = runner.get_loop()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=GRACE_S * (GRACE_TIMES + 1)))
        raise


async def _all(
    run: Run,
    attempts: Sequence[Attempt],
    recorder: Recorder,
    at_once: int,
    timeout: float,
    say: Say,
) -> list[Outcome]:
    gate = asyncio.Semaphore(at_once)
    steps = {len(attempts) * quarter // 4 for quarter in (1, 2, 3)} if len(attempts) >= 8 else set()
    done = failed = 0

    async def one(attempt: Attempt) -> Outcome:
        nonlocal done, failed
        async with gate:
            with recorder.defaults(task=attempt.task.task, metadata=attempt.metadata) as ids:
                task = copy.deepcopy(attempt.task.task)  # runs may change theirs
                returned, failure = await call_app(run, task, recorder, timeout=timeout)
        done, failed = done + 1, failed + (failure is not None)
        if done in steps:
            say(f"  {done} of {len(attempts)} runs" + f", {failed} failed" * bool(failed))
        return Outcome(attempt, ids, returned, failure)

    return list(await asyncio.gather(*(one(attempt) for attempt in attempts)))


def give_returned(
    collected: Collected, episodes: Iterable[Episode], recorder: Recorder
) -> Iterator[Episode]:
    """The same episodes, with the number that their run returned where the team has no reward.

    It is logged too. A number that is not finite is logged as refused, and so is the episode then.
    """
    of_episode = {name: o for o in collected.outcomes for name in o.episode_ids}
    for episode in episodes:
        outcome = of_episode.get(episode.episode_id)
        if outcome is None or outcome.failure or _has_team_reward(episode):
            yield episode
            continue
        number = _number(outcome.returned)
        if number is None:
            if not episode.scored:
                collected.no_number[type(outcome.returned).__name__] += 1
            yield episode
            continue
        event = RewardEvent(episode_id=episode.episode_id, value=number, source=SOURCE)
        if event.refused is not None:
            collected.refused.append(f"task {outcome.attempt.task.id!r}: {event.refused}")
        with suppress(RewardError):  # a strict recorder's word about a refused one
            recorder.reward(episode.episode_id, number, source=SOURCE)
        yield episode.model_copy(update={"rewards": [*episode.rewards, event]})


def _has_team_reward(episode: Episode) -> bool:
    """Whether the app gave the team one, for the episode or for a turn; a refused one counts."""
    given = [r for r in episode.rewards if r.value is not None or r.refused is not None]
    return any(r.agent is None or r.refused is not None for r in given)


def _number(value: object) -> float | None:
    """A number, a bool or an array library's scalar as a float; ``None`` for anything else."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        value = item()
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
