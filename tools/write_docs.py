"""Write what the program says of itself into ``docs/`` and ``examples/``; ``--check`` compares.

Each command's page is a hand-written introduction (``docs/intro/NAME.md``) followed by its
``--help``; the example configuration holds every setting at its default with its help. Neither can
drift from the program. The page on operating a server has the table of its metrics.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from marft_agents.cli import COMMANDS, cli

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SETTINGS = ROOT / "examples" / "finetune_full.yaml"
_HEAD = """\
# Every setting of `marft-agents finetune` at its default (written by `make docs`): keep the lines
# that you change. Beside these, what transformers.TrainingArguments has is taken too (weight_decay,
# max_grad_norm, warmup_steps, seed, report_to, run_name ...).
"""


def page(name: str) -> str:
    """The whole text of ``docs/NAME.md``."""
    context = _context(cli, "marft-agents")
    command = cli.get_command(context, name)
    assert command is not None, name
    intro = (DOCS / "intro" / f"{name}.md").read_text(encoding="utf-8").strip()
    help_text = "\n\n".join(_helps(command, _context(command, name, context)))
    return f"# marft-agents {name}\n\n{intro}\n\n## Help\n\n{help_text}\n"


def _helps(command: click.Command, context: click.Context) -> Iterator[str]:
    """The help of a command, then that of each command in it."""
    yield f"```text\n{command.get_help(context)}\n```"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None, name
            yield f"### {name}"
            yield from _helps(inner, _context(inner, name, context))


def _context(
    command: click.Command, name: str, parent: click.Context | None = None
) -> click.Context:
    return click.Context(
        command, info_name=name, parent=parent, terminal_width=88, max_content_width=88
    )


def settings() -> str:
    """The example configuration, in the order and under the headings of the source."""
    from marft_agents.training._quiet import set_environment

    set_environment()
    from marft_agents.training.config import MarftConfig
    from marft_agents.training.options import MANAGED

    default = MarftConfig(use_cpu=True)
    fields = {f.name: f for f in dataclasses.fields(MarftConfig) if f.name not in MANAGED}
    lines = [_HEAD.rstrip()]
    for line in inspect.getsource(MarftConfig).splitlines():
        heading = re.match(r"    # (.*)", line)
        name = re.match(r"    (\w+): ", line)
        if heading is not None:
            lines.append(f"\n# {heading[1]}")
        elif name is not None and name[1] in fields and "help" in fields[name[1]].metadata:
            value: Any = getattr(default, name[1])
            shown = getattr(value, "value", value)
            text = f"{name[1]}: {json.dumps(shown) if not isinstance(shown, str) else shown}"
            lines.append(f"{text}  # {fields[name[1]].metadata['help']}")
        elif line.strip().startswith("def "):
            break
    return "\n".join(lines) + "\n"


def operate() -> str:
    """``docs/operate.md`` with the table of metrics as a gateway describes them."""
    from marft_agents.serving.metrics import described

    begin, end = "<!-- metrics: written by make docs -->\n", "<!-- /metrics -->"
    before, _, rest = (DOCS / "operate.md").read_text(encoding="utf-8").partition(begin)
    rows = ["| metric | kind | labels | what it says |", "|---|---|---|---|"]
    for name, kind, labels, text in described():
        told = ", ".join(f"`{label}`" for label in labels)
        rows.append(f"| `{name}` | {kind} | {told} | {text} |")
    return before + begin + "\n".join(rows) + "\n" + end + rest.partition(end)[2]


def main() -> int:
    texts = {DOCS / f"{name}.md": page(name) for name in sorted(COMMANDS)} | {SETTINGS: settings()}
    texts[DOCS / "operate.md"] = operate()
    stale: list[str] = []
    for path, text in texts.items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path.name)
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    if stale and "--check" in sys.argv:
        print(f"stale: {', '.join(stale)}; run: make docs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
