"""Episodes to rows: one row per trainable turn.

Invariant: a row holds the token ids that the engine used and sampled, as recorded. Only when a
renderer is given (supervised training on logs of text) are missing ids made from text, and such a
row says so. Everything left out is counted under its reason. Messages are dropped while reading, so
memory grows with tokens and not with the square of the chat's length.
"""

from __future__ import annotations

import gc
import json
from array import array
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from marft_agents.credit import dependency_order, is_action, place_rewards
from marft_agents.errors import LogError
from marft_agents.schema import Episode, Turn
from marft_agents.training.textlogs import CannotRender, TextRenderer
from marft_agents.training.transcript import Line, transcript_lines

_NO_LOGPROBS = "no log-probabilities were recorded"
_FROM_TEXT = "its token ids were made from text"
LIMITED = "sampled with top-p, top-k, min-p, penalties, a grammar, a search or barred tokens"


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


@dataclass
class TrainingSet:
    """Rows, the episodes they belong to, and what was left out."""

    episodes: list[EpisodeView] = field(default_factory=list[EpisodeView])
    rows: list[TurnRow] = field(default_factory=list[TurnRow])
    agents: dict[str, int] = field(default_factory=dict[str, int])
    """Recorded agent to its number of calls, all episodes counted."""
    episodes_read: int = 0
    left_out_episodes: Counter[str] = field(default_factory=Counter[str])
    left_out_turns: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """(agent, reason) to turns of usable episodes."""
    notes: Counter[str] = field(default_factory=Counter[str])


def read_training_set(episodes: Iterable[Episode], text: TextRenderer | None = None) -> TrainingSet:
    """Rows of every usable episode, in the order given.

    With ``text``, for supervised training alone, turns without ids get them from their text, and
    turns without log-probabilities are rows too (their ``logprobs`` are empty).
    """
    data = TrainingSet()
    with _uncollected():
        for episode in episodes:
            data.episodes_read += 1
            for turn in episode.turns:
                data.agents[turn.agent] = data.agents.get(turn.agent, 0) + 1
            reason = episode.untrainable_reason or _add(data, episode, text)
            if reason is not None:
                data.left_out_episodes[reason.split(" (", 1)[0]] += 1
    return data


@contextmanager
def _uncollected() -> Generator[None]:
    """No search for cycles meanwhile: reading makes none, and what is kept would be searched again
    and again as it grows."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _add(data: TrainingSet, episode: Episode, text: TextRenderer | None) -> str | None:
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
    data.notes.update(f"reward left out, {reason}" for reason in placed.unplaced)
    if episode.ended is not None and episode.ended.dropped_events:
        data.notes["episode with events that the recorder could not write"] += 1
    view = EpisodeView(
        episode_id=episode.episode_id,
        task=None
        if episode.task is None
        else json.dumps(episode.task, sort_keys=True, default=str),
        agents_K=[t.agent for t in actions],
        turn_ids_K=[t.turn_id for t in actions],
        steps_K=[t.step for t in actions],
        team_reward_K=placed.team_K,
        own_reward_K=placed.own_K,
        depends_K=_dependencies(actions),
        truncated=episode.ended is not None and episode.ended.reason == "truncated",
        lines=transcript_lines(episode, order),
    )
    place = {id(t): k for k, t in enumerate(actions)}
    rows: dict[int, TurnRow] = {}
    for turn in episode.turns:
        k = place.get(id(turn))
        made = turn.untrainable_reason if k is None else _made(data, turn, k, text)
        if isinstance(made, TurnRow):
            rows[made.k] = made
        elif made is not None:
            data.left_out_turns[turn.agent, made] += 1
    data.episodes.append(view)
    data.rows += [rows[k] for k in sorted(rows)]
    return None


def _made(data: TrainingSet, turn: Turn, k: int, text: TextRenderer | None) -> TurnRow | str:
    """The row of an action of the next episode, or why there is none."""
    number = len(data.episodes)
    reason = turn.untrainable_reason
    if reason is None:
        data.notes.update(_unsaid(turn))
        return _row(turn, number, k)
    complete = turn.prompt_token_ids and turn.token_ids and turn.logprobs is not None
    if text is None or complete or turn.redacted:  # its text holds masks that nobody said
        return reason
    known = turn.prompt_token_ids or [0], turn.token_ids or [0]
    other = _with_ids(turn, *known).untrainable_reason
    if other is not None:
        return other
    try:
        rendered = text.render(turn)
    except CannotRender as error:
        return str(error)
    data.notes.update(rendered.odd)
    why = _FROM_TEXT if rendered.from_text else _NO_LOGPROBS
    row = _row(_with_ids(turn, rendered.prompt_ids, rendered.token_ids), number, k)
    return replace(
        row,
        logprobs=array("d"),
        incomparable=why,
        off_policy=why,
        from_text=rendered.from_text,
    )


def _unsaid(turn: Turn) -> Iterator[str]:
    """What the recorder could not learn of how the turn was sampled."""
    said = {"temperature": turn.sampling.temperature, "top-p": turn.sampling.top_p}
    if missing := " or ".join(name for name, value in said.items() if value is None):
        cure = "serve with `marft-agents serve`, or set it in the app"
        yield f"turns do not say their {missing}: taken as 1; {cure}"


def _with_ids(turn: Turn, prompt_ids: list[int], token_ids: list[int]) -> Turn:
    """The turn as if these ids had been recorded, to ask what else speaks against it."""
    ids = {"prompt_token_ids": prompt_ids, "token_ids": token_ids}
    return turn.model_copy(update={**ids, "logprobs": [0.0] * len(token_ids)})


def _row(turn: Turn, episode: int, k: int) -> TurnRow:
    asked = turn.sampling.temperature
    temperature = asked if asked is not None and asked > 1e-5 else 1.0
    truncated = turn.sampling.truncates_support
    return TurnRow(
        episode=episode,
        k=k,
        turn_id=turn.turn_id,
        agent=turn.agent,
        prompt_ids=array("q", turn.prompt_token_ids or ()),
        token_ids=array("q", turn.token_ids or ()),
        logprobs=array("d", turn.logprobs or ()),
        temperature=temperature,
        incomparable=_incomparable_reason(turn, temperature, truncated),
        compare_at=1.0 if turn.logprob_mode == "raw" else temperature,
        adapter=turn.adapter_start,
        off_policy=_off_policy_reason(turn, temperature, truncated),
        words=max(1, len((turn.text or "").split())),
    )


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
