"""What the commands of ``keys`` share: reading and writing the file.

Invariant: the file is private from its first byte, and is replaced as a whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import click

from marft_agents.errors import ConfigError
from marft_agents.schema import JsonDict
from marft_agents.serving.keys import key_from, read_entries

file_argument = click.argument("file", type=click.Path(dir_okay=False, path_type=Path))


def entries_of(file: Path, *, missing_is_empty: bool = False) -> dict[str, JsonDict]:
    """The checked entries of a key file.

    Raises:
        ConfigError: when it cannot be used.
    """
    if missing_is_empty and not file.exists():
        return {}
    entries = read_entries(file)
    for name, entry in entries.items():
        key_from(name, entry)
    return entries


def write_entries(file: Path, entries: Mapping[str, JsonDict]) -> None:
    """Replace the file.

    Raises:
        ConfigError: when it cannot be written, or is TOML.
    """
    if file.suffix == ".toml":
        raise ConfigError(f"{file} is TOML, which is edited by hand; this command writes JSON")
    text = json.dumps({"keys": entries}, indent=2, sort_keys=True) + "\n"
    try:
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=".keys-")  # with mode 0600
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.write(text)
                out.flush()
                os.fsync(out.fileno())
            Path(name).replace(file)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise
    except OSError as error:
        raise ConfigError(f"cannot write {file} ({error.strerror or error})") from error
