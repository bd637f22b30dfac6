"""The template that turns messages into a prompt: where a model keeps it, and whether it compiles.

Invariant: what is said about a template was read from the files that the engine will read.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from marft_agents.errors import ConfigError

_TOOLS, _DEFAULT = "tool_use", "default"
_WITHOUT_ONE = frozenset(
    {
        "deepseek_v32", "deepseek_v4", "deepseek_v41",
        "blip-2", "deepseek_ocr", "deepseek_ocr2", "deepseek_vl_v2", "minicpmv", "paligemma",
    }
)  # fmt: skip
"""Model types whose prompts vLLM writes itself."""


def model_template(model_dir: Path) -> str | None:
    """The template in a model's folder, the one for tools where there are several."""
    found = dict(_templates(model_dir))
    return found.get(_TOOLS) or found.get(_DEFAULT) or next(iter(found.values()), None)


def mistral_tokenizer(model_dir: Path) -> bool:
    """Whether the folder holds a tokenizer in Mistral's own format, which needs no template."""
    return (model_dir / "tekken.json").exists() or any(model_dir.glob("tokenizer.model.v*"))


def needs_template(model_dir: Path, model_type: str) -> bool:
    """Whether chat is impossible with this folder unless a template is given."""
    return (
        model_template(model_dir) is None
        and model_type not in _WITHOUT_ONE
        and not mistral_tokenizer(model_dir)
    )


def no_template_notice(name: str) -> str:
    """What to say of a base model that was never taught to chat."""
    return (
        f"{name} has no chat template, so every chat completion will be refused; serve the"
        " instruction-tuned model of this family, or give a template with --chat-template FILE"
        " (/v1/completions works without)"
    )


def read_chat_template(path: Path) -> str:
    """The text of a template file that compiles; syntax is checked where Jinja is installed.

    Raises:
        ConfigError: naming the file, and the line of a mistake.
    """
    flag = f"--chat-template {path}"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{flag}: there is no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"{flag}: cannot be read ({reason})") from error
    if not text.strip():
        raise ConfigError(f"{flag}: the file is empty")
    if "{{" not in text and "{%" not in text:
        raise ConfigError(f"{flag}: holds no Jinja expression; every prompt would be the same")
    _compile(text, flag)
    return text


def _compile(text: str, flag: str) -> None:
    try:
        jinja2: Any = importlib.import_module("jinja2")
        ext: Any = importlib.import_module("jinja2.ext")
        sandbox: Any = importlib.import_module("jinja2.sandbox")
    except ImportError:
        return

    class Generation(ext.Extension):  # a tag that trainers add to templates
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    extensions = [Generation, "jinja2.ext.loopcontrols"]
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    try:
        environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{flag}: line {error.lineno}: {error.message}") from error


def _templates(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of each; of two with one name the later counts, as it does for transformers."""
    for file in ("tokenizer_config.json", "chat_template.json"):
        value = _fields(folder / file).get("chat_template")
        if isinstance(value, str):
            yield _DEFAULT, value
        for entry in cast("list[Any]", value) if isinstance(value, list) else ():
            named = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
            if isinstance(text := named.get("template"), str):
                yield str(named.get("name")), text
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        yield file.stem, file.read_text(encoding="utf-8", errors="replace")
    whole = folder / "chat_template.jinja"
    if whole.is_file():
        yield _DEFAULT, whole.read_text(encoding="utf-8", errors="replace")


def _fields(path: Path) -> dict[str, Any]:
    try:
        parsed: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else {}
