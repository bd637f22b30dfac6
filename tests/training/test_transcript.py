"""The joint transcript and its borders."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import torch

from marft_agents.credit import dependency_order
from marft_agents.schema import Episode, EpisodeStarted, HumanEvent, ToolEvent, Turn
from marft_agents.training.features import read_features, windows
from marft_agents.training.transcript import SEPARATOR, Borders, Line, tokenise, transcript_lines
from tests.training.synthetic import TinyModel

START = datetime(2025, 1, 1, tzinfo=UTC)


def at(second: int) -> datetime:
    return START + timedelta(seconds=second)


def said(index: int, agent: str, text: str | None, **fields: Any) -> Turn:
    return Turn(
        episode_id="e",
        turn_id=f"t{index}",
        agent=agent,
        index=index,
        text=text,
        time=at(10 * index),
        **fields,
    )


def characters(text: str) -> list[int]:
    return [ord(c) for c in text]


def test_everything_the_team_read_is_there_in_order() -> None:
    episode = Episode(
        episode_id="e",
        started=EpisodeStarted(episode_id="e", task="sort 3 1 2"),
        turns=[
            said(0, "planner", "use a tool"),
            said(1, "selector", "coder", kind="select"),
            said(2, "coder", None, error="timeout"),
            said(3, "coder", "1 2 3", edited_text="1, 2, 3"),
            said(4, "coder", "done", kind="summary"),
        ],
        tools=[ToolEvent(episode_id="e", name="run", result={"ok": 1}, time=at(5))],
        humans=[HumanEvent(episode_id="e", name="ann", text="thanks", time=at(99))],
    )
    lines = transcript_lines(episode, dependency_order(episode.turns))
    assert lines == [
        Line("task", "sort 3 1 2"),
        Line("planner", "use a tool", action=True),
        Line("tool run", '{"ok": 1}'),
        Line("coder", "1, 2, 3", action=True),
        Line("coder", "done"),
        Line("ann", "thanks"),
    ]


def test_borders_lie_before_the_action_without_and_with_the_speaker() -> None:
    borders = tokenise([Line("task", "x"), Line("a", "yes", True)], characters)
    text = "".join(map(chr, borders.ids))
    assert text == f"{SEPARATOR}task: x{SEPARATOR}a: yes{SEPARATOR}"
    assert text[: borders.open_K[0] + 1] == f"{SEPARATOR}task: x{SEPARATOR}"
    assert text[: borders.named_K[0] + 1] == f"{SEPARATOR}task: x{SEPARATOR}a:"
    assert borders.final == len(text) - 1


def test_windows_cover_every_token_once_with_text_before_it() -> None:
    for length in range(1, 60):
        served: list[int] = []
        for start, end, first in windows(length, 10):
            assert end - start <= 10 and (first == 0 or first - start >= 5)
            served += range(first, end)
        assert served == list(range(length))


@pytest.mark.parametrize("limit", [0, 120, 1000])
def test_features_are_those_of_the_text_before_the_border(limit: int, tiny: TinyModel) -> None:
    encode = tiny.tokenizer.encode
    lines = [Line("task", "ship on friday"), Line("a", "yes", True), Line("b", "no", True)]
    borders = tokenise(lines, lambda text: encode(text, add_special_tokens=False))
    backbone = tiny.model.model
    longer = tokenise([*lines, Line("a", "no", True)], characters)
    group = [longer, borders, longer]
    features = read_features(backbone, group, max_length=512, pack_tokens=limit)[1]
    for k, where in enumerate(borders.named_K):
        with torch.no_grad():
            alone = backbone(torch.tensor([borders.ids[: where + 1]])).last_hidden_state[0, -1]
        assert torch.allclose(features.named_K[k], alone, atol=1e-4)
    assert features.open_K.shape == features.named_K.shape == (2, 32)


def test_a_transcript_longer_than_the_window_still_has_all_borders(tiny: TinyModel) -> None:
    ids = [3 + n % 300 for n in range(90)]
    borders = Borders(ids, open_K=[4, 50], named_K=[6, 52], final=89)
    (features,) = read_features(tiny.model.model, [borders], max_length=20, pack_tokens=1000)
    with torch.no_grad():
        alone = tiny.model.model(torch.tensor([ids[:7]])).last_hidden_state[0, -1]
    assert torch.allclose(features.named_K[0], alone, atol=1e-4)
    assert torch.isfinite(features.final).all()
