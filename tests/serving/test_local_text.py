"""Incremental text: complete characters only, and nothing behind a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marft_agents.serving.local.text import TextStream


class Bytes:
    """A tokenizer whose ids are bytes; id 256 is special and has no text."""

    chat_template: Any = None
    eos_token_id: int | None = 256

    def __len__(self) -> int:
        return 257

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        return bytes(i for i in token_ids if i < 256).decode(errors="replace")

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def _run(ids: Sequence[int], stop: Sequence[str] = (), **kw: Any) -> tuple[list[str], TextStream]:
    stream = TextStream(Bytes(), b"prompt", stop, **kw)
    pieces: list[str] = []
    for place, token in enumerate(ids):
        pieces.append(stream.push([token], final=place == len(ids) - 1))
        if stream.stopped_by:
            break
    return pieces, stream


def test_a_character_of_several_tokens_comes_out_whole() -> None:
    pieces, _ = _run("aé€😀b".encode())
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "😀", "b"]


def test_an_incomplete_character_is_released_at_the_end() -> None:
    pieces, _ = _run("ok😀".encode()[:-1])
    assert "".join(pieces) == "ok�"


@given(st.text(max_size=20))
def test_pieces_add_up_to_the_text(text: str) -> None:
    pieces, _ = _run(text.encode())
    assert "".join(pieces) == text


@given(
    st.text("ab\n é", max_size=24), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)
)
def test_text_is_cut_at_the_first_stop_string(text: str, stop: list[str]) -> None:
    pieces, stream = _run(text.encode(), stop)
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stop if s in text]
    if not ends:
        assert ("".join(pieces), stream.stopped_by) == (text, None)
        return
    first_complete = min(end for end, _, _ in ends)
    place, by = min((place, s) for end, place, s in ends if end == first_complete)
    assert ("".join(pieces), stream.stopped_by) == (text[:place], by)


def test_a_tail_that_may_become_a_stop_string_is_held_back() -> None:
    pieces, _ = _run(b"a</b</answer>", ["</answer>"])
    assert pieces == ["a", "", "", "</b", *[""] * 9]


def test_the_stop_string_is_kept_when_asked_for() -> None:
    pieces, _ = _run(b"yes.no", ["."], include_stop=True)
    assert "".join(pieces) == "yes."


@pytest.mark.parametrize("final", [False, True])
def test_special_tokens_have_no_text(final: bool) -> None:
    stream = TextStream(Bytes(), b"p")
    assert stream.push([97, 256], final=final) == "a"
