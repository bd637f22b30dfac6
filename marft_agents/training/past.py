"""Earlier iterations' episodes that are still fresh enough to be learned from again.

Invariant: an episode is remembered by its place in the log, never by its content, so the state is
small and a resumed run replays what an uninterrupted one would have. Groups (the episodes of one
task in one iteration) are replayed whole, and no task twice in one iteration. What is too old for
the current adapters is forgotten: versions only grow.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from marft_agents.errors import LogError, TrainingError
from marft_agents.log import LogReader
from marft_agents.schema import Episode, parse_served_name
from marft_agents.training.dataset import TurnRow


@dataclass(frozen=True)
class PastGroup:
    """The usable episodes of one task in one iteration."""

    iteration: int
    task: str
    folder: str
    """Relative to the logs."""
    episodes: list[str]
    versions: dict[str, int]
    """Adapter to the oldest version that answered."""

    def age(self, current: Mapping[str, int]) -> int:
        """Versions that its oldest call is behind, of the adapters in ``current``."""
        behind = [current[a] - v for a, v in self.versions.items() if a in current]
        return max(behind, default=0)


def oldest_versions(rows: Iterable[TurnRow]) -> dict[str, int]:
    """Adapter to the oldest version among the rows; rows without a version say nothing."""
    out: dict[str, int] = {}
    for row in rows:
        named = parse_served_name(row.adapter or "")
        if named is not None:
            out[named[0]] = min(named[1], out.get(named[0], named[1]))
    return out


class PastEpisodes:
    """Remembers groups, and picks some of them."""

    def __init__(self, logs: Path, *, seed: int, max_staleness: int) -> None:
        self.logs = logs
        self.groups: list[PastGroup] = []
        self._seed = seed
        self._max_staleness = max_staleness

    def remember(self, group: PastGroup) -> None:
        if group.versions:
            self.groups.append(group)

    def pick(self, iteration: int, count: int, current: Mapping[str, int]) -> list[PastGroup]:
        """Groups with at least ``count`` episodes together, or all that there are."""
        self.groups = [g for g in self.groups if g.age(current) <= self._max_staleness]
        order = list(self.groups)
        random.Random(f"{self._seed}/{iteration}/past").shuffle(order)
        picked: dict[str, PastGroup] = {}
        for group in order:
            if sum(len(g.episodes) for g in picked.values()) >= count:
                break
            picked.setdefault(group.task, group)
        return list(picked.values())

    def read(self, groups: Iterable[PastGroup]) -> Iterator[tuple[PastGroup, Episode]]:
        """Their episodes; what is gone from the disk does not come, and is forgotten."""
        folders: dict[str, dict[str, PastGroup]] = {}
        for group in groups:
            folders.setdefault(group.folder, {}).update(dict.fromkeys(group.episodes, group))
        for folder, of_episode in folders.items():
            try:
                reader = LogReader(self.logs / folder)
            except LogError:
                self.groups = [g for g in self.groups if g.folder != folder]
                continue
            for episode in reader.episodes():
                if episode.episode_id in of_episode:
                    yield of_episode[episode.episode_id], episode

    def state(self) -> list[dict[str, Any]]:
        return [asdict(group) for group in self.groups]

    def load_state(self, state: Iterable[Mapping[str, Any]]) -> None:
        """
        Raises:
            TrainingError: this is no state of this class; nothing was loaded.
        """
        try:
            self.groups = [PastGroup(**group) for group in state]
        except TypeError as error:
            raise TrainingError(
                f"the saved list of earlier episodes cannot be read: {error}"
            ) from error
