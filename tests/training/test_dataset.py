"""Episodes to rows: recorded ids only, masks from lengths, everything left out is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from marft_agents.schema import Episode, EpisodeEnded, EpisodeStarted, RewardEvent, Sampling, Turn
from marft_agents.training.dataset import LIMITED, TurnRow, read_training_set
from marft_agents.training.packing import pack_turns

CASES = Path(__file__).parents[1] / "cases"


def turn(index: int = 0, agent: str = "writer", **fields: Any) -> Turn:
    standard: dict[str, Any] = {
        "prompt_token_ids": [1, 7, 2, 1],
        "token_ids": [5, 2],
        "logprobs": [-0.5, -0.1],
        "logprob_mode": "processed",
        "sampling": Sampling(temperature=1.0),
    }
    return Turn(
        episode_id="e", turn_id=f"t{index}", agent=agent, index=index, **(standard | fields)
    )


def episode(*turns: Turn, reward: Any = 1.0, end: str | None = "terminated") -> Episode:
    return Episode(
        episode_id="e",
        started=EpisodeStarted(episode_id="e", task="sort"),
        turns=list(turns),
        rewards=[] if reward is None else [RewardEvent(episode_id="e", value=reward)],
        ended=EpisodeEnded.model_validate({"episode_id": "e", "reason": end}) if end else None,
    )


def only_row(*turns: Turn) -> TurnRow:
    rows = read_training_set([episode(*turns)]).rows
    assert len(rows) == 1
    return rows[0]


def test_case_10_where_pad_is_the_end_token_the_genuine_end_is_trained() -> None:
    case = json.loads((CASES / "10-pad-is-eos.json").read_text())
    turns = [
        turn(
            n,
            token_ids=reply["ids"],
            logprobs=[-0.5] * len(reply["ids"]),
            finish_reason=reply["finish_reason"],
            prompt_token_ids=[1, 9690, 2, 1, 520 + n],
        )
        for n, reply in enumerate(case["completions"])
    ]
    rows = read_training_set([episode(*turns)]).rows
    trained = [t for pack in pack_turns(rows, 1000) for reply in pack.targets for t in reply]
    assert len(trained) == case["want_trained_tokens"]
    assert trained.count(case["eos_token_id"]) == case["want_end_tokens_trained"]
    seen = [token for pack in pack_turns(rows, 1000, share=False) for token in pack.ids]
    assert seen.count(case["eos_token_id"]) == len(turns), "turn closers in prompts stay attended"


def test_case_14_sampled_ids_are_used_as_they_are() -> None:
    case = json.loads((CASES / "14-drift.json").read_text())
    row = only_row(
        turn(text=case["text"], token_ids=case["sampled_ids"], logprobs=case["sampled_logprobs"])
    )
    assert list(row.token_ids) == case["sampled_ids"] != case["reencoded_ids"]
    assert list(row.logprobs) == case["sampled_logprobs"]
    stop = case["stop_string"]
    longer = only_row(
        turn(
            text=stop["content"],
            token_ids=stop["token_ids"],
            logprobs=[-0.1] * len(stop["token_ids"]),
        )
    )
    assert list(longer.token_ids) == stop["token_ids"], "ids may decode to more than the text"


def test_ids_and_logprobs_of_different_length_are_left_out() -> None:
    data = read_training_set([episode(turn(logprobs=[-0.5]), turn(1))])
    assert [row.turn_id for row in data.rows] == ["t1"]
    assert data.left_out_turns == {
        ("writer", "token ids and log-probabilities differ in length"): 1
    }


def test_case_3_null_content_beside_tool_calls() -> None:
    case = json.loads((CASES / "03-none-content.json").read_text())
    ids = case["server_prompt_token_ids"]
    recorded = turn(
        messages=case["messages"] + case["also"],
        text=None,
        tool_calls=case["messages"][1]["tool_calls"],
        prompt_token_ids=ids,
    )
    data = read_training_set([episode(recorded)])
    assert list(data.rows[0].prompt_ids) == ids
    said = "\n".join(line.text for line in data.episodes[0].lines)
    assert "None" not in said and '"name": "f"' in said


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (episode(turn(), reward=None), "no reward"),
        (episode(turn(), reward=float("nan")), "refused reward"),
        (episode(turn(), end=None), "the episode never ended"),
        (episode(turn(), end="failed", reward=None), "no reward, the episode failed"),
        (episode(), "no model call was recorded"),
        (episode(turn(kind="select")), "no answered action"),
        (
            episode(turn(depends_on=["t1"]), turn(1, depends_on=["t0"])),
            "turns depend on each other in a circle",
        ),
    ],
)
def test_every_episode_left_out_has_a_reason(case: Episode, reason: str) -> None:
    data = read_training_set([case])
    assert data.rows == [] and data.episodes == []
    assert data.left_out_episodes == {reason: 1}
    assert data.episodes_read == 1


def test_a_reward_for_nobody_leaves_the_episode_out_rather_than_at_zero() -> None:
    ghost = episode(turn(), reward=None)
    ghost.rewards.append(RewardEvent(episode_id="e", value=1.0, agent="ghost"))
    data = read_training_set([ghost])
    assert data.left_out_episodes == {"its only reward belongs to nobody": 1}
    ghost.rewards.append(RewardEvent(episode_id="e", value=1.0))
    data = read_training_set([ghost])
    assert len(data.rows) == 1 and "'ghost' did not act" in next(iter(data.notes))


def test_turns_that_cannot_be_trained_stay_in_the_recursion() -> None:
    data = read_training_set(
        [
            episode(
                turn(0, "judge", token_ids=None, logprobs=None),
                turn(1, kind="select"),
                turn(2),
                turn(3, cached=True),
            )
        ]
    )
    view = data.episodes[0]
    assert view.turn_ids_K == ["t0", "t2", "t3"]
    assert view.reward_K == [0, 0, 1]
    assert [(row.turn_id, row.k) for row in data.rows] == [("t2", 1)]
    assert data.left_out_turns["judge", "no sampled token ids"] == 1


@pytest.mark.parametrize(
    ("fields", "compare_at", "reason"),
    [
        ({}, 1.0, None),
        ({"sampling": Sampling(temperature=0.5)}, 0.5, None),
        ({"sampling": Sampling(temperature=0.0)}, 1.0, None),
        ({"sampling": Sampling(temperature=0.5), "logprob_mode": "raw"}, 1.0, None),
        ({"sampling": Sampling(temperature=0.5, top_p=0.9), "logprob_mode": "raw"}, 1.0, None),
        ({"sampling": Sampling(top_p=0.9)}, 1.0, LIMITED),
        (
            {"sampling": Sampling(temperature=0.5), "logprob_mode": None},
            0.5,
            "log-probability mode not recorded and temperature not 1",
        ),
        ({"logprob_mode": None}, 1.0, None),
    ],
)
def test_where_recorded_logprobs_can_be_compared(
    fields: dict[str, Any], compare_at: float, reason: str | None
) -> None:
    row = only_row(turn(**fields))
    assert (row.compare_at, row.incomparable) == (compare_at, reason)


@pytest.mark.parametrize(
    ("sampling", "missing"),
    [
        (Sampling(), "temperature or top-p"),
        (Sampling(temperature=0.5), "top-p"),
        (Sampling(top_p=1.0), "temperature"),
        (Sampling(temperature=1.0, top_p=1.0), None),
    ],
)
def test_settings_that_a_turn_does_not_say_are_counted_with_the_cure(
    sampling: Sampling, missing: str | None
) -> None:
    turns = [turn(i, sampling=sampling) for i in range(3)]
    (note,) = read_training_set([episode(*turns)]).notes.items() or [(None, 3)]
    assert note[1] == 3
    said = f"turns do not say their {missing}: taken as 1; serve with `marft-agents serve`"
    assert note[0] is None if missing is None else str(note[0]).startswith(said)


def test_greedy_and_unknown_temperatures_are_scored_at_one() -> None:
    assert only_row(turn(sampling=Sampling(temperature=0.0))).temperature == 1
    assert only_row(turn(sampling=Sampling())).temperature == 1
    assert only_row(turn(sampling=Sampling(temperature=0.7))).temperature == 0.7


def test_only_a_truncated_end_is_bootstrapped() -> None:
    ends = [read_training_set([episode(turn(), end=e)]) for e in ("terminated", "truncated")]
    assert [data.episodes[0].truncated for data in ends] == [False, True]
