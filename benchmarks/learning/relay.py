"""The relay: a small computation that nobody can do alone.

A task is a start value and one digit per agent. Agents speak once each, in order. Agent m sees its
own digit x_m and what was said just before, nothing else, and says an operation and a value:

    v_m = v_{m-1} ± x_m  (mod 10)         + for the 1st and 3rd agent, - for the 2nd and 4th

The verdict comes after the last agent: 1 when the last value is v_n, otherwise 0. Nothing in an
agent's prompt says whether its sign is + or -: only the verdict does, and it is about the team.
An agent that errs can be put right by a later error, and a right one can be spoiled.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

MODULUS = 10
LARGEST_DIGIT = 4
"""Below a quarter of 10 either way, so that + and - never give the same value."""
NAMES = ("ann", "bob", "cy", "dee")
OPERATIONS = ("add", "sub")
TEAM_SIZES = {"duo": 2, "trio": 3, "quad": 4}


@dataclass(frozen=True)
class Task:
    """A start value and one digit per agent."""

    start: int
    digits: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES[: len(self.digits)]

    @property
    def text(self) -> str:
        """The whole task, as the log and the central critic see it."""
        parts = [f"{name} {digit}" for name, digit in zip(self.names, self.digits, strict=True)]
        return " ".join([f"start {self.start}", *parts])

    @property
    def values(self) -> list[int]:
        """v_1 … v_n."""
        out, value = list[int](), self.start
        for agent, digit in enumerate(self.digits):
            value = apply(right_operation(agent), value, digit)
            out.append(value)
        return out


def right_operation(agent: int) -> str:
    return OPERATIONS[agent % 2]


def apply(operation: str, value: int, digit: int) -> int:
    return (value + (digit if operation == "add" else -digit)) % MODULUS


def draw_task(draw: random.Random, agents: int) -> Task:
    digits = tuple(draw.randint(1, LARGEST_DIGIT) for _ in range(agents))
    return Task(draw.randrange(MODULUS), digits)


def messages(task: Task, agent: int, said: str) -> list[dict[str, str]]:
    """What agent ``agent`` is sent, given the words said just before it spoke."""
    before = task.names[agent - 1] if agent else "task"
    return [
        {"role": "system", "content": f"you are {task.names[agent]}"},
        {"role": "user", "content": f"{before} : {said} your digit {task.digits[agent]}"},
    ]


def opening(task: Task) -> str:
    """What the first agent reads in place of a colleague's words."""
    return f"start {task.start}"


def said_value(text: str) -> int | None:
    """The value in an agent's words, ``None`` unless they are one operation and one value."""
    words = text.split()
    if len(words) != 2 or words[0] not in OPERATIONS or not words[1].isdigit():
        return None
    return int(words[1])


def verdict(task: Task, said: Sequence[str]) -> float:
    """1.0 when the last agent said v_n, whatever was said on the way."""
    return float(said_value(said[-1]) == task.values[-1])
