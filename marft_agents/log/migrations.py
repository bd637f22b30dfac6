"""Format changes, one small numbered step each.

Invariant: ``MIGRATIONS[n]`` turns a record of version n into one of version n + 1 and is never
changed afterwards, so a log of any age can be read. A record without a version is of the current
one; a record from the future is refused, never guessed at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from marft_agents.schema import SCHEMA_VERSION, JsonDict

Migration = Callable[[JsonDict], JsonDict]

MIGRATIONS: Mapping[int, Migration] = {}
"""Empty: version 1 is the first."""


def migrate(
    record: JsonDict,
    *,
    version: int = SCHEMA_VERSION,
    migrations: Mapping[int, Migration] = MIGRATIONS,
) -> JsonDict:
    """``record`` as ``version`` would have written it.

    Raises:
        ValueError: the record's version is newer, not a number, or has no way up.
    """
    found = record.get("schema_version", version)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ValueError(f"schema_version is {found!r}, not a number from 1 up")
    if found > version:
        raise ValueError(
            f"written by a newer version (schema_version {found}, this one reads up to {version});"
            " upgrade marft-agents"
        )
    for step in range(found, version):
        if step not in migrations:
            raise ValueError(f"no migration from schema_version {step} to {step + 1}")
        record = migrations[step](dict(record)) | {"schema_version": step + 1}
    return record
