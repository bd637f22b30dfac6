"""Real failures of real users, from recorded events to what TRL's trainers are given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from marft_agents.schema import Turn
from marft_agents.training.dataset import TrainingSet, read_training_set
from marft_agents.training.examples import IGNORED, Example, sft_examples
from marft_agents.training.preferences import method_rows
from marft_agents.training.textlogs import renderer
from tests.training.test_cases import training_set
from tests.training.test_dataset import CASES, episode, turn


def case(name: str) -> Any:
    return json.loads((CASES / name).read_text(encoding="utf-8"))


def sampled(index: int, ids: list[int], prompt: list[int], **fields: Any) -> Turn:
    logprobs = [-0.5] * len(ids)
    return turn(index, token_ids=ids, prompt_token_ids=prompt, logprobs=logprobs, **fields)


def examples(data: TrainingSet) -> list[Example]:
    return sft_examples(method_rows(data, range(len(data.rows))))


def trained(example: Example) -> list[int]:
    return [token for token in example["labels"] if token != IGNORED]


def test_case_09_two_samples_of_eight_trained_tokens_each_with_its_own_prompt() -> None:
    """Case 09: turn 2's prompt is not turn 1 plus more, so the turns are never glued."""
    data = case("09-thinking.json")
    turns = [sampled(n, t["token_ids"], t["prompt_token_ids"]) for n, t in enumerate(data["turns"])]
    made = examples(read_training_set([episode(*turns)]))
    want = data["want"]["samples"]
    assert [example["input_ids"] for example in made] == [sample["input"] for sample in want]
    masks = [[int(label != IGNORED) for label in example["labels"]] for example in made]
    assert masks == [sample["trained"] for sample in want]
    assert sum(map(sum, masks)) == data["want"]["trained_tokens"] == 8


def test_case_10_padding_with_the_end_token_hides_no_end_token() -> None:
    """Case 10: pad and end token share id 2; 11 tokens are trained, 3 of them end tokens."""
    data = case("10-pad-is-eos.json")
    prompt = [1, 9690, data["eos_token_id"], 1]
    ids = [reply["ids"] for reply in data["completions"]]
    turns = [sampled(n, reply, [*prompt, 500 + n]) for n, reply in enumerate(ids)]
    rows = read_training_set([episode(*turns)])
    pad = data["pad_token_id"]
    batch = DataCollatorForLanguageModeling(pad_token_id=pad)(examples(rows))
    labels = batch["labels"][:, len(prompt) + 1 :]
    assert (labels != IGNORED).int().tolist() == data["want_mask_padded_to_4"]
    assert int((batch["labels"] != IGNORED).sum()) == data["want_trained_tokens"]
    assert int((batch["labels"] == pad).sum()) == data["want_end_tokens_trained"]
    assert batch["attention_mask"][:, : len(prompt)].all(), "turn closers in prompts are attended"
    columns = [{"prompt_ids": [*prompt, 500 + n], "completion_ids": r} for n, r in enumerate(ids)]
    unpaired = DataCollatorForUnpairedPreference(pad_token_id=pad)(
        [{**c, "label": True} for c in columns]
    )
    assert unpaired["completion_mask"][:, 5:].tolist() == data["want_mask_padded_to_4"]
    pairs = DataCollatorForPreference(pad_token_id=pad)(
        [
            {"prompt_ids": c["prompt_ids"], "chosen_ids": c["completion_ids"], "rejected_ids": [7]}
            for c in columns
        ]
    )
    assert pairs["completion_mask"][:4, 5:].tolist() == data["want_mask_padded_to_4"]


def test_case_14_sampled_ids_reach_the_trainers_as_they_are(model_dir: Path) -> None:
    """Case 14: the text would give other ids; with a renderer at hand it is not asked either."""
    data = case("14-drift.json")
    spelled = [(data["text"], data["sampled_ids"])]
    spelled += [(more["text"], more["sampled"]) for more in data["more"]]
    stop = data["stop_string"]
    spelled += [(stop["content"], stop["token_ids"])]
    turns = [
        sampled(n, ids, [1, 5], text=text, messages=[{"role": "user", "content": "hi"}])
        for n, (text, ids) in enumerate(spelled)
    ]
    made = examples(read_training_set([episode(*turns)], text=renderer(model_dir)))
    assert [trained(example) for example in made] == [ids for _, ids in spelled]


def test_case_32_sft_imitates_what_the_writer_sampled_and_no_human(tmp_path: Path) -> None:
    """Case 32: human lines never have loss; the edited turn is not imitated unasked."""
    data = training_set("32-human.jsonl", tmp_path)
    (example,) = examples(data)
    assert trained(example) == [4370, 5227, 2]
    prompt = example["input_ids"][: example["labels"].count(IGNORED)]
    assert prompt[-3:] == [520, 9531, 198] and 2437 in prompt, "the prompt shows the edited text"
    assert data.left_out_turns == {("writer", "edited by a human"): 1}


def test_case_33_half_a_character_is_kept_and_not_repaired(model_dir: Path) -> None:
    """Case 33: ids rule; text that shows U+FFFD is never encoded."""
    data = case("33-emoji.json")
    cut = data["cut_after_first"]
    replies = [(data["text"], data["token_ids"]), (cut["content"], cut["token_ids"])]
    replies += list(data["more"].items())
    turns = [sampled(n, ids, [1, 5], text=text) for n, (text, ids) in enumerate(replies)]
    made = examples(read_training_set([episode(*turns)], text=renderer(model_dir)))
    assert [trained(example) for example in made] == [ids for _, ids in replies]
