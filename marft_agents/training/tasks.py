"""The tasks that online training draws from.

Invariant: a task list that exists is usable: every line was read, every id is unique, every weight
is positive and finite. A draw depends on the list, the seed, the iteration and the round alone, so
a resumed run draws what an uninterrupted one would have drawn.

A line of the file is the task itself (a text or an object), or an object with the key ``task`` and,
if wanted, ``id``, ``weight`` (1 by default) and ``metadata``.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from marft_agents.errors import ConfigError

_FIELDS = ("task", "id", "weight", "metadata")


@dataclass(frozen=True)
class Task:
    """One thing to do; ``task`` is what the user's ``run`` gets."""

    id: str
    task: Any
    weight: float = 1.0
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


def read_tasks(path: str | Path) -> list[Task]:
    """The tasks of a JSONL file, in its order; empty lines are skipped.

    Raises:
        ConfigError: for the first mistake, with its line.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the tasks {path}: {error.strerror}") from error
    tasks: list[Task] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        task = _task(_parsed(line, where), number, where)
        if task.id in lines:
            raise ConfigError(
                f"{where}: the id {task.id!r} is also that of line {lines[task.id]}; give every"
                " task an id of its own, and a task that is to come more often a larger weight"
            )
        lines[task.id] = number
        tasks.append(task)
    if not tasks:
        raise ConfigError(f"{path} holds no task; write one JSON value a line")
    return tasks


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        why = str(error).split(":")[0]
        raise ConfigError(
            f"{where}: not JSON ({why}); write one task a line, as a JSON text or object"
        ) from error


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def _task(value: Any, number: int, where: str) -> Task:
    if isinstance(value, str) and value.strip():
        return Task(f"line-{number}", value)
    if not isinstance(value, dict) or not value:
        raise ConfigError(
            f"{where}: {_shown(value)} is no task; a line is a text, or an object such as"
            ' {"task": ..., "weight": 2}'
        )
    fields = cast("dict[str, Any]", value)
    if "task" not in fields:
        return Task(f"line-{number}", fields)
    unknown = next((name for name in fields if name not in _FIELDS), None)
    if unknown is not None:
        near = get_close_matches(unknown, _FIELDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{where}: {unknown!r} beside 'task'{hint} (known: {', '.join(_FIELDS)}); put"
            " what `run` needs under 'task', and what is to be logged only under 'metadata'"
        )
    if fields["task"] in (None, {}, []) or not str(fields["task"]).strip():
        raise ConfigError(f"{where}: 'task' is empty")
    return Task(
        id=_id(fields.get("id"), number, where),
        task=fields["task"],
        weight=_weight(fields.get("weight", 1), where),
        metadata=_metadata(fields.get("metadata", {}), where),
    )


def _id(value: Any, number: int, where: str) -> str:
    if value is None:
        return f"line-{number}"
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise ConfigError(f"{where}: 'id' is {_shown(value)}; it must be a text or a whole number")
    return str(value)


def _weight(value: Any, where: str) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= sys.float_info.max:
        raise ConfigError(f"{where}: 'weight' is {_shown(value)}; it must be a number above 0")
    return float(value)


def _metadata(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: 'metadata' is {_shown(value)}; it must be an object")
    return cast("dict[str, Any]", value)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


class TaskMixer:
    """Draws tasks by weight, without putting one back before all were drawn."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        if not tasks:
            raise ConfigError("no tasks were given")
        self.tasks = list(tasks)
        self.seed = seed

    @property
    def fingerprint(self) -> str:
        """Of everything that decides what is drawn."""
        facts = [[t.id, t.weight, json.dumps(t.task, sort_keys=True)] for t in self.tasks]
        return hashlib.sha256(json.dumps([self.seed, facts]).encode()).hexdigest()[:16]

    def draw(
        self, iteration: int, round: int, count: int, *, last: Collection[str] = ()
    ) -> list[Task]:
        """``count`` tasks; those whose ids are in ``last`` come after all others were drawn."""
        rng = random.Random(f"{self.seed}/{iteration}/{round}")
        drawn: list[Task] = []
        while len(drawn) < count:
            order = list(self._shuffled(rng))
            order.sort(key=lambda task: not drawn and task.id in last)  # stable
            drawn += order[: count - len(drawn)]
        return drawn

    def _shuffled(self, rng: random.Random) -> Iterator[Task]:
        """All tasks; the next one is always a draw by weight among those that are left.

        Each task rings after an exponential time of rate ``weight`` (arXiv 1012.0256).
        """
        rings = {task.id: -math.log(1.0 - rng.random()) / task.weight for task in self.tasks}
        yield from sorted(self.tasks, key=lambda task: rings[task.id])
