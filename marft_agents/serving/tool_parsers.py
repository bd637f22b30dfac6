"""Which of vLLM's parsers reads a model's tool calls and its reasoning.

Invariant: a parser is chosen only for a form of call that the chat template itself shows the model;
where none is recognised none is guessed, and that is said together with the option to give.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from marft_agents.errors import ConfigError
from marft_agents.serving.engine_args import Option, given_value

AUTO, OFF = "auto", "off"
_TABLES = {
    "tool": ("_TOOL_PARSERS_TO_REGISTER", "tool_parsers/__init__.py"),
    "reasoning": ("_REASONING_PARSERS_TO_REGISTER", "reasoning/__init__.py"),
}
_TAKES_TOOLS = re.compile(r"\{[%{](?:(?![%}]\}).)*(?<!['\"\w])tools(?!['\"\w])", re.DOTALL)
_THINKS = "<think>"
_DEEPSEEK_CALLS = "<\uff5ctool\u2581calls\u2581begin\uff5c>"


@dataclass(frozen=True)
class Family:
    """Models that write calls alike: recognised by what their template holds, and their type.

    ``types`` are beginnings of ``model_type``; empty: any. ``reasoning`` is used where the
    template holds ``thinks``.
    """

    tool: str
    marks: tuple[str, ...]
    types: tuple[str, ...] = ()
    reasoning: str | None = None
    thinks: str = _THINKS


FAMILIES = (
    Family("openai", ("<|channel|>",), ("gpt_oss",), "openai_gptoss", "<|channel|>"),
    Family("kimi_k2", ("<|tool_calls_section_begin|>",), (), "kimi_k2"),
    Family("minimax_m2", ("<minimax:tool_call>",), (), "minimax_m2"),
    Family("longcat", ("<longcat_tool_call>",)),
    Family("seed_oss", ("<seed:tool_call>",), (), "seed_oss", "<seed:think>"),
    Family("functiongemma", ("<start_function_call>",)),
    Family("gemma4", ("<|tool_call>",), ("gemma4",), "gemma4", "<|channel>"),
    Family("lfm2", ("<|tool_call_start|>",), ("lfm2",)),
    Family("glm45", ("<arg_key>",), ("glm",), "glm45"),
    Family("step3p5", ("<function=", "<parameter="), ("step3p5",), "step3p5"),
    Family("mimo", ("<function=", "<parameter="), ("mimo",), "mimo"),
    Family("qwen3_coder", ("<function=", "<parameter="), ("nemotron",), "nemotron_v3"),
    Family("qwen3_coder", ("<function=", "<parameter="), (), "qwen3"),
    Family("deepseek_v3", (_DEEPSEEK_CALLS, "```json"), (), "deepseek_r1"),
    Family("deepseek_v31", (_DEEPSEEK_CALLS,), (), "deepseek_v3", "thinking"),
    Family("granite4", ("<tool_call>",), ("granitemoehybrid",)),
    Family("granite", ("<|tool_call|>",), ("granite",), "granite", "thought process"),
    Family("ernie45", ("<tool_call>",), ("ernie4_5",), "ernie45"),
    Family("apertus", ("<|tools_prefix|>",), ("apertus",)),
    Family("olmo3", ("<function_calls>",), ("olmo3",), "olmo3"),
    Family("hunyuan_a13b", ("<tool_calls>",), ("hunyuan",), "hunyuan_a13b"),
    Family("jamba", ("<tool_calls>",), ("jamba",)),
    Family("phi4_mini_json", ("functools[",), ("phi3", "phi4")),
    Family("internlm", ("<|plugin|>",), ("internlm",)),
    Family("llama4_pythonic", ("<|python_start|>",), ("llama4",)),
    Family("llama3_json", ("ipython", '"parameters"'), ("llama", "mllama")),
    Family("mistral", ("[TOOL_CALLS]",), ("mistral", "mixtral", "ministral"), "mistral", "[THINK]"),
    Family("hermes", ("<tool_call>", "arguments"), ("qwen3",), "qwen3"),
    Family("hermes", ("<tool_call>", "arguments"), ("qwen2",), "deepseek_r1"),
    Family("hermes", ("<tool_call>", "arguments")),
)
_BY_TYPE = {
    "deepseek_v32": ("deepseek_v32", "deepseek_v3"),
    "deepseek_v4": ("deepseek_v4", "deepseek_v4"),
}
"""Types whose prompts vLLM writes without a template: their (tool, reasoning) parsers."""
_ALWAYS_HELD = frozenset({"glm45", "glm47", "cohere_command3", "cohere_command4"})


@dataclass(frozen=True)
class Parsers:
    """What an engine is started with; ``None``: no parser. ``notices`` are to be said."""

    tool: str | None = None
    reasoning: str | None = None
    notices: tuple[str, ...] = ()


def installed_parsers(package: Path, kind: str) -> frozenset[str]:
    """Names in the table of parsers of a vLLM's folder; empty where it keeps none that is known.

    The file is read, not run: importing vLLM takes seconds. ``kind`` is "tool" or "reasoning".
    """
    table, file = _TABLES[kind]
    try:
        tree = ast.parse((package / file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    for node in tree.body:
        named = isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == table for target in node.targets
        )
        if named and isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            keys = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
            return frozenset(key for key in keys if isinstance(key, str))
    return frozenset()


def choose_parsers(
    template: str | None,
    model_type: str,
    *,
    tool: str = AUTO,
    reasoning: str = AUTO,
    package: Path | None = None,
    given: Sequence[Option] = (),
) -> Parsers:
    """The parsers for a model, unless the user named others.

    Args:
        template: the chat template that will be used; ``None``: there is none.
        tool: ``auto``, ``off`` or a parser's name; ``reasoning`` likewise.
        package: vLLM's folder, to tell which parsers it has.
        given: the options handed on to the engine, which win.

    Raises:
        ConfigError: for a name that this vLLM does not have.
    """
    family = _family(template, model_type)
    notices: list[str] = []
    chosen: dict[str, str | None] = {}
    found = {"tool": family[0], "reasoning": family[1]}
    for kind, flag, wish in (
        ("tool", "--tool-calls", tool),
        ("reasoning", "--reasoning-parser", reasoning),
    ):
        own = "--tool-call-parser" if kind == "tool" else "--reasoning-parser"
        plugin = given_value(given, f"--{kind}-parser-plugin") is not None
        known = installed_parsers(package, kind) if package and not plugin else frozenset[str]()
        if given_value(given, own) is not None or wish == OFF:
            chosen[kind] = None
            continue
        name = found[kind] if wish == AUTO else wish
        if name is not None and known and name not in known:
            if wish != AUTO:
                raise ConfigError(
                    f"{flag} {name}: this vLLM has no such parser; it has"
                    f" {', '.join(sorted(known))}"
                )
            notices.append(f"this vLLM has no {kind} parser {name!r} for this model; update it")
            name = None
        elif kind == "tool" and wish == AUTO and name is None:
            notices.append(_no_parser(template, model_type))
        chosen[kind] = name
    return Parsers(chosen["tool"], chosen["reasoning"], tuple(notices))


def calls_are_held(parser: str | None, *, mistral_tokenizer: bool = False) -> bool:
    """Whether this parser holds every call to its form while sampling, without being asked to."""
    return parser in _ALWAYS_HELD or (parser == "mistral" and mistral_tokenizer)


def _family(template: str | None, model_type: str) -> tuple[str | None, str | None]:
    """(tool parser, reasoning parser) of a model, as far as they are recognised."""
    for beginning, both in _BY_TYPE.items():
        if template is None and model_type.startswith(beginning):
            return both
    if template is None:
        return None, None
    takes_tools = _TAKES_TOOLS.search(template) is not None
    for family in FAMILIES:
        if family.types and not model_type.startswith(family.types):
            continue
        if all(mark in template for mark in family.marks):
            thinks = family.reasoning is not None and family.thinks in template
            return family.tool if takes_tools else None, family.reasoning if thinks else None
    return None, None


def _no_parser(template: str | None, model_type: str) -> str:
    cure = "--tool-calls PARSER names one, --tool-calls off ends this message"
    if template is None or not _TAKES_TOOLS.search(template):
        return (
            "requests with tools will be refused: the chat template does not show tools to the"
            " model; give one that does with --chat-template FILE"
            f" ({cure})"
        )
    return (
        "requests with tools will be refused: no parser is known for calls as this model"
        f" ({model_type}) writes them; {cure}"
    )
