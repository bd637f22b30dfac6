"""The command line: one file a command, each found by its name and imported only when it runs.

Invariant: a user's mistake is one line on stderr and exit code 2, never a traceback; so is a disk
or a network that refuses.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys

import click

from marft_agents.cli._text import printable
from marft_agents.errors import MarftError

COMMANDS = {
    "adapters": "List, check, promote, pin, prune and export adapter versions.",
    "finetune": "Train one LoRA adapter per agent from recorded episodes.",
    "inspect": "Show episodes, rewards, and what can be trained on and why the rest cannot.",
    "keys": "Make, list and take back keys for a server.",
    "logs": "Count, check, compact, export and import logs.",
    "serve": "Serve the current adapters behind one OpenAI-compatible address.",
    "swap": "Move an agent's alias to a newly published adapter version.",
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"marft_agents.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in sorted(COMMANDS)])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="marft-agents", prog_name="marft-agents")
def cli() -> None:
    """Record a multi-agent application, fine-tune its agents, serve the better team."""


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _hang_up(_number: int, _frame: object) -> None:
    signal.raise_signal(signal.SIGTERM)


def main() -> None:
    """Entry point of the ``marft-agents`` command."""
    # A command that is asked to end cleans up after itself, whichever way it is asked.
    signal.signal(signal.SIGTERM, _interrupt)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        # Its terminal was closed; under nohup it goes on.
        signal.signal(signal.SIGHUP, _hang_up)
    try:
        code = cli.main(prog_name="marft-agents", standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("marft-agents: interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (MarftError, OSError) as error:
        # Of several processes one speaks: an error of that one, or of what all read, is all's.
        if os.environ.get("RANK", "0") == "0" or os.environ.get("MARFT_VERBOSE") == "1":
            click.echo(f"marft-agents: {printable(' '.join(str(error).split()))}", err=True)
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)
