"""What training makes of a log: a view of each usable episode, and a row of each trainable turn.

Invariant: both are plain values, and what is packed of one unpacks to an equal one, bit for bit.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct

from pydantic_core import PydanticSerializationError, to_json

from marft_agents.training.transcript import Line


@dataclass(frozen=True)
class EpisodeView:
    """What credit and critic need of one usable episode; lists are (K,) over its actions."""

    episode_id: str
    task: str | None
    """The task in one canonical form; episodes of one task can be compared with each other."""
    agents_K: list[str]
    turn_ids_K: list[str]
    steps_K: list[int]
    team_reward_K: list[float]
    own_reward_K: list[float]
    """Rewards of one agent or one turn."""
    depends_K: list[list[int]]
    """Earlier actions of the episode whose output was in the prompt of action k."""
    truncated: bool
    lines: list[Line]

    @property
    def reward_K(self) -> list[float]:
        """r_k: the team's part and the agents' own."""
        return [t + o for t, o in zip(self.team_reward_K, self.own_reward_K, strict=True)]

    @property
    def total_reward(self) -> float:
        return sum(self.reward_K)


@dataclass(frozen=True)
class TurnRow:
    """One trainable turn: prompt ids (P,), sampled ids (L,), behaviour log-probabilities (L,)."""

    episode: int
    """Index into the data set's episodes."""
    k: int
    """Index among the episode's actions."""
    turn_id: str
    agent: str
    prompt_ids: array[int]
    token_ids: array[int]
    logprobs: array[float]
    temperature: float
    """Temperature to score under: as recorded; 1 for greedy calls and where none is known."""
    incomparable: str | None
    """Why the recorded log-probabilities cannot be checked against a model's, if they cannot."""
    compare_at: float
    """Temperature at which they can be compared."""
    adapter: str | None
    """Adapter version that answered, e.g. ``router@v3``."""
    off_policy: str | None = None
    """Why the recorded log-probabilities are not the behaviour policy's of a softmax sampler; such
    a turn has no ratio."""
    words: int = 1
    """Words of the reply, at least one."""
    from_text: bool = False
    """Whether the ids were made from text, because none were recorded."""

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)


def pack_episode(view: EpisodeView) -> bytes:
    plain = {
        **view.__dict__,
        "lines": [(line.speaker, line.text, line.action) for line in view.lines],
    }
    fields = list(plain.values())
    try:
        return to_json(fields)
    except PydanticSerializationError:  # half a surrogate pair
        return json.dumps(fields).encode()


def unpack_episode(data: bytes) -> EpisodeView:
    *fields, lines = json.loads(data)
    return EpisodeView(*fields, lines=[Line(*line) for line in lines])


_Names = tuple[str, str | None, str | None, str | None]


class RowForm:
    """Rows of one log as bytes: ids are int32 there, log-probabilities float64."""

    _HEAD = Struct("=q2d6i?")

    def __init__(self) -> None:
        self._names: list[_Names] = []
        """Names that many rows share, each combination once."""
        self._number: dict[_Names, int] = {}

    def pack(
        self,
        episode: int,
        k: int,
        turn_id: str,
        agent: str,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        temperature: float,
        incomparable: str | None,
        compare_at: float,
        adapter: str | None,
        off_policy: str | None,
        words: int,
        from_text: bool,
    ) -> bytes:
        """A row with these fields; ids must be below 2**31."""
        names = agent, incomparable, adapter, off_policy
        number = self._number.get(names)
        if number is None:
            number = self._number[names] = len(self._names)
            self._names.append(names)
        prompt, sampled, scores = len(prompt_ids), len(token_ids), len(logprobs)
        head = self._HEAD.pack(
            episode, temperature, compare_at, k, words, prompt, sampled, scores, number, from_text
        )
        body = _form(prompt + sampled, scores).pack(*prompt_ids, *token_ids, *logprobs)
        return head + body + turn_id.encode()

    def unpack(self, data: bytes) -> TurnRow:
        head = self._HEAD.unpack_from(data)
        episode, temperature, compare_at, k, words, prompt, sampled, scores, number, from_text = (
            head
        )
        agent, incomparable, adapter, off_policy = self._names[number]
        start = self._HEAD.size
        middle = start + 4 * prompt
        end = middle + 4 * sampled
        last = end + 8 * scores
        return TurnRow(
            episode,
            k,
            data[last:].decode(),
            agent,
            array("i", data[start:middle]),
            array("i", data[middle:end]),
            array("d", data[end:last]),
            temperature,
            incomparable,
            compare_at,
            adapter,
            off_policy,
            words,
            from_text,
        )


@lru_cache(4096)
def _form(ids: int, scores: int) -> Struct:
    return Struct(f"={ids}i{scores}d")
