"""The processes of one run, and what only the first of them does.

Invariant: whatever the first process does alone ends in every process with the same value, or with
the same error: nobody waits for one that has given up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed

from marft_agents.errors import MarftError, MissingExtraError, TrainingError
from marft_agents.training.config import MarftConfig

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process among all of them."""

    rank: int
    world: int

    @classmethod
    def of(cls, config: MarftConfig) -> Processes:
        return cls(config.process_index, config.world_size)

    @property
    def is_main(self) -> bool:
        """Whether this process speaks and writes."""
        return self.rank == 0

    def from_main(self, value: Any) -> Any:
        """The main process's value, in every process."""
        if self.world == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def on_main(self, work: Callable[[], T]) -> T:
        """What work gives that the main process does alone, or raises, in every process."""
        if self.world == 1:
            return work()
        value: Any = None
        error: Exception | None = None
        if self.is_main:
            try:
                value = work()
            except Exception as raised:
                error = raised
        value, failure = self.from_main((value, None if error is None else _told(error)))
        if error is not None:
            raise error
        if failure is not None:
            kind, text = failure
            raise kind(text)
        return value

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in every process."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(values, value)
        return values


def _told(error: Exception) -> tuple[type[Exception], str]:
    """An error as another process can raise it."""
    ours = isinstance(error, MarftError) and not isinstance(error, MissingExtraError)
    return (type(error) if ours else TrainingError), str(error)
