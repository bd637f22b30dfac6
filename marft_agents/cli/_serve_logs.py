"""The options of ``serve`` that say what it writes about itself, and where."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from marft_agents.serving.log_lines import LEVELS, json_say, logging_to

_log = logging.getLogger(__name__)
_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--log-format",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        help="How requests, swaps and replicas are logged; with json, stdout is JSON, too.",
    ),
    click.option(
        "--log-level",
        type=click.Choice(LEVELS),
        default="info",
        show_default=True,
        help="The least that is logged; info has a line for every request.",
    ),
    click.option(
        "--log-file",
        metavar="FILE",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Log into this file instead of stderr; opened anew after it was moved away.",
    ),
)


def log_options(command: _Command) -> _Command:
    """The options, in their order."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@contextlib.contextmanager
def logged(
    options: Mapping[str, Any], say: Callable[[str], None]
) -> Generator[Callable[[str], None]]:
    """Log while the block runs; yields how to announce something.

    Raises:
        ConfigError: the file cannot be written.
    """
    kind = options["log_format"]
    with logging_to(kind, options["log_level"], options["log_file"]):
        yield _heard_or_logged(json_say(say) if kind == "json" else say)


def _heard_or_logged(say: Callable[[str], None]) -> Callable[[str], None]:
    """A reader of stdout that left, or a full disk behind it, must not end the server."""

    def told(text: str) -> None:
        try:
            say(text)
        except (OSError, ValueError) as error:
            _log.warning("stdout takes nothing (%s): %s", error, text)

    return told
