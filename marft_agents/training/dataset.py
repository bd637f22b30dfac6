"""Episodes to rows: one row per trainable turn.

Invariant: a row holds the token ids that the engine used and sampled, as recorded. Only when a
renderer is given (supervised training on logs of text) are missing ids made from text, and such a
row says so. Everything left out is counted under its reason. Memory does not grow with the log: one
episode is held at a time, and what is made of it is on disk.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from marft_agents.credit import PlacedRewards, dependency_order, is_action, place_rewards
from marft_agents.errors import LogError
from marft_agents.schema import Episode, Turn
from marft_agents.training.rows import EpisodeView, RowForm, TurnRow, pack_episode, unpack_episode
from marft_agents.training.stored import Picked, Stored
from marft_agents.training.textlogs import CannotRender, Rendered, TextRenderer
from marft_agents.training.transcript import transcript_lines

_NO_LOGPROBS = "no log-probabilities were recorded"
_FROM_TEXT = "its token ids were made from text"
LIMITED = "sampled with top-p, top-k, min-p, penalties, a grammar, a search or barred tokens"
_UNSAID = {
    missing: f"turns do not say their {name}: taken as 1; serve with `marft-agents serve`, or set"
    " it in the app"
    for missing, name in {
        (True, True): "temperature or top-p",
        (True, False): "temperature",
        (False, True): "top-p",
    }.items()
}
"""Whether temperature and top-p are unknown, to what is said then."""


@dataclass
class TrainingSet:
    """Rows, the episodes they belong to, and what was left out."""

    episodes: Sequence[EpisodeView] = field(default_factory=list[EpisodeView])
    rows: Sequence[TurnRow] = field(default_factory=list[TurnRow])
    agents: dict[str, int] = field(default_factory=dict[str, int])
    """Recorded agent to its number of calls, all episodes counted."""
    episodes_read: int = 0
    left_out_episodes: Counter[str] = field(default_factory=Counter[str])
    left_out_turns: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """(agent, reason) to turns of usable episodes."""
    notes: Counter[str] = field(default_factory=Counter[str])

    def picked(self, by_adapter: Mapping[str, Sequence[int]]) -> Sequence[TurnRow]:
        """The rows of all adapters, by their indices; each is made when it is asked for."""
        return Picked(self.rows, [i for indices in by_adapter.values() for i in indices])


def read_training_set(episodes: Iterable[Episode], text: TextRenderer | None = None) -> TrainingSet:
    """Rows of every usable episode, in the order given.

    With ``text``, for supervised training alone, turns without ids get them from their text, and
    turns without log-probabilities are rows too (their ``logprobs`` are empty).

    Raises:
        LogError: the disk for temporary files is full.
    """
    reading = _Reading(text)
    with _seldom_collected():
        for episode in episodes:
            reading.see(episode)
    return reading.data


@contextmanager
def _seldom_collected() -> Generator[None]:
    """Fewer searches for cycles meanwhile: reading makes none, only what it calls may."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], 100_000) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Reading:
    """A data set under way."""

    def __init__(self, text: TextRenderer | None) -> None:
        self._form = RowForm()
        self._episodes, self._rows = Stored(unpack_episode), Stored(self._form.unpack)
        self.data = TrainingSet(self._episodes, self._rows)
        self._text = text

    def see(self, episode: Episode) -> None:
        """Take of an episode what can be used, and count the rest."""
        data = self.data
        data.episodes_read += 1
        for turn in episode.turns:
            data.agents[turn.agent] = data.agents.get(turn.agent, 0) + 1
        reason = episode.untrainable_reason or self._add(episode)
        if reason is not None:
            data.left_out_episodes[reason.split(" (", 1)[0]] += 1

    def _add(self, episode: Episode) -> str | None:
        """Add one scored episode; returns why it cannot be used after all."""
        try:
            order = dependency_order(episode.turns)
        except LogError as error:
            return str(error).split(":", 1)[0]
        placed = place_rewards(episode, order)
        actions = [t for t in order if is_action(t)]
        if not actions:
            return "no answered action"
        if placed.unplaced and not any(placed.reward_K) and episode.team_reward is None:
            return f"its only reward belongs to nobody ({placed.unplaced[0]})"
        for reason in placed.unplaced:
            self.data.notes[f"reward left out, {reason}"] += 1
        if episode.ended is not None and episode.ended.dropped_events:
            self.data.notes["episode with events that the recorder could not write"] += 1
        place = {id(t): k for k, t in enumerate(actions)}
        rows: dict[int, bytes] = {}
        for turn in episode.turns:
            k = place.get(id(turn))
            made = turn.untrainable_reason if k is None else self._made(turn, k)
            if isinstance(made, bytes):
                rows[k or 0] = made
            elif made is not None:
                self.data.left_out_turns[turn.agent, made] += 1
        self._episodes.append(pack_episode(_view(episode, order, actions, placed)))
        for k in sorted(rows):
            self._rows.append(rows[k])
        return None

    def _made(self, turn: Turn, k: int) -> bytes | str:
        """The row of an action of the next episode, or why there is none."""
        notes = self.data.notes
        reason = turn.untrainable_reason
        if reason is None:
            if (unsaid := _unsaid(turn)) is not None:
                notes[unsaid] += 1
            return self._row(turn, k)
        complete = turn.prompt_token_ids and turn.token_ids and turn.logprobs is not None
        if self._text is None or complete or turn.redacted:  # masks in it that nobody said
            return reason
        known = turn.prompt_token_ids or [0], turn.token_ids or [0]
        other = _with_ids(turn, *known).untrainable_reason
        if other is not None:
            return other
        try:
            rendered = self._text.render(turn)
        except CannotRender as error:
            return str(error)
        notes.update(rendered.odd)
        return self._row(turn, k, rendered)

    def _row(self, turn: Turn, k: int, rendered: Rendered | None = None) -> bytes:
        """The row of an action, as recorded or as it was rendered."""
        sampling = turn.sampling
        asked = sampling.temperature
        temperature = asked if asked is not None and asked > 1e-5 else 1.0
        if rendered is None:
            truncated = sampling.truncates_support
            incomparable = _incomparable_reason(turn, temperature, truncated)
            off_policy = _off_policy_reason(turn, temperature, truncated)
        else:
            incomparable = off_policy = _FROM_TEXT if rendered.from_text else _NO_LOGPROBS
        return self._form.pack(
            len(self._episodes),
            k,
            turn.turn_id,
            turn.agent,
            rendered.prompt_ids if rendered else turn.prompt_token_ids or (),
            rendered.token_ids if rendered else turn.token_ids or (),
            () if rendered else turn.logprobs or (),
            temperature,
            incomparable,
            1.0 if turn.logprob_mode == "raw" else temperature,
            turn.adapter_start,
            off_policy,
            max(1, len((turn.text or "").split())),
            rendered is not None and rendered.from_text,
        )


def _view(
    episode: Episode, order: Sequence[Turn], actions: Sequence[Turn], placed: PlacedRewards
) -> EpisodeView:
    task = episode.task
    return EpisodeView(
        episode_id=episode.episode_id,
        task=None if task is None else json.dumps(task, sort_keys=True, default=str),
        agents_K=[t.agent for t in actions],
        turn_ids_K=[t.turn_id for t in actions],
        steps_K=[t.step for t in actions],
        team_reward_K=placed.team_K,
        own_reward_K=placed.own_K,
        depends_K=_dependencies(actions),
        truncated=episode.ended is not None and episode.ended.reason == "truncated",
        lines=transcript_lines(episode, order),
    )


def _unsaid(turn: Turn) -> str | None:
    """What the recorder could not learn of how the turn was sampled."""
    sampling = turn.sampling
    return _UNSAID.get((sampling.temperature is None, sampling.top_p is None))


def _with_ids(turn: Turn, prompt_ids: list[int], token_ids: list[int]) -> Turn:
    """The turn as if these ids had been recorded, to ask what else speaks against it."""
    ids = {"prompt_token_ids": prompt_ids, "token_ids": token_ids}
    return turn.model_copy(update={**ids, "logprobs": [0.0] * len(token_ids)})


def _off_policy_reason(turn: Turn, temperature: float, truncated: bool) -> str | None:
    """Why no importance ratio can be formed: μ must be the log-probability it was sampled with."""
    if turn.sampling.temperature is not None and turn.sampling.temperature <= 1e-5:
        return "sampled greedily"
    if truncated:
        return LIMITED
    if turn.logprob_mode != "processed" and temperature != 1:
        return f"{turn.logprob_mode or 'unknown'} log-probabilities at a temperature that is not 1"
    return None


def _dependencies(actions: Sequence[Turn]) -> list[list[int]]:
    place = {turn.turn_id: k for k, turn in enumerate(actions)}
    return [
        sorted(place[d] for d in turn.depends_on if place.get(d, k) < k)
        for k, turn in enumerate(actions)
    ]


def _incomparable_reason(turn: Turn, temperature: float, truncated: bool) -> str | None:
    """Why recorded log-probabilities are not those of a tempered softmax over the vocabulary.

    Raw ones always are, before any truncation or penalty.
    """
    if turn.logprob_mode == "raw":
        return None
    if truncated:
        return LIMITED
    if turn.logprob_mode is None and temperature != 1:
        return "log-probability mode not recorded and temperature not 1"
    return None


def too_long(row: TurnRow, max_length: int) -> bool:
    """Whether a turn does not fit; it is then left out whole, never cut."""
    return row.length > max_length


def highest_token(row: TurnRow) -> int:
    """Largest token id in the row; ids start at 0."""
    return max(max(row.prompt_ids), max(row.token_ids))
