"""A command of commands, each a file of its own that is imported when it is named."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import click


class Subcommands(click.Group):
    """``marft-agents NAME SUB`` from the module ``cli/NAME_SUB.py``."""

    def __init__(self, name: str, commands: Mapping[str, str], *, help: str) -> None:
        super().__init__(name, help=help)
        self._texts = dict(commands)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._texts)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._texts:
            return None
        module = importlib.import_module(f"marft_agents.cli.{self.name}_{cmd_name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(self._texts.items()))
