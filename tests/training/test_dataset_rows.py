"""Rows on disk against the plain reading of the rules: same order, same numbers, same reasons."""

from __future__ import annotations

import os
import random
import tracemalloc
from array import array
from collections import Counter
from typing import Any

import pytest

from marft_agents.credit import dependency_order, is_action, place_rewards
from marft_agents.schema import Episode, EpisodeEnded, EpisodeStarted, RewardEvent, Sampling, Turn
from marft_agents.training import stored
from marft_agents.training.dataset import LIMITED, EpisodeView, TurnRow, read_training_set
from marft_agents.training.transcript import transcript_lines

ODD: list[dict[str, Any]] = [
    {},
    {},
    {},
    {"sampling": Sampling()},
    {"sampling": Sampling(temperature=0.7, top_p=0.9)},
    {"sampling": Sampling(temperature=0.7), "logprob_mode": "raw"},
    {"sampling": Sampling(temperature=0.0), "logprob_mode": None},
    {"kind": "select"},
    {"kind": "reflect"},
    {"error": "boom"},
    {"cached": True},
    {"complete": False},
    {"edited_text": "better"},
    {"prompt_token_ids": None},
    {"token_ids": [-1, 3]},
    {"token_ids": [2**31, 3]},
    {"token_ids": [2**31 - 1, 0]},
    {"logprobs": [float("nan"), -1.0]},
    {"logprobs": [-1e308, -1e308]},
    {"logprobs": [0.5, -1.0]},
    {"logprobs": [-0.1]},
    {"logprobs": None},
    {"adapter_end": "b@v2"},
    {"tool_calls": [{"function": {"name": "f", "arguments": "a lone \ud800 surrogate"}}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
]


def made_turn(draw: random.Random, n: int) -> Turn:
    fields = dict(draw.choice(ODD))
    size = draw.randrange(1, 4)
    standard: dict[str, Any] = {
        "agent": draw.choice(["a", "b", "ünï"]),
        "index": draw.randrange(6),
        "step": draw.randrange(3),
        "text": draw.choice(["", "one", "two words"]),
        "prompt_token_ids": [draw.randrange(2**31) for _ in range(draw.randrange(1, 5))],
        "token_ids": [draw.randrange(2**31) for _ in range(size)],
        "logprobs": [-draw.random() for _ in range(size)],
        "logprob_mode": "processed",
        "sampling": Sampling(temperature=1.0, top_p=1.0),
        "adapter_start": "b@v1",
        "adapter_end": "b@v1",
        "depends_on": [f"t{m}" for m in range(n) if draw.random() < 0.3],
    }
    return Turn(episode_id="e", turn_id=f"t{n}", **(standard | fields))


def made_episode(draw: random.Random, n: int) -> Episode:
    rewards = [
        RewardEvent(episode_id="e", value=draw.choice([1.0, 0.25, None]), agent=agent, turn_id=turn)
        for agent, turn in [(None, None), ("a", None), (None, "t1"), ("nobody", None)]
        if draw.random() < 0.5
    ]
    end = draw.choice(["terminated", "truncated", "failed", None])
    return Episode(
        episode_id=f"e{n}",
        started=EpisodeStarted(
            episode_id="e", task=draw.choice([None, "sort", {"b": 1, "a": [2]}])
        ),
        turns=[made_turn(draw, k) for k in range(draw.randrange(7))],
        rewards=rewards,
        ended=EpisodeEnded.model_validate({"episode_id": "e", "reason": end}) if end else None,
    )


def plain_row(turn: Turn, episode: int, k: int) -> TurnRow:
    """The rules, one after the other."""
    asked, limited = turn.sampling.temperature, turn.sampling.truncates_support
    temperature = 1.0 if asked is None or asked <= 1e-5 else asked
    raw, mode = turn.logprob_mode == "raw", turn.logprob_mode
    off_policy = incomparable = LIMITED if limited else None
    if mode is None and temperature != 1:
        incomparable = incomparable or "log-probability mode not recorded and temperature not 1"
    if mode != "processed" and temperature != 1:
        kind = mode or "unknown"
        off_policy = off_policy or f"{kind} log-probabilities at a temperature that is not 1"
    if asked is not None and asked <= 1e-5:
        off_policy = "sampled greedily"
    return TurnRow(
        episode=episode,
        k=k,
        turn_id=turn.turn_id,
        agent=turn.agent,
        prompt_ids=array("i", turn.prompt_token_ids or ()),
        token_ids=array("i", turn.token_ids or ()),
        logprobs=array("d", turn.logprobs or ()),
        temperature=temperature,
        incomparable=None if raw else incomparable,
        compare_at=1.0 if raw else temperature,
        adapter=turn.adapter_start,
        off_policy=off_policy,
        words=max(1, len((turn.text or "").split())),
    )


def plain_view(episode: Episode, order: list[Turn]) -> EpisodeView:
    actions, placed = [t for t in order if is_action(t)], place_rewards(episode, order)
    place = {t.turn_id: k for k, t in enumerate(actions)}
    task = {None: None, "sort": '"sort"'}
    return EpisodeView(
        episode.episode_id,
        task[episode.task] if not isinstance(episode.task, dict) else '{"a": [2], "b": 1}',
        [t.agent for t in actions],
        [t.turn_id for t in actions],
        [t.step for t in actions],
        placed.team_K,
        placed.own_K,
        [
            sorted(place[d] for d in t.depends_on if d in place and place[d] < k)
            for k, t in enumerate(actions)
        ],
        episode.ended is not None and episode.ended.reason == "truncated",
        transcript_lines(episode, order),
    )


@pytest.mark.parametrize("held", [1, 2**20], ids=["on-disk", "in-memory"])
def test_rows_and_episodes_are_those_of_a_plain_reading(
    held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "_HELD", held)
    draw = random.Random(0)
    episodes = [made_episode(draw, n) for n in range(600)]
    data = read_training_set(iter(episodes))
    views: list[EpisodeView] = []
    rows: list[TurnRow] = []
    left_out = Counter[tuple[str, str]]()
    for episode in episodes:
        if episode.untrainable_reason is not None or len(views) == len(data.episodes):
            continue
        if data.episodes[len(views)].episode_id != episode.episode_id:
            continue
        order = dependency_order(episode.turns)
        actions = [id(t) for t in order if is_action(t)]
        for turn in order:
            if turn.trainable:
                rows.append(plain_row(turn, len(views), actions.index(id(turn))))
        for turn in episode.turns:
            if turn.untrainable_reason is not None:
                left_out[turn.agent, turn.untrainable_reason] += 1
        views.append(plain_view(episode, order))
    assert len(rows) > 300 and len(views) > 150 and len(left_out) > 20
    assert data.rows == rows and data.episodes == views
    assert list(data.rows) == rows and list(data.episodes) == views
    assert data.left_out_turns == left_out
    assert [repr(row) for row in data.rows] == [repr(row) for row in rows], "types as well"
    assert data.episodes_read == 600 == len(views) + data.left_out_episodes.total()


def large_episode(n: int) -> Episode:
    draw = random.Random(n)
    turns = [made_turn(draw, k).model_copy(update=ODD[0]) for k in range(4)]
    long = {"prompt_token_ids": [7] * 2000, "token_ids": [7] * 500, "logprobs": [-0.5] * 500}
    return Episode(
        episode_id=f"e{n}",
        started=EpisodeStarted(episode_id="e", task="sort"),
        turns=[
            t.model_copy(update=long | {"turn_id": f"{n}.{k}", "depends_on": []})
            for k, t in enumerate(turns)
        ],
        rewards=[RewardEvent(episode_id="e", value=1.0)],
        ended=EpisodeEnded(episode_id="e"),
    )


def test_memory_does_not_grow_with_the_log_and_the_files_go_with_the_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stored, "_HELD", 2**14)

    def peak(episodes: int) -> int:
        tracemalloc.start()
        data = read_training_set(large_episode(n) for n in range(episodes))
        assert sum(row.length for row in data.rows) >= 1500 * len(data.rows)
        assert len(data.episodes) == episodes
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    opened = len(os.listdir("/proc/self/fd"))
    few, many = peak(20), peak(120)
    assert many - few < 100 * 4 * 40, "a row has some 14,000 bytes"
    assert len(os.listdir("/proc/self/fd")) == opened
