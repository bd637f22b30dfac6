"""The options of ``serve`` that say who may ask for what, and how much."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from marft_agents.errors import ConfigError
from marft_agents.serving.admission import MAX_IN_FLIGHT

_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--api-key-env",
        metavar="NAME",
        multiple=True,
        help="Variable with a key that clients may send; repeatable, each client its own.",
    ),
    click.option(
        "--keys",
        metavar="FILE",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Keys with names and roles, read again when it changes; see `marft-agents keys`.",
    ),
    click.option(
        "--max-in-flight",
        type=click.IntRange(min=1),
        help="Requests under way at once; a few more wait, the rest is told when to come again."
        f"  [default: {MAX_IN_FLIGHT} a replica]",
    ),
    click.option(
        "--allow-field",
        "allow_fields",
        metavar="NAME",
        multiple=True,
        help="Pass this field of requests on whatever it does, without a limit; repeatable.",
    ),
    click.option(
        "--allow-media-urls",
        is_flag=True,
        help="Let requests make the engine fetch http and https addresses.",
    ),
    click.option(
        "--allowed-host",
        "allowed_hosts",
        metavar="NAME",
        multiple=True,
        help="A further name that clients may call this server by; repeatable.",
    ),
)


def access_options(command: _Command) -> _Command:
    """The options, in their order."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def key_from(variable: str | None) -> str | None:
    """The key in an environment variable.

    Raises:
        ConfigError: when it is empty, or no header could carry it.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"the environment variable {variable!r} is empty; put the API key there")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"the key in {variable!r} has characters that no header can carry")
    return key


def access_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``ServeSettings``."""
    names: tuple[str, ...] = tuple(dict.fromkeys(options["api_key_env"]))
    return {
        "api_keys": tuple((name, key_from(name)) for name in names),
        "keys": options["keys"],
        "max_in_flight": options["max_in_flight"],
        "allow_fields": options["allow_fields"],
        "allow_media_urls": options["allow_media_urls"],
        "allowed_hosts": options["allowed_hosts"],
    }
