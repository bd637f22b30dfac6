"""Real failures of real users, from recorded events to the rows that are trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from marft_agents.log import LogReader, LogWriter
from marft_agents.schema import EpisodeEnded
from marft_agents.training.dataset import TrainingSet, read_training_set
from marft_agents.training.packing import pack_turns
from marft_agents.training.scoring import score_turns
from tests.log.events import CASES, at, case_event
from tests.training.synthetic import TinyModel
from tests.training.test_packing import Piece


def training_set(name: str, logs: Path) -> TrainingSet:
    """The rows of a case's records; every episode of it has ended."""
    records = [json.loads(line) for line in (CASES / name).read_text().splitlines()]
    with LogWriter(logs) as log:
        for number, record in enumerate(records):
            log.write(case_event(record, number))
        for episode in dict.fromkeys(record["episode"] for record in records):
            log.write(EpisodeEnded(episode_id=episode, time=at(len(records))))
    return read_training_set(LogReader(logs).episodes())


def test_case_04_one_sample_and_not_three(tmp_path: Path) -> None:
    """Case 04: one response id in three episodes, two of them from a cache, one after a swap."""
    data = training_set("04-cached-reply.jsonl", tmp_path)
    assert [data.episodes[row.episode].episode_id for row in data.rows] == ["e4"]
    assert data.left_out_turns == {("planner", "answered from a cache"): 2}
    assert [episode.total_reward for episode in data.episodes] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("share", [True, False])
def test_case_09_each_turn_keeps_its_own_prompt(share: bool, tiny: TinyModel) -> None:
    """Case 09: thinking left the history, so the second prompt is not the first turn plus more."""
    case = json.loads((CASES / "09-thinking.json").read_text())
    turns = [Piece(turn["prompt_token_ids"], turn["token_ids"]) for turn in case["turns"]]
    samples = case["want"]["samples"]
    assert [[*t.prompt_ids, *t.token_ids] for t in turns] == [s["input"] for s in samples]
    packs = pack_turns(turns, 1000, share=share)
    trained = [reply for pack in packs for reply in pack.targets]
    assert sum(map(len, trained)) == case["want"]["trained_tokens"]
    scored = score_turns(tiny.model, turns, [1.0, 1.0], pack_tokens=1000, share=share)
    for turn, logps in zip(turns, scored, strict=True):
        assert logps == pytest.approx(tiny.logprobs(turn.prompt_ids, turn.token_ids), abs=2e-4)


def test_case_32_only_what_the_policy_sampled_is_trained(tmp_path: Path) -> None:
    """Case 32: two human lines, one of them in an assistant role, and an edited reply."""
    data = training_set("32-human.jsonl", tmp_path)
    assert [list(row.token_ids) for row in data.rows] == [[4370, 5227, 2]]
    assert data.left_out_turns == {("writer", "edited by a human"): 1}
    (episode,) = LogReader(tmp_path).episodes()
    edited, last = episode.turns
    assert edited.token_ids == [20355, 1694, 2]
    assert (edited.text, edited.edited_text) == ("Short text", "Short clear text")
    assert last.messages[1]["content"] == "Short clear text"
    said = [(line.speaker, line.text) for line in data.episodes[0].lines]
    assert said == [
        ("human", "Make it shorter."),
        ("writer", "Short clear text"),
        ("human", "Fine, ship it."),
        ("writer", "Shipped"),
    ]


def test_case_38_a_call_that_spans_a_swap_is_dropped_and_the_reward_stays(tmp_path: Path) -> None:
    """Case 38: versions 3, 3, 3 to 4, 4 in one episode."""
    data = training_set("38-mixed-versions.jsonl", tmp_path)
    assert [(row.adapter, list(row.logprobs)) for row in data.rows] == [
        ("planner@v3", [-0.1, -0.2]),
        ("critic@v3", [-0.1, -0.2, -0.3]),
        ("planner@v4", [-0.1, -0.2]),
    ]
    assert data.left_out_turns == {("planner", "adapter version changed during the call"): 1}
    assert data.episodes[0].reward_K == [0, 0, 0, 1]
