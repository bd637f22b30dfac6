"""Parsers are chosen by what the template shows the model, never guessed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from marft_agents.errors import ConfigError
from marft_agents.serving.engine_args import read_options
from marft_agents.serving.tool_parsers import (
    FAMILIES,
    Parsers,
    calls_are_held,
    choose_parsers,
    installed_parsers,
)

TABLE = '''
"""A docstring."""
OTHER = {"nothing": 1}
_TOOL_PARSERS_TO_REGISTER = {
    "hermes": ("file", "Class"),
    "mistral": ("file", "Class"),
}
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "tool_parsers").mkdir()
    (tmp_path / "tool_parsers" / "__init__.py").write_text(TABLE)
    return tmp_path


def _shows(form: str) -> str:
    """A template that lists the tools and shows the model how a call looks."""
    return "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}" + form + "{% endif %}"


HERMES = _shows('<tool_call>{"name": x, "arguments": y}</tool_call>')
XML = _shows("<tool_call><function=x><parameter=y>1</parameter></function></tool_call>")
DEEPSEEK = "<\uff5ctool\u2581calls\u2581begin\uff5c>"


@pytest.mark.parametrize(
    ("template", "model_type", "tool", "reasoning"),
    [
        (HERMES, "qwen2", "hermes", None),
        (HERMES, "llama", "hermes", None),
        (HERMES + "<think>", "qwen3", "hermes", "qwen3"),
        (HERMES + "<think>", "qwen3_moe", "hermes", "qwen3"),
        (HERMES, "qwen3", "hermes", None),
        (HERMES + "<think>", "llama", "hermes", None),
        (XML, "qwen3_moe", "qwen3_coder", None),
        (XML + "<think>", "qwen3_5", "qwen3_coder", "qwen3"),
        (XML + "<think>", "nemotron_h", "qwen3_coder", "nemotron_v3"),
        (_shows('Environment: ipython {"name": n, "parameters": p}'), "llama", "llama3_json", None),
        (_shows("[TOOL_CALLS]"), "mistral", "mistral", None),
        (_shows("[TOOL_CALLS][THINK]"), "mistral3", "mistral", "mistral"),
        (_shows(DEEPSEEK + "```json"), "deepseek_v3", "deepseek_v3", None),
        (_shows(DEEPSEEK), "deepseek_v3", "deepseek_v31", None),
        (_shows("<arg_key>k</arg_key><think>"), "glm4_moe", "glm45", "glm45"),
        (_shows("<tool_call>arguments"), "granitemoehybrid", "granite4", None),
        (_shows("<|channel|>commentary"), "gpt_oss", "openai", "openai_gptoss"),
        (None, "deepseek_v32", "deepseek_v32", "deepseek_v3"),
    ],
)
def test_families(template: str | None, model_type: str, tool: str, reasoning: str | None) -> None:
    assert choose_parsers(template, model_type) == Parsers(tool, reasoning)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "does not show tools"),
        ("{% for m in messages %}{{ m['tools'] }}{{ m.content }}{% endfor %}", "does not show"),
        ("{{ messages }}<tool_call>arguments", "does not show tools to the model"),
        (_shows("CALL x"), r"no parser is known for calls as this model \(novel\) writes them"),
    ],
)
def test_no_guess_but_a_word(template: str | None, said: str) -> None:
    chosen = choose_parsers(template, "novel")
    assert chosen.tool is None
    (notice,) = chosen.notices
    assert re.search(said, notice) and "--tool-calls PARSER" in notice


def test_a_template_that_keeps_calls_but_shows_no_tools_still_thinks() -> None:
    distilled = "{{ messages }}" + DEEPSEEK + "```json <think>"
    chosen = choose_parsers(distilled, "qwen2")
    assert (chosen.tool, chosen.reasoning) == (None, "deepseek_r1")


def test_the_user_names_or_switches_off(package: Path) -> None:
    assert choose_parsers(None, "x", tool="hermes", package=package) == Parsers("hermes")
    assert choose_parsers(HERMES + "<think>", "qwen3", tool="off", reasoning="off") == Parsers()
    with pytest.raises(ConfigError, match=r"--tool-calls hermez: .*it has hermes, mistral"):
        choose_parsers(HERMES, "x", tool="hermez", package=package)


def test_an_engine_option_wins_and_is_not_doubled(package: Path) -> None:
    given = read_options(["--tool-call-parser=mine", "--reasoning_parser", "mine"])
    assert choose_parsers(HERMES + "<think>", "qwen3", package=package, given=given) == Parsers()
    plugin = read_options(["--tool-parser-plugin", "/x.py"])
    assert choose_parsers(None, "x", tool="mine", package=package, given=plugin).tool == "mine"


def test_a_vllm_without_the_parser_is_told(package: Path) -> None:
    chosen = choose_parsers(XML, "qwen3_moe", package=package)
    assert chosen.tool is None
    assert "no tool parser 'qwen3_coder'" in chosen.notices[0]


def test_the_table_is_read_without_importing(package: Path, tmp_path: Path) -> None:
    assert installed_parsers(package, "tool") == {"hermes", "mistral"}
    assert installed_parsers(package, "reasoning") == frozenset()
    assert installed_parsers(tmp_path / "nowhere", "tool") == frozenset()


def test_parsers_that_hold_calls_to_a_form() -> None:
    assert calls_are_held("glm45") and not calls_are_held("hermes") and not calls_are_held(None)
    assert calls_are_held("mistral", mistral_tokenizer=True) and not calls_are_held("mistral")


def test_every_family_names_parsers_of_the_installed_vllm() -> None:
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        pytest.skip("vLLM is not installed")
    folder = Path(vllm.origin).parent
    tools, thinkers = (installed_parsers(folder, kind) for kind in ("tool", "reasoning"))
    assert {f.tool for f in FAMILIES} <= tools
    assert {f.reasoning for f in FAMILIES if f.reasoning} <= thinkers
