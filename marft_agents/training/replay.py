"""The replay check: are the recorded log-probabilities this model's?

Invariant: before anything is trained, a sample of recorded turns is scored again under the adapter
version that answered them, at the temperature that their log-probabilities are of. A difference
that no rounding explains means the wrong base, adapter, tokenizer or temperature, and learning from
such a log would move the adapters away from what was observed; so the run is refused.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from marft_agents.errors import AdapterError, RegistryError, ReplayError
from marft_agents.registry import Registry
from marft_agents.schema import BaseModelInfo, parse_served_name
from marft_agents.training._trl import use_adapter
from marft_agents.training.dataset import TurnRow
from marft_agents.training.scoring import score_turns

_TEMPORARY = "replayed"


@dataclass(frozen=True)
class Replayed:
    """How far one agent's turns under one adapter version are from the model's scores."""

    agent: str
    version: str
    turns: int
    tokens: int
    mean_difference: float
    worst_difference: float


@dataclass(frozen=True)
class Replay:
    """What was checked, and how many turns could not be, by reason."""

    checked: list[Replayed]
    unchecked: Counter[str]


class Replayer:
    """Scores recorded turns under the adapter version that answered them.

    ``loaded`` says which versions the model's adapters hold right now: (adapter, version) to the
    adapter's name in the model.
    """

    def __init__(
        self,
        model: Any,
        base: BaseModelInfo,
        registry: Registry,
        loaded: Mapping[tuple[str, int | None], str],
        *,
        pack_tokens: int,
        share: bool,
    ) -> None:
        self._model, self._base, self._registry = model, base, registry
        self._pack_tokens, self._share = pack_tokens, share
        self._loaded = dict(loaded)

    def check(self, rows: Sequence[TurnRow], *, turns: int, tolerance: float, seed: int) -> Replay:
        """Replay up to ``turns`` turns per agent and version.

        Turns of a version that the registry does not have are compared with the base, which an
        untrained version equals.

        Raises:
            ReplayError: the mean difference of some agent and version is above ``tolerance``.
            AdapterError: a version that answered was trained for another base.
        """
        groups, unchecked = _groups(rows)
        draw = random.Random(seed)
        checked: list[Replayed] = []
        for (agent, version), members in sorted(groups.items()):
            drawn = members if len(members) <= turns else draw.sample(members, turns)
            sample = [rows[i] for i in drawn]
            try:
                with self._under(version):
                    result = self._compare(agent, version, sample)
                    if not result.mean_difference <= tolerance:
                        raise ReplayError(self._explain(result, sample, tolerance))
            except RegistryError:
                result = self._unknown(agent, version, sample, tolerance)
            checked.append(result)
        return Replay(checked, unchecked)

    @contextmanager
    def _under(self, version: str) -> Any:
        """The named version active inside the block; the base when no adapter answered."""
        if version == "the base model":
            with use_adapter(self._model, None):
                yield
            return
        name = parse_served_name(version)
        if name is None:
            raise RegistryError(f"{version!r} is no name of the form agent@v1")
        manifest = self._registry.manifest(*name)
        if manifest.base.fingerprint != self._base.fingerprint:
            raise AdapterError(
                f"turns were recorded under {version}, an adapter of the base {manifest.base.name}"
                f" ({manifest.base.fingerprint[:12]}), and --model is {self._base.name}"
                f" ({self._base.fingerprint[:12]}); give that base"
            )
        if name in self._loaded:
            with use_adapter(self._model, self._loaded[name]):
                yield
            return
        self._model.load_adapter(str(self._registry.path(*name)), _TEMPORARY)
        try:
            with use_adapter(self._model, _TEMPORARY):
                yield
        finally:
            self._model.delete_adapter(_TEMPORARY)

    def _unknown(
        self, agent: str, version: str, rows: Sequence[TurnRow], tolerance: float
    ) -> Replayed:
        """Turns of a version that nobody has here, against the base."""
        with use_adapter(self._model, None):
            result = self._compare(agent, f"{version} (not in the registry: the base)", rows)
        if result.mean_difference <= tolerance:
            return result
        raise ReplayError(
            f"agent {agent!r} was recorded under {version}, which {self._registry.root} does not"
            f" have, and the base {self._base.name} gives log-probabilities that differ by"
            f" {result.mean_difference:.3f} on average (limit {tolerance:g}). Give the --model that"
            " answered and the --output with that version, or train unchecked with"
            " --set replay_turns=0. Nothing was changed"
        )

    def _differences(
        self, rows: Sequence[TurnRow], temperature: float | None = None
    ) -> list[float]:
        at = [row.compare_at if temperature is None else temperature for row in rows]
        scored = score_turns(
            self._model, rows, at, pack_tokens=self._pack_tokens, share=self._share
        )
        return [
            abs(ours - theirs)
            for row, ours_L in zip(rows, scored, strict=True)
            for ours, theirs in zip(ours_L, row.logprobs, strict=True)
        ]

    def _compare(self, agent: str, version: str, rows: Sequence[TurnRow]) -> Replayed:
        differences = self._differences(rows)
        mean = math.fsum(differences) / len(differences)
        return Replayed(agent, version, len(rows), len(differences), mean, max(differences))

    def _explain(self, found: Replayed, rows: Sequence[TurnRow], tolerance: float) -> str:
        cause = self._cause(rows, tolerance)
        return (
            f"agent {found.agent!r}, recorded under {found.version}: the recorded log-probabilities"
            f" differ from this model's by {found.mean_difference:.3f} on average (limit"
            f" {tolerance:g}; {found.turns} turns, {found.tokens} tokens). {cause} Nothing was"
            " changed"
        )

    def _cause(self, rows: Sequence[TurnRow], tolerance: float) -> str:
        """The likely cause, tried out where it can be."""

        def close(differences: list[float]) -> bool:
            return math.fsum(differences) / len(differences) <= tolerance

        if any(row.compare_at != 1 for row in rows) and close(self._differences(rows, 1.0)):
            return (
                "They do match at temperature 1: the server reports log-probabilities before"
                " temperature; start it with --logprobs-mode processed_logprobs."
            )
        with use_adapter(self._model, None):
            if close(self._differences(rows)):
                return (
                    "They do match the base model without an adapter: the calls did not reach the"
                    " adapter that the log names."
                )
        return (
            "Likely causes: another base model (or quantisation) answered; the adapter was changed"
            " after publishing; the temperature or other sampling settings in effect were not"
            " recorded."
        )


def _groups(
    rows: Sequence[TurnRow],
) -> tuple[dict[tuple[str, str], list[int]], Counter[str]]:
    """Indices of rows that can be checked by agent and version, and why the others cannot."""
    groups: dict[tuple[str, str], list[int]] = {}
    unchecked = Counter[str]()
    for i, row in enumerate(rows):
        if row.incomparable is not None:
            unchecked[row.incomparable] += 1
        else:
            groups.setdefault((row.agent, row.adapter or "the base model"), []).append(i)
    return groups, unchecked


def replay_lines(replay: Replay, say: Callable[[str], None]) -> None:
    """Print the result; loudly when nothing could be checked."""
    for found in replay.checked:
        say(
            f"replay: {found.agent} under {found.version}: {found.turns} turns,"
            f" mean difference {found.mean_difference:.4f}, worst {found.worst_difference:.4f}"
        )
    for reason, count in replay.unchecked.most_common():
        say(f"replay: {count} turns not checked: {reason}")
    if not replay.checked:
        say(
            "WARNING: no turn could be replayed, so nobody has checked that these logs were"
            " recorded with this model"
        )
