"""Real failures of real users at the gateway: what an engine refuses is seen as the engine said it,
what it could not serve is never sent to it, and nothing is answered by another model.

The faults of single steps are in ``test_swap`` and ``test_swap_faults``, episodes that span a swap
in ``test_lease_swaps``, slots in ``test_fleet``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import SandboxedEnvironment

from marft_agents.errors import SwapError
from marft_agents.schema import Turn
from marft_agents.serving.loader import Limits
from tests.serving.recording_kit import CHAT, RecordingStage, recording_stage
from tests.serving.stage import LOOK_OFTEN, House, Stage, running_stage

CASES = Path(__file__).parents[1] / "cases"
BEFORE = {"router@v1", "writer@v1"}
AFTER = {"router@v2", "writer@v1"}
streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def case(name: str) -> dict[str, Any]:
    return json.loads((CASES / name).read_text())


ORDERS, WINDOW, IMAGES = (
    case(f"{name}.json") for name in ("08-role-order", "13-context", "40-images")
)
LIMITS = case("12-limits.json")


# -- 8, 13, 40: what the engine refuses ------------------------------------------------------------


def strict(body: dict[str, Any]) -> str | None:
    """What a template says that wants roles in its own order."""

    def refuse(message: str) -> None:
        raise TemplateError(message)

    template = SandboxedEnvironment().from_string(ORDERS["strict_template"])
    try:
        template.render(messages=body["messages"], raise_exception=refuse)
    except TemplateError as error:
        return str(error)
    return None


def narrow(body: dict[str, Any]) -> str | None:
    words = sum(len(str(message["content"]).split()) for message in body["messages"])
    limit = WINDOW["max_model_len"]
    return f"maximum context length is {limit} tokens, not {words}" if words > limit else None


def text_only(body: dict[str, Any]) -> str | None:
    parts = [p for m in body["messages"] if isinstance(m["content"], list) for p in m["content"]]
    kinds = {part["type"] for part in parts} - {"text"}
    return f"not a multimodal model: {', '.join(kinds)}" if kinds else None


def refused_alike(desk: RecordingStage, messages: Any, stream: bool) -> Turn:
    """The app, recorded or not, gets the engine's own answer, and the engine the app's messages."""
    stage = desk.stage
    body = {"model": "router", "messages": messages, "stream": stream}
    own = stage.http.post(f"{stage.engine.url}{CHAT}", json=body | {"model": "router@v1"})
    plain = stage.http.post(f"{stage.url}{CHAT}", json=body)
    before = len(desk.turns)
    recorded = desk.ask(messages=messages, stream=stream)
    for answer in (plain, recorded):
        assert (answer.status_code, answer.content) == (own.status_code, own.content)
        assert answer.headers["Content-Type"] == own.headers["Content-Type"]
    assert own.status_code == 400
    sent = stage.engine.bodies(CHAT)[-3:]
    assert [s["messages"] for s in sent] == [messages] * 3, "nothing is merged, moved or left out"
    assert {s["model"] for s in sent} == {"router@v1"}
    turn = desk.wait_for_turns(before + 1)[-1]
    assert turn.error == f"HTTP 400: {own.json()['error']['message']}"
    assert turn.token_ids is None and not turn.trainable
    return turn


@streamed
@pytest.mark.parametrize("order", ["late_system", "two_system", "same_role", "assistant_first"])
def test_case_08_a_strict_template_refuses_through_the_gateway_as_it_does_itself(
    house: House, order: str, stream: bool
) -> None:
    with recording_stage(house) as desk:
        desk.stage.engine.faults.refuses = strict
        turn = refused_alike(desk, ORDERS[order], stream)
        assert turn.messages == ORDERS[order]
        assert "system must come first" in str(turn.error) or "alternate" in str(turn.error)
        fine = [{"role": "system", "content": "A"}, {"role": "user", "content": "hi"}]
        assert desk.ask(messages=fine, stream=stream).status_code == 200
        assert desk.wait_for_turns(2)[-1].trainable


@streamed
def test_case_13_a_prompt_beyond_the_window_is_one_failed_turn(house: House, stream: bool) -> None:
    with recording_stage(house) as desk:
        desk.stage.engine.faults.refuses = narrow
        assert desk.ask().status_code == 200
        refused_alike(desk, WINDOW["messages"], stream)
        assert desk.ask(stream=stream).status_code == 200
        turns = desk.wait_for_turns(3)
        assert [turn.trainable for turn in turns] == [True, False, True]
        assert {turn.episode_id for turn in turns} == {"e1"}


def test_case_40_images_on_a_text_model_and_parts_that_nobody_knows(house: House) -> None:
    with recording_stage(house) as desk:
        desk.stage.engine.faults.refuses = text_only
        turn = refused_alike(desk, IMAGES["image"], False)
        stored = turn.messages[0]["content"][1]["image_url"]["url"]
        assert set(stored) >= {"sha256", "bytes"}
        assert "iVBORw0KGgo" not in json.dumps(
            [event.model_dump(mode="json") for event in desk.events]
        )
        assert refused_alike(desk, IMAGES["unknown_part"], False).messages == IMAGES["unknown_part"]
        assert desk.ask(messages=IMAGES["text_parts"]).status_code == 200
        assert desk.stage.engine.bodies(CHAT)[-1]["messages"] == IMAGES["text_parts"]
        assert desk.wait_for_turns(3)[-1].messages == IMAGES["text_parts"]


# -- 17: whose log-probabilities they are ----------------------------------------------------------


@streamed
@pytest.mark.parametrize("temperature", [0.5, 1.0, None])
@pytest.mark.parametrize(
    ("mode", "stored"), [("processed_logprobs", "processed"), ("raw_logprobs", "raw"), (None, None)]
)
def test_case_17_temperature_and_mode_stand_with_every_call(
    house: House, mode: str | None, stored: str | None, temperature: float | None, stream: bool
) -> None:
    """A temperature that the app leaves out is the engine's own."""
    asked: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
    with recording_stage(house, logprobs_mode=mode) as desk:
        assert desk.ask(stream=stream, **asked).status_code == 200
        (turn,) = desk.wait_for_turns(1)
        assert turn.sampling.temperature == (1.0 if temperature is None else temperature)
        assert turn.logprob_mode == stored
        assert desk.stage.engine.bodies(CHAT)[-1].get("temperature") == temperature


# -- 12: adapters that the engine would refuse -----------------------------------------------------


def tampered(house: House, settings: dict[str, Any]) -> None:
    """router@v2 says ``settings``, as another tool may have written them; its checksums agree."""
    folder = house.registry.path("router", 2)
    config_file, manifest_file = folder / "adapter_config.json", folder / "manifest.json"
    config = json.dumps(json.loads(config_file.read_text()) | settings)
    manifest = json.loads(manifest_file.read_text())
    manifest["files"][config_file.name] = sha256(config.encode()).hexdigest()
    for file, content in ((config_file, config), (manifest_file, json.dumps(manifest))):
        file.chmod(0o644)
        file.write_text(content)


def loads(stage: Stage) -> list[int]:
    return [len(engine.bodies("/v1/load_lora_adapter")) for engine in stage.engines]


def assert_nothing_happened(stage: Stage, loads_before: list[int]) -> None:
    assert loads(stage) == loads_before, "it was refused before anything was sent"
    assert [set(engine.adapters) for engine in stage.engines] == [BEFORE] * len(stage.engines)
    assert stage.states == ["ready"] * len(stage.engines)
    assert stage.house.registry.current("router") == 1
    assert stage.chat().headers["X-Marft-Adapter"] == "router@v1"


@pytest.mark.parametrize(
    "settings",
    [*LIMITS["refuse"], {"target_modules": ["q_proj", "lm_head"]}, {"target_modules": ["lm_head"]}],
    ids=json.dumps,
)
def test_case_12_what_the_engine_would_refuse_is_not_sent_to_any(
    house: House, settings: dict[str, Any]
) -> None:
    """Case 12, and an adapter on the output head, which prompt log-probabilities ignore."""
    limit = LIMITS["server_max_lora_rank"]
    tampered(house, settings)
    with running_stage(house, replicas=3, limits=Limits(limit)) as stage:
        before = loads(stage)
        with pytest.raises(SwapError) as caught:
            stage.operator.swap("router", 2)
        message = str(caught.value)
        name = list(settings)[-1]
        assert "step check of router@v2" in message and name in message
        if name in ("r", "rank_pattern"):
            rank = settings["r"] if name == "r" else settings[name]["q_proj"]
            assert f"is {rank}" in message and f"limit is {limit}" in message
            assert "--max-lora-rank 32 (it takes only 1 8 16 32 64 128 256 320 512)" in message
        assert_nothing_happened(stage, before)


# -- 27: several replicas --------------------------------------------------------------------------


def half_a_file(folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-16])


def other_bytes(folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.chmod(0o644)
    weights.write_bytes(data)


def no_folder(folder: Path) -> None:
    folder.chmod(0o755)
    shutil.rmtree(folder)


def no_weights(folder: Path) -> None:
    folder.chmod(0o755)
    (folder / "adapter_model.safetensors").unlink()


BROKEN = pytest.mark.parametrize("damage", [half_a_file, other_bytes, no_folder, no_weights])


@BROKEN
def test_case_27_a_broken_folder_reaches_no_replica(
    house: House, damage: Callable[[Path], None]
) -> None:
    damage(house.registry.path("router", 2))
    with running_stage(house, replicas=3) as stage:
        before = loads(stage)
        with pytest.raises(SwapError, match=r"step check.*router@v1 still serves"):
            stage.operator.swap("router", 2)
        assert_nothing_happened(stage, before)


@BROKEN
def test_case_27_an_engine_that_restarts_when_a_folder_is_gone_never_answers_as_the_base(
    house: House, damage: Callable[[Path], None]
) -> None:
    """The others go on; without any other, requests are told why."""
    with running_stage(house, replicas=2, pace=LOOK_OFTEN) as stage:
        assert stage.operator.swap("router", 2)["to"] == 2
        damage(house.registry.path("router", 2))
        stage.engines[0].restart_empty()
        stage.wait(lambda: any("cannot take requests" in line for line in stage.said))
        for _ in range(4):
            assert stage.chat().headers["X-Marft-Adapter"] == "router@v2"
        stage.engines[1].restart_empty()
        stage.wait(lambda: "ready" not in stage.states)
        answer = stage.chat()
        assert (answer.status_code, bool(answer.headers["Retry-After"])) == (503, True)
        assert "router@v2" in answer.json()["error"]["message"]
        models = {b["model"] for engine in stage.engines for b in engine.bodies(CHAT)}
        assert models == {"router@v2"}


@pytest.mark.parametrize("faulty", [0, 2])
def test_case_27_an_engine_that_restarts_in_the_middle_of_a_swap(house: House, faulty: int) -> None:
    """Between the load and the probe it forgets everything: no replica keeps half a swap."""
    with running_stage(house, replicas=3, pace=LOOK_OFTEN) as stage:
        engine = stage.engines[faulty]

        def restart(body: dict[str, Any]) -> None:
            if body["model"] == "router@v2":
                engine.faults.refuses = None
                engine.restart_empty()

        engine.faults.refuses = restart
        with pytest.raises(
            SwapError, match=rf"step (load|probe) of router@v2 on engine-{faulty}.*@v1 still"
        ):
            stage.operator.swap("router", 2)
        assert house.registry.current("router") == 1
        assert stage.chat().headers["X-Marft-Adapter"] == "router@v1"
        stage.wait(lambda: all(set(e.adapters) == BEFORE for e in stage.engines))
        stage.wait(lambda: stage.states == ["ready"] * 3)
        assert stage.operator.swap("router", 2)["to"] == 2
        stage.wait(lambda: all(set(e.adapters) == AFTER for e in stage.engines))


# -- unload frees nothing --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["refuse", "hang", "nothing"])
def test_ten_new_versions_leave_no_more_than_one_once_an_engine_unloads_again(
    house: House, kind: str
) -> None:
    """Every unload of ten swaps fails on one of two engines; no old version is answered by."""
    with running_stage(house, replicas=2, timeout_s=0.1, pace=LOOK_OFTEN) as stage:
        engine = stage.engines[1]
        engine.faults.at["unload"] = kind
        for version in range(2, 12):
            if version > 2:
                house.publish("router")
            assert stage.operator.swap("router", version)["to"] == version
            assert stage.chat(f"router@v{version - 1}").status_code == 404
        last = {"router@v11", "writer@v1"}
        stage.wait(lambda: set(stage.engines[0].adapters) == last)
        assert last < set(engine.adapters)
        engine.faults.at.clear()
        engine.release.set()
        stage.wait(lambda: set(engine.adapters) == last)
        names = [b["lora_name"] for b in engine.bodies("/v1/load_lora_adapter")]
        assert len(names) == len(set(names)), "each version was loaded once, under its own name"
