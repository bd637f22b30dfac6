"""From what ``serve`` is told to who may do what.

Invariant: a server that others can reach has a key for applications before it listens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from marft_agents.errors import ConfigError
from marft_agents.serving.access import Access
from marft_agents.serving.keys import Client, Key, Keyring, checked_key_name, digest_of
from marft_agents.serving.refusals import is_loopback

NamedKey = tuple[str, str]


def make_access(
    operator_key: str, api_key: str | None, api_keys: Sequence[NamedKey], path: Path | None
) -> Access:
    """Keys from variables, by name, and those of a file.

    Raises:
        ConfigError: for a file that cannot be used, or two names for one key.
    """
    named = [
        Key(Client(checked_key_name(name), "application"), digest_of(key)) for name, key in api_keys
    ]
    keyring = Keyring(named, path)
    if len({key.digest for key in keyring.keys}) < len(keyring.keys):
        raise ConfigError("two names of keys share one key; give each client its own")
    return Access(operator_key, api_key, keyring)


def check_access(
    host: str, api_key: str | None, api_keys: Sequence[NamedKey], path: Path | None
) -> None:
    """Refuse to be reachable from other machines without a key.

    Raises:
        ConfigError: naming the flag.
    """
    access = make_access("unused", api_key, api_keys, path)
    if is_loopback(host) or access.needs_key:
        return
    raise ConfigError(
        f"--host {host} is reachable from other machines; put a key into a variable and name it"
        " with --api-key-env NAME, or give a file with a key of role application: --keys FILE,"
        " or listen on 127.0.0.1"
    )
