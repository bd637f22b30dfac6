"""Write one page a command under ``docs/`` from its ``--help``; ``--check`` only compares.

Each page is a hand-written introduction (``docs/intro/NAME.md``) followed by the generated help,
so that the help in the docs cannot drift from the program.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from marft_agents.cli import COMMANDS, cli

DOCS = Path(__file__).resolve().parents[1] / "docs"


def page(name: str) -> str:
    """The whole text of ``docs/NAME.md``."""
    context = click.Context(cli, info_name="marft-agents", terminal_width=88, max_content_width=88)
    command = cli.get_command(context, name)
    assert command is not None, name
    inner = click.Context(
        command, info_name=name, parent=context, terminal_width=88, max_content_width=88
    )
    intro = (DOCS / "intro" / f"{name}.md").read_text(encoding="utf-8").strip()
    return (
        f"# marft-agents {name}\n\n{intro}\n\n## Help\n\n```text\n{command.get_help(inner)}\n```\n"
    )


def main() -> int:
    stale: list[str] = []
    for name in sorted(COMMANDS):
        path, text = DOCS / f"{name}.md", page(name)
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    if stale and "--check" in sys.argv:
        print(f"stale pages: {', '.join(stale)}; run: make docs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
