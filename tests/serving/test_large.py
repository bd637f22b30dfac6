"""Large bodies are read and written as small ones are, and hold up nobody else's stream."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import to_json

from marft_agents.serving import bodies, large, rewrite
from marft_agents.serving.bodies import parse_object
from marft_agents.serving.large import LARGE, to_json_piecewise
from marft_agents.serving.refusals import Refusal
from tests.serving.stage import House, Stage, running_stage

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(), VALUES))
def test_what_is_written_is_the_same(body: dict[str, Any]) -> None:
    assert to_json_piecewise(body) == to_json(body)


def _body(text: str, size: int = LARGE) -> bytes:
    return b'{"model": "router", "pad": "%b", %b}' % (b"x" * size, text.encode())


@pytest.mark.parametrize(
    "text", ['"a": NaN', '"a": [-Infinity]', '"a": [1,]', '"a": [{},]', '"a": [1', '"a": "\n"']
)
def test_a_large_body_is_refused_for_the_same_reasons(text: str) -> None:
    for size in (0, LARGE):
        with pytest.raises(Refusal, match="no valid JSON"):
            parse_object(_body(text, size))


def test_large_bodies_of_any_form() -> None:
    for text in ('"a": [{"b": [1]}, "c"]', '"a": [ ]', '"a": [1, {}]', '"a": 1, "a": {"a": [2]}'):
        assert parse_object(_body(text)) == json.loads(_body(text))


def test_a_list_of_too_many_pieces_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"a": [""] * 100}
    monkeypatch.setattr(large, "MOST_ENTRIES", 50)
    assert list(large._member(body["a"])) == [to_json(body["a"])]  # pyright: ignore[reportPrivateUsage]
    assert to_json_piecewise(body) == to_json(body)


def test_half_a_surrogate_pair_in_a_large_body() -> None:
    body = {"a": ["\udc00", "x" * LARGE]}
    assert rewrite.on_the_wire(body, to_json_piecewise) == json.dumps(body).encode()


# -- another stream meanwhile ------------------------------------------------------------------


class Held:
    """A function that waits in the middle when it is given much."""

    def __init__(self, work: Any) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self._work = work

    def __call__(self, data: Any, *more: Any) -> Any:
        if len(str(data)) > LARGE:
            self.begun.set()
            assert self.go_on.wait(20)
        return self._work(data, *more)


def _read_until(chunks: Any, text: bytes) -> None:
    assert any(text in chunk for chunk in chunks), "the stream has ended"


@pytest.mark.parametrize(
    ("module", "name"), [(bodies, "parse_object"), (rewrite, "to_json_piecewise")]
)
def test_a_stream_goes_on_while_a_large_body_is_read_or_written(
    house: House, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    held = Held(getattr(module, name))
    monkeypatch.setattr(module, name, held)
    with running_stage(house, max_body=2 * LARGE) as stage, ThreadPoolExecutor(1) as pool:
        stage.engine.gate = threading.Semaphore(1)
        body = {"model": "router", "messages": [], "stream": True}
        with stage.http.stream("POST", f"{stage.url}/v1/chat/completions", json=body) as answer:
            chunks = answer.iter_raw()
            _read_until(chunks, b"w0 ")
            asked = pool.submit(_ask_much, stage)
            try:
                assert held.begun.wait(20)
                stage.engine.gate.release()
                _read_until(chunks, b"w1 ")
            finally:
                held.go_on.set()
                for _ in range(20):
                    stage.engine.gate.release()
        assert asked.result().status_code == 200
        sent = stage.engine.bodies("/v1/chat/completions")[-1]
        assert sent["messages"][0]["content"] == "x" * LARGE


def _ask_much(stage: Stage) -> httpx.Response:
    messages = [{"role": "user", "content": "x" * LARGE}]
    body = {"messages": messages, "model": "router"}
    return httpx.post(f"{stage.url}/v1/chat/completions", json=body, timeout=30)
