"""Every call of the engine client ends, and every failure names the address."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from marft_agents.errors import EngineError, ServerError
from marft_agents.serving import EngineClient, free_port
from marft_agents.serving.calls import AnswerError, NoAnswerError, error_detail
from tests.serving.fake_engine import FakeEngine, base_logprob
from tests.serving.stage import House


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as engine:
        yield engine


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[EngineClient]:
    with EngineClient(f"{engine.url}/v1/", timeout_s=2) as client:
        yield client


def test_prompt_logprobs_are_those_of_the_completion(client: EngineClient) -> None:
    assert client.prompt_logprobs("base", [1, 2], [5, 9]) == [base_logprob(5), base_logprob(9)]


def test_prompt_logprobs_that_are_missing(client: EngineClient) -> None:
    # The first token of a prompt has no log-probability.
    with pytest.raises(ServerError, match=r"no prompt log-probability for every token of 'base'"):
        client.prompt_logprobs("base", [], [5])


def test_load_and_unload_may_be_repeated(
    client: EngineClient, engine: FakeEngine, house: House
) -> None:
    path = house.registry.path("router", 1)
    for _ in range(2):
        client.load("router@v1", path)
    assert [m.name for m in client.models()] == ["base", "router@v1"]
    assert client.base_name() == "base"
    for _ in range(2):
        client.unload("router@v1")
    assert engine.adapters == {}


def test_a_name_is_never_reused_for_another_folder(client: EngineClient, house: House) -> None:
    client.load("router@v1", house.registry.path("router", 1))
    with pytest.raises(ServerError, match="already been loaded"):
        client.load("router@v1", house.registry.path("router", 2))


def test_a_folder_that_is_not_there(client: EngineClient, tmp_path: Path) -> None:
    with pytest.raises(AnswerError, match=r"load_lora_adapter answered 404: No adapter found"):
        client.load("router@v1", tmp_path / "nowhere")


def test_a_server_that_is_down() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with EngineClient(url) as client:
        with pytest.raises(NoAnswerError, match=f"cannot reach {url}/health"):
            client.health()
        with pytest.raises(ServerError, match=r"not ready within 0\.1 s"):
            client.wait_ready(0.1)


CALLS: dict[str, Callable[[EngineClient], object]] = {
    "health": lambda c: c.health(timeout_s=0.1),
    "models": lambda c: c.models(),
    "base_name": lambda c: c.base_name(),
    "has_loaded": lambda c: c.has_loaded("router@v1", Path("/nowhere")),
    "load": lambda c: c.load("router@v1", "/nowhere"),
    "unload": lambda c: c.unload("router@v1"),
    "prompt_logprobs": lambda c: c.prompt_logprobs("router@v1", [1], [2]),
    "warm_up": lambda c: c.warm_up(0.1),
    "wait_ready": lambda c: c.wait_ready(0.1),
}


@pytest.mark.parametrize("name", CALLS)
def test_case_27a_no_call_waits_for_an_engine_that_never_answers(name: str) -> None:
    """Case 27: the connection is accepted and nothing comes back."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with (
            EngineClient(url, timeout_s=0.1, load_timeout_s=0.1, probe_timeout_s=0.1) as client,
            pytest.raises(ServerError, match=r"no answer within|not ready within"),
        ):
            CALLS[name](client)


def test_a_server_that_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with (
            EngineClient(url, timeout_s=0.1) as client,
            pytest.raises(NoAnswerError, match=r"GET .*/v1/models gave no answer within 0\.1 s"),
        ):
            client.models()


@pytest.mark.parametrize("url", ["nonsense", "http://", "ftp://127.0.0.1", "http://[::1"])
def test_an_address_that_is_none(url: str) -> None:
    with EngineClient(url) as client, pytest.raises(ServerError, match="cannot reach"):
        client.health()


def test_waiting_stops_when_the_process_is_gone(client: EngineClient, engine: FakeEngine) -> None:
    engine.faults.unwell = True

    def gone() -> None:
        raise EngineError("gone")

    with pytest.raises(EngineError, match="gone"):
        client.wait_healthy(5, still_alive=gone)


def test_waiting_tells_and_warms_up(client: EngineClient, engine: FakeEngine) -> None:
    engine.faults.unwell = True
    told: list[float] = []

    def progress(seconds: float) -> None:
        told.append(seconds)
        engine.faults.unwell = False

    client.wait_healthy(10, progress=progress, every_s=0.0)
    assert len(told) == 1
    client.wait_ready(10)
    assert engine.bodies("/v1/completions")[-1]["model"] == "base"


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b'{"error": {"message": "no"}}', "no"),
        (b'{"error": "no"}', "no"),
        (b'{"message": "no"}', "no"),
        (b'{"detail": [{"x": 1}]}', '[{"x": 1}]'),
        (b"plain \xff", "plain \ufffd"),
        (b"", ""),
    ],
)
def test_error_bodies_of_any_shape(body: bytes, detail: str) -> None:
    assert error_detail(body) == detail
