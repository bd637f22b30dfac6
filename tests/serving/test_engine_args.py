"""Options handed on to an engine: all spellings are heard, broken promises are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from marft_agents.errors import ConfigError
from marft_agents.serving.engine_args import (
    check_engine_args,
    given_value,
    read_options,
    spelled_for_vllm,
    structured,
    without,
)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--max-num-seqs", "8"], "--max-num-seqs", "8"),
        (["--max_num_seqs=8"], "--max-num-seqs", "8"),
        (["--enforce-eager", "--seed", "1"], "--enforce-eager", ""),
        (["--override_generation_config.top_k", "3"], "--override-generation-config.top_k", "3"),
        (["-sc", "{}"], "--speculative-config", "{}"),
        (["--seed", "-1"], "--seed", "-1"),
        (["--seed", "1", "--seed=2"], "--seed", "2"),
    ],
)
def test_every_spelling_is_heard(words: list[str], name: str, value: str) -> None:
    assert given_value(read_options(words), name) == value


def test_what_stands_in_a_file_is_heard_and_loses_to_the_line(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "seed: 1\nenforce_eager: true\nenable-lora: false\ncompilation-config: {a: 1}\n"
    )
    options = read_options([f"--config={file}", "--seed", "2"])
    assert given_value(options, "--seed") == "2"
    assert given_value(options, "--enforce-eager") == ""
    assert structured(options, "--compilation-config") == {"a": 1}
    with pytest.raises(ConfigError, match="--no-enable-lora would leave no agent"):
        check_engine_args(options)


def test_vllm_reads_a_file_only_as_two_words() -> None:
    assert spelled_for_vllm(["--config=a=b.yaml", "--seed=1"]) == (
        "--config",
        "a=b.yaml",
        "--seed=1",
    )


def test_words_of_an_option_are_taken_out() -> None:
    words = ["--a", "1", "--b.x=1", "--c", "--b", "{}", "--d"]
    assert without(words, read_options(words), "--b") == ("--a", "1", "--c", "--d")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], "would open the engine"),
        (["--port=8000"], "serve's own --port is the gateway's"),
        (["--served_model_name", "x"], "would hide the base"),
        (["--model", "x"], "another base"),
        (["--api-key", "k"], "--api-key-env"),
        (["--lora-modules", "a=b"], "nobody checked or probed"),
        (["--no-enable-lora"], "no agent to serve"),
        (["--max-loras", "9"], "serve its own option --max-loras"),
        (["--max-lora-rank=64"], "--max-lora-rank"),
        (["-asc", "2"], "--replicas"),
        (["--uds", "/x"], "cannot reach it"),
        (["--served-model", "x"], "may stand for --served-model-name; write the name out"),
        (["--logprobs-m=raw_logprobs"], "may stand for --logprobs-mode"),
        (["--seed 1"], "is two words; write --engine-arg=--seed=1"),
        (["--speculative-config.method", "ngram"], "log-probabilities wrong"),
        (["-sc", "{}"], "log-probabilities wrong"),
    ],
)
def test_what_would_break_a_promise_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_engine_args(read_options(words))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trust-remote-code"], "runs code that comes with the model"),
        (["--allowed-local-media-path=/data"], "lets every client read files"),
        (["--logprobs-mode", "raw_logprobs"], "train without ratios"),
        (["--logits-processors", "a.b:C"], "marked as shaped"),
    ],
)
def test_what_is_passed_on_with_a_word(words: list[str], said: str) -> None:
    (notice,) = check_engine_args(read_options(words))
    assert said in notice


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--enable-lora", "--seed", "1", "--tensor-parallel-size", "2"],
        ["--watermark", "0.1"],
        ["--logprobs-mode", "processed_logprobs"],
        ["--chat-template-content-format", "openai"],
    ],
)
def test_everything_else_passes_without_a_word(words: list[str]) -> None:
    assert check_engine_args(read_options(words)) == ()
