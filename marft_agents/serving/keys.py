"""Keys with names and roles, from variables and from a file that may change while we serve.

Invariant: only digests of keys are kept; a token is compared with every one of them, in constant
time. A key file that others can read is refused; one that breaks while we serve changes nothing and
is said.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import stat
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from marft_agents.errors import ConfigError
from marft_agents.schema import JsonDict, adapter_slug, parse_served_name

_log = logging.getLogger(__name__)
Role = Literal["application", "operator", "monitor"]
MIN_KEY = 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIELDS = {"role", "key", "sha256", "agents", "max_in_flight"}
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Client:
    """Whose key a request bears; ``name`` is for metrics and logs.

    ``agents``: the only ones it may ask, by their adapters' names; ``None`` for all.
    ``max_in_flight``: how many of its requests may be under way at once.
    """

    name: str
    role: Role
    agents: frozenset[str] | None = None
    max_in_flight: int | None = None

    def may_ask(self, agent: str) -> bool:
        """Whether it may ask ``agent``, in any spelling, or one of its versions."""
        if self.agents is None or agent in self.agents:
            return True
        version = parse_served_name(agent)
        try:
            return adapter_slug(agent if version is None else version[0]) in self.agents
        except ConfigError:
            return False


@dataclass(frozen=True, slots=True)
class Key:
    """A client and the SHA-256 of its key."""

    client: Client
    digest: bytes


def digest_of(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode()).digest()


def checked_key_name(name: str) -> str:
    """A key's name as it may stand in metrics and logs.

    Raises:
        ConfigError: when it is none.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name[:40]!r} is no name of a key; use 1 to 64 letters, digits, . _ - beginning with"
            " a letter or a digit"
        )
    return name


def key_from(name: str, entry: Mapping[str, Any]) -> Key:
    """One entry of a key file.

    Raises:
        ConfigError: naming the field.
    """
    checked_key_name(name)
    if unknown := sorted(entry.keys() - _FIELDS):
        raise ConfigError(f"key {name}: unknown field {unknown[0]!r}; known: {sorted(_FIELDS)}")
    role = entry.get("role", "application")
    if role not in get_args(Role):
        raise ConfigError(f"key {name}: role is one of {', '.join(get_args(Role))}")
    return Key(
        Client(name, cast("Role", role), _agents(name, entry), _most(name, entry)),
        _digest(name, entry),
    )


def _digest(name: str, entry: Mapping[str, Any]) -> bytes:
    key, digest = entry.get("key"), entry.get("sha256")
    if (key is None) == (digest is None):
        raise ConfigError(f"key {name}: give either key or sha256")
    if key is None:
        if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise ConfigError(f"key {name}: sha256 is 64 characters 0-9 a-f")
        return bytes.fromhex(digest)
    if not isinstance(key, str) or len(key) < MIN_KEY or not (key.isascii() and key.isprintable()):
        raise ConfigError(f"key {name}: a key has at least {MIN_KEY} printable ASCII characters")
    return digest_of(key)


def _agents(name: str, entry: Mapping[str, Any]) -> frozenset[str] | None:
    agents: Any = entry.get("agents")
    if agents is None:
        return None
    listed = cast("list[Any]", agents) if isinstance(agents, list) else []
    if not listed or not all(isinstance(agent, str) for agent in listed):
        raise ConfigError(f"key {name}: agents is a list of names, or left out for all")
    return frozenset(adapter_slug(agent) for agent in listed)


def _most(name: str, entry: Mapping[str, Any]) -> int | None:
    most: Any = entry.get("max_in_flight")
    if most is None or (isinstance(most, int) and not isinstance(most, bool) and most > 0):
        return most
    raise ConfigError(f"key {name}: max_in_flight is a number above 0, or left out")


def read_entries(path: Path) -> dict[str, JsonDict]:
    """The entries of a private key file, unchecked, by name.

    Raises:
        ConfigError: when it cannot be read, others can read it, or it is no JSON or TOML.
    """
    try:
        with path.open("rb") as file:
            info = os.fstat(file.fileno())
            data = file.read()
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path} ({error.strerror or error})") from error
    if info.st_mode & _others(info.st_uid):
        raise ConfigError(f"others may read the key file {path}; chmod 600 it")
    try:
        loaded: Any = tomllib.loads(data.decode()) if path.suffix == ".toml" else json.loads(data)
    except (ValueError, RecursionError):  # no cause: it would quote the file
        raise ConfigError(f"the key file {path} is no valid JSON (or TOML, as .toml)") from None
    keys: Any = cast("JsonDict", loaded).get("keys") if isinstance(loaded, dict) else None
    if not isinstance(keys, dict) or len(cast("JsonDict", loaded)) != 1:
        raise ConfigError(f'the key file {path} is {{"keys": {{"<name>": {{...}}}}}}')
    entries = cast("JsonDict", keys)
    for name, entry in entries.items():
        if not isinstance(entry, dict):
            raise ConfigError(f"{path}: key {name[:40]!r} is no table of fields")
    return entries


def _others(owner: int) -> int:
    """Rights that nobody else may have; the group may read what another user owns.

    That is how containers are given secrets: the file is root's, and this user reads it by group.
    """
    ours = not hasattr(os, "geteuid") or owner == os.geteuid()
    return stat.S_IRWXO | (stat.S_IRWXG if ours else stat.S_IWGRP | stat.S_IXGRP)


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys of a private key file.

    Raises:
        ConfigError: when it cannot be used, naming the entry and the field, never a key.
    """
    keys = [key_from(name, entry) for name, entry in read_entries(path).items()]
    if len({key.digest for key in keys}) < len(keys):
        raise ConfigError(f"{path}: two names share one key")
    return tuple(keys)


class Keyring:
    """Every key of one gateway; ``path`` is looked at again while it is used."""

    def __init__(
        self,
        keys: Iterable[Key] = (),
        path: Path | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fixed = tuple(keys)
        self._path = path
        self._now = now
        self._seen = self._stamp()
        self._filed = read_keys(path) if path is not None else ()
        self._next_look = now() + _LOOK_EVERY_S

    @property
    def keys(self) -> tuple[Key, ...]:
        self._look()
        return self._fixed + self._filed

    def has(self, role: Role) -> bool:
        """Whether any key has that role."""
        return any(key.client.role == role for key in self.keys)

    def client(self, *tokens: str | None) -> Client | None:
        """Whose key one of ``tokens`` is, as they stand in headers."""
        found: Client | None = None
        sent = [token.encode("latin-1", "replace") for token in tokens if token]
        digests = [hashlib.sha256(token).digest() for token in sent]
        for key in self.keys:
            for digest in digests:
                if hmac.compare_digest(key.digest, digest):
                    found = key.client
        return found

    def _stamp(self) -> tuple[int, ...] | None:
        if self._path is None:
            return None
        try:
            info = self._path.stat()
        except OSError:
            return ()
        return info.st_mtime_ns, info.st_ctime_ns, info.st_size, info.st_ino

    def _look(self) -> None:
        if self._path is None or self._now() < self._next_look:
            return
        self._next_look = self._now() + _LOOK_EVERY_S
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            if self._path.is_fifo():  # opening it would wait for a writer, and all requests with it
                raise ConfigError(f"the key file {self._path} is a pipe, which is not read again")
            self._filed = read_keys(self._path)
        except ConfigError as error:
            _log.error("%s; the keys read before stay valid", error)
        else:
            _log.warning("read %d keys again from %s", len(self._filed), self._path)
