"""``marft-agents logs``: what has to be done with logs beside learning from them.

Invariant: each subcommand is a file of its own, imported when it is named; the log named as source
is never changed.
"""

from __future__ import annotations

import importlib

import click

SUBCOMMANDS = {
    "compact": "Merge segments into few files, without what is there twice.",
    "export": "Write the log in a format that other tools read.",
    "import": "Make a log of what another program recorded.",
    "stats": "Count events, tokens, turns and bytes.",
    "validate": "Check every line, and name each that is wrong.",
}


class _Subcommands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUBCOMMANDS:
            return None
        module = importlib.import_module(f"marft_agents.cli.logs_{cmd_name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(SUBCOMMANDS.items()))


@click.group("logs", cls=_Subcommands)
def command() -> None:
    """Count, check, merge, export and import logs."""
